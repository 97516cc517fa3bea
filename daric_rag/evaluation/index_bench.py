"""Does the segment index stay fast and small with a million segments?

Each size is built twice, from the same documents of 1 to 4 segments: once to weigh it,
once to time it, since weighing (tracemalloc) slows everything down.

| Figure                      | How it is taken                                        |
|-----------------------------|--------------------------------------------------------|
| `bytes_per_segment`         | what the index allocates; the keys exist beforehand    |
| `worst_bytes_per_segment`   | the same at its worst moment while it doubles, when    |
|                             | the table of keys is moved to a larger one             |
| `match_median_ms`, `_p99_ms`| all 16 documents of a prompt looked up, 500 prompts    |
| `insert_per_s`              | segments, from empty to full                           |
| `evict_per_s`               | segments, the worst fifth, after half was used again   |
| `gc_pause_ms`               | longest of 5 full collections; only the index counts   |
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from daric_rag.errors import ConfigError
from daric_rag.eviction import policy_of
from daric_rag.index import SegmentIndex
from daric_rag.keys import KEY_BYTES, ModelFingerprint, SegmentKey

__all__ = ["SIZES", "index_table", "plot", "run_index_bench"]

SIZES = (10_000, 100_000, 1_000_000)
"""Segments."""

MAX_MATCH_MS = 2.0
MAX_BYTES_PER_SEGMENT = 300
"""What is asked of the index, at any size."""

_ROOT = ModelFingerprint(bytes(KEY_BYTES))
_SEGMENT_LEN = 256  # tokens
_SEGMENT_BYTES = 1_000_000
_CHUNKS_PER_PROMPT = 16
_NUM_PROMPTS = 500
_SEED = 1

_COLUMNS = (
    ("segments", "segments", "{:,.0f}"),
    ("bytes_per_segment", "bytes /\nsegment", "{:.0f}"),
    ("worst_bytes_per_segment", "at\nworst", "{:.0f}"),
    ("match_median_ms", "match\nmedian", "{:.3f}"),
    ("match_p99_ms", "match\np99", "{:.3f}"),
    ("insert_per_s", "inserts\nper s", "{:,.0f}"),
    ("evict_per_s", "evictions\nper s", "{:,.0f}"),
    ("gc_pause_ms", "GC\npause", "{:.1f}"),
)

_PANELS = (
    (
        "match of a 16-document prompt, ms",
        MAX_MATCH_MS,
        {"match_median_ms": "median", "match_p99_ms": "p99"},
    ),
    (
        "bytes per segment",
        MAX_BYTES_PER_SEGMENT,
        {"bytes_per_segment": "settled", "worst_bytes_per_segment": "at worst"},
    ),
)


@dataclass(frozen=True)
class _Corpus:
    """Documents of 1, 2, 3, 4, 1, ... segments, all cut from one list of keys."""

    keys: list[SegmentKey]

    @classmethod
    def of_size(cls, num_segments: int) -> _Corpus:
        rng = random.Random(_SEED)
        digests = (rng.randbytes(KEY_BYTES) for _ in range(num_segments))
        return cls([SegmentKey(digest) for digest in digests])

    def documents(self) -> Iterator[list[SegmentKey]]:
        start, length = 0, 1
        while start < len(self.keys):
            yield self.keys[start : start + length]
            start, length = start + length, length % 4 + 1


def run_index_bench(
    sizes: Sequence[int] = SIZES, on_step: Callable[[str], None] = lambda step: None
) -> list[dict[str, Any]]:
    """Measure the index at each size.

    Args:
        sizes: Numbers of segments, each at least 1.
        on_step: Told what begins now.

    Returns:
        One row of JSON values per size; the unit is at the end of each name.

    Raises:
        ConfigError: A size is below 1.
    """
    if any(size < 1 for size in sizes):
        raise ConfigError(f"sizes are {list(sizes)}; give numbers of segments >= 1")
    rows = []
    for size in sizes:
        on_step(f"{size:,} segments: memory")
        corpus = _Corpus.of_size(size)
        row = {"segments": size} | _weigh(corpus)
        on_step(f"{size:,} segments: time")
        rows.append(row | _time(corpus))
    return rows


def index_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows of `run_index_bench` as a table."""
    table = Table(
        title=f"Segment index (asked: match below {MAX_MATCH_MS:.0f} ms, at most "
        f"{MAX_BYTES_PER_SEGMENT} bytes)",
        title_justify="left",
        title_style="bold",
        caption=f"match: {_CHUNKS_PER_PROMPT} documents of 1-4 segments. Times in ms. "
        "Bytes are beyond the key itself.",
        caption_justify="left",
        box=None,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    for _, title, _ in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(form.format(row[name]) for name, _, form in _COLUMNS))
    return table


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time and memory over the number of segments.

    Args:
        rows: From `run_index_bench`.
        path: Written; its suffix decides the format, such as ``.svg`` or ``.png``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            'plots need matplotlib; run pip install "daric-rag[plots]"'
        ) from error
    segments = [row["segments"] for row in rows]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, panel in zip(figure.subplots(1, 2), _PANELS, strict=True):
        title, limit, lines = panel
        for name, label in lines.items():
            axes.plot(segments, [row[name] for row in rows], marker="o", label=label)
        axes.axhline(limit, color="grey", linestyle="--", label="limit")
        axes.set(title=title, xlabel="segments", xscale="log")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(path)


def _empty_index(corpus: _Corpus) -> SegmentIndex:
    capacity = len(corpus.keys) * _SEGMENT_BYTES
    return SegmentIndex(policy=policy_of("frequency", capacity))


def _insert(index: SegmentIndex, keys: Sequence[SegmentKey]) -> None:
    sizes = [_SEGMENT_BYTES] * len(keys)
    index.insert(_ROOT, keys, [_SEGMENT_LEN] * len(keys), sizes)


def _weigh(corpus: _Corpus) -> dict[str, float]:
    with _tracing_memory():
        index = _empty_index(corpus)
        worst = 0.0
        for keys in corpus.documents():
            tracemalloc.reset_peak()
            _insert(index, keys)
            # Dictionaries double: the second half of the way meets each kind of moment.
            if len(index) > len(corpus.keys) // 2:
                worst = max(worst, tracemalloc.get_traced_memory()[1] / len(index))
        settled = tracemalloc.get_traced_memory()[0] / len(index)
    return {
        "bytes_per_segment": round(settled, 1),
        "worst_bytes_per_segment": round(worst, 1),
    }


def _time(corpus: _Corpus) -> dict[str, float]:
    rng, documents = random.Random(_SEED), list(corpus.documents())
    with _only_new_objects_collected():
        index, start = _empty_index(corpus), time.perf_counter()
        for keys in documents:
            _insert(index, keys)
        insert_s = time.perf_counter() - start
        pauses_s = [_timed(gc.collect) for _ in range(5)]
    prompts = [
        rng.choices(documents, k=_CHUNKS_PER_PROMPT) for _ in range(_NUM_PROMPTS)
    ]
    match_ms = [1e3 * _timed(partial(_match, index, p)) for p in prompts]
    for keys in rng.choices(documents, k=len(documents) // 2):
        index.touch(_ROOT, keys)
    start, num_before = time.perf_counter(), len(index)
    index.evict(index.nbytes // 5 + 1)
    evict_s = time.perf_counter() - start
    return {
        "match_median_ms": round(statistics.median(match_ms), 4),
        "match_p99_ms": round(sorted(match_ms)[len(match_ms) * 99 // 100], 4),
        "insert_per_s": round(num_before / insert_s),
        "evict_per_s": round((num_before - len(index)) / evict_s),
        "gc_pause_ms": round(1e3 * max(pauses_s), 4),
    }


def _match(index: SegmentIndex, prompt: Sequence[Sequence[SegmentKey]]) -> None:
    for keys in prompt:
        index.match(_ROOT, keys)


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@contextmanager
def _tracing_memory() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@contextmanager
def _only_new_objects_collected() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
