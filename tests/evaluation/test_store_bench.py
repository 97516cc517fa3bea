from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from daric_rag.evaluation import store_measures
from daric_rag.evaluation.store_bench import StoreShape, run_store_bench
from daric_rag.evaluation.store_bench_view import store_bench_table

SHAPE = StoreShape(num_records=3, num_tokens=4, num_layers=2, head_dim=8)
TOTAL_BYTES = 3 * 2 * 2 * 4 * 3 * 8 * 2


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Rows of a bench whose every measure takes 1 ns more than the one before."""
    readings = itertools.chain.from_iterable(
        (0.0, n * 1e-9) for n in itertools.count(1)
    )
    monkeypatch.setattr(store_measures.time, "perf_counter", lambda: next(readings))
    return {
        row["measure"]: row
        for row in run_store_bench(tmp_path / "new", shape=SHAPE, repeats=1)
    }


def test_rows_hold_speeds_and_ratios(rows: dict[str, dict[str, Any]]) -> None:
    count = 10 if "encrypted_read" in rows else 8
    copy_ns, host_read_ns = count + 1, count + 2  # in the second round
    row = rows["host_read"]
    assert row["gb_per_s"] == round(TOTAL_BYTES / host_read_ns, 3)
    assert row["ratio"] == round(copy_ns / host_read_ns, 3)
    assert row["ratio_spread"] == [row["ratio"], row["ratio"]]
    assert rows["disk_read"]["baseline"] == "readinto"
    assert (row["required"], rows["disk_read"]["required"]) == (0.8, 0.6)
    assert rows["disk_write"]["required"] is None


def test_the_table_shows_each_measure(rows: dict[str, dict[str, Any]]) -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(store_bench_table([*rows.values()], repeats=1))
    lines = out.getvalue().splitlines()
    assert all(any(name in line for line in lines) for name in rows)
    assert max(map(len, lines)) <= 80


def test_steps_are_announced_and_bytes_arrive(tmp_path: Path) -> None:
    steps: list[str] = []
    rows = run_store_bench(tmp_path, shape=SHAPE, repeats=2, on_step=steps.append)
    assert steps.count("disk_read") == 3
    assert all(row["ratio"] > 0 for row in rows)
    files = list((tmp_path / "plain").rglob("*.val"))
    assert len(files) == SHAPE.num_records
