from __future__ import annotations

import gc
import io
import json
import sys
import tracemalloc
from pathlib import Path

import pytest
from rich.console import Console

from daric_rag.errors import ConfigError
from daric_rag.evaluation.index_bench import index_table, plot, run_index_bench


@pytest.fixture(scope="module")
def rows():
    return run_index_bench([30, 3000])


def test_rows_are_json_with_one_figure_for_every_question(rows) -> None:
    assert json.loads(json.dumps(rows)) == rows
    assert [row["segments"] for row in rows] == [30, 3000]
    for row in rows:
        assert row["match_p99_ms"] >= row["match_median_ms"] > 0
        assert min(row["insert_per_s"], row["evict_per_s"], row["gc_pause_ms"]) > 0


def test_memory_stays_within_what_is_asked(rows) -> None:
    # A dictionary alone takes at least 24 bytes: less would mean that nothing was seen.
    assert 60 < rows[1]["bytes_per_segment"] <= rows[1]["worst_bytes_per_segment"] < 300


def test_steps_are_told_and_nothing_is_left_switched_on() -> None:
    steps: list[str] = []
    run_index_bench([5], steps.append)
    assert steps == ["5 segments: memory", "5 segments: time"]
    assert not tracemalloc.is_tracing()
    assert gc.get_freeze_count() == 0


def test_sizes_are_checked_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="give numbers of segments"):
        run_index_bench([10, 0])


def test_the_table_fits_a_terminal(rows) -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(index_table([rows[1] | {"segments": 10**6}]))
    lines = out.getvalue().splitlines()
    assert "1,000,000" in out.getvalue()
    assert "…" not in out.getvalue()
    assert max(map(len, lines)) <= 80


def test_the_plot_names_its_axes_and_limits(rows, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(rows, tmp_path / "index.svg")
    assert "<svg" in (tmp_path / "index.svg").read_text()
    plot(rows, tmp_path / "index.png")
    assert (tmp_path / "index.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(
    rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"daric-rag\[plots\]"):
        plot(rows, tmp_path / "index.svg")
    assert not (tmp_path / "index.svg").exists()
