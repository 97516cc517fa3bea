"""How fast does the store read and write, as shares of what the machine can do?

No engine. Every measure runs once per round, in turn, so that a machine that drifts
slows all of them alike; a figure is the median over the rounds, a ratio the median of
the rounds' ratios. The first round, which touches memory for the first time, is not
counted. One request's records are read and written: a dozen documents.

| Measure           | What is timed                 | Set against             |
|-------------------|-------------------------------|-------------------------|
| `host_read`       | `HostTier.read_many`, and one | `numpy.copyto` of as    |
|                   | copy of each payload, as when | many bytes in one piece |
|                   | it is loaded                  |                         |
| `host_write`      | `allocate`, one copy into it, | the same copy           |
|                   | and `HostTier.write`          |                         |
| `disk_read`       | `DiskTier.read_many`, with    | `readinto` of the same  |
|                   | the page cache warm; verifies | files, used memory, as  |
|                   | what it reads                 | many threads            |
| `checksum`        | xxh3 of the payloads, as many | the same `readinto`     |
|                   | threads                       |                         |
| `disk_write`      | `DiskTier.write`, one thread  | plain new files         |
| `encrypted_read`  | as `disk_read`, AES-256-GCM   | `disk_read`             |
| `encrypted_write` | as `disk_write`               | `disk_write`            |

A ratio of 0.8 means 0.8 times the other's speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from daric_rag.evaluation.store_measures import StoreMeasures, StoreShape

__all__ = ["StoreShape", "run_store_bench"]

# Per measure: what it is set against, and the least ratio that the design promises.
_BASELINES: dict[str, tuple[str, float | None]] = {
    "host_read": ("copy", 0.8),
    "disk_read": ("readinto", 0.6),
    "disk_write": ("file_write", None),
    "checksum": ("readinto", None),
    "host_write": ("copy", None),
    "encrypted_read": ("disk_read", None),
    "encrypted_write": ("disk_write", None),
}


def run_store_bench(
    folder: Path,
    *,
    shape: StoreShape | None = None,
    repeats: int = 9,
    on_step: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Measure the read and the write path.

    Args:
        folder: Empty, or to be made, on the disk in question; it takes four times the
            records' bytes. Nothing in it is deleted at the end.
        shape: Of the records.
        repeats: Counted rounds.
        on_step: Called before each measure with its name.

    Returns:
        One row per measure: ``measure``, ``gb_per_s``, ``baseline`` and its
        ``baseline_gb_per_s``, ``ratio``, the ``required`` ratio or None, and the
        ``ratio_spread`` from the least to the greatest.

    Raises:
        StoreError: If the folder cannot be used.
    """
    bench = StoreMeasures(folder, shape or StoreShape())
    try:
        times_s: dict[str, list[float]] = {name: [] for name in bench.names}
        for number in range(1 + repeats):
            for name in bench.names:
                on_step(name)
                elapsed_s = bench.run(name)
                if number:
                    times_s[name].append(elapsed_s)
    finally:
        bench.close()
    total_bytes = bench.total_bytes
    return [_row(name, times_s, total_bytes) for name in _BASELINES if name in times_s]


def _row(
    name: str, times_s: Mapping[str, Sequence[float]], total_bytes: int
) -> dict[str, Any]:
    baseline, required = _BASELINES[name]
    # Pairs of one round, so that a drift between rounds does not show.
    ratios = [
        theirs / ours
        for ours, theirs in zip(times_s[name], times_s[baseline], strict=True)
    ]
    return {
        "measure": name,
        "gb_per_s": _gb_per_s(total_bytes, times_s[name]),
        "baseline": baseline,
        "baseline_gb_per_s": _gb_per_s(total_bytes, times_s[baseline]),
        "ratio": round(statistics.median(ratios), 3),
        "required": required,
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def _gb_per_s(total_bytes: int, times_s: Sequence[float]) -> float:
    return round(total_bytes / statistics.median(times_s) / 1e9, 3)
