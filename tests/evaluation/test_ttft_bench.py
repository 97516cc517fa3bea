from __future__ import annotations

import io
import itertools
import json
from typing import Any

import pytest
from rich.console import Console

from daric_rag.errors import EngineError, PromptTooLongError
from daric_rag.evaluation import ttft_bench
from daric_rag.evaluation.bench_view import bench_table
from daric_rag.evaluation.ttft_bench import RUNS_PER_ROUND, VARIANTS, TtftBench
from daric_rag.evaluation.workloads import TtftShape
from tests.evaluation.fakes import FakeEngine

SHAPE = TtftShape.of_size(1300)


def measure(engine: FakeEngine, repeats: int = 3, **options: Any) -> dict[str, Any]:
    return TtftBench(engine, repeats=repeats, **options).measure(SHAPE)


@pytest.fixture(autouse=True)
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the streams a clock that goes 1 s per look."""
    clock = itertools.count()
    monkeypatch.setattr(ttft_bench.time, "perf_counter", lambda: next(clock))


def test_row_holds_what_each_variant_takes() -> None:
    row = measure(FakeEngine())
    n = row["recomputed_tokens"]
    assert row["prompt_tokens"] == row["full_prefill_ms"] == SHAPE.prompt_len
    assert row["host_ms"] == row["disk_ms"] == row["floor_ms"] == n
    assert row["floor_tokens"] == n
    assert row["full_reuse_ms"] == SHAPE.question_len
    assert row["cold_ms"] == n + SHAPE.num_documents * SHAPE.document_len
    assert row["tpot_ratio"] == 1
    assert row["tpot_ms"] == 1000
    assert row["spread_ms"]["host"] == [n, n]
    assert json.loads(json.dumps(row)) == row


def test_variants_take_turns_and_the_first_round_is_extra() -> None:
    runs: list[str] = []
    measure(FakeEngine(), repeats=2, on_run=runs.append)
    assert runs[0] == "storing"
    rounds = [runs[1 + i * RUNS_PER_ROUND :][:RUNS_PER_ROUND] for i in range(3)]
    assert rounds[0] == rounds[1] == rounds[2]
    assert set(VARIANTS) < set(rounds[0])
    assert len(runs) == 1 + 3 * RUNS_PER_ROUND


@pytest.mark.parametrize(
    "wrong",
    [
        {"contiguous_hit_tokens": 0},
        {"contiguous_hit_tokens": 5},
        {"generated_tokens": 5},
        {"recomputed_tokens": 5},
        {"gpu_prefix_tokens": 32},
    ],
)
def test_run_that_is_not_what_it_claims_is_no_figure(wrong: dict[str, int]) -> None:
    with pytest.raises(EngineError, match=r"not what '.*' claims"):
        measure(FakeEngine(**wrong))


def test_host_copies_in_the_disk_variant_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeEngine, "clear_host", lambda self: None)
    with pytest.raises(EngineError, match="'disk'"):
        measure(FakeEngine())


def test_prompt_beyond_the_context_is_refused_before_anything_runs() -> None:
    engine = FakeEngine()
    with pytest.raises(PromptTooLongError):
        TtftBench(engine, repeats=1).check(TtftShape.of_size(8190))
    assert engine.calls == []


def test_table_shows_the_ratios() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(bench_table([measure(FakeEngine())], repeats=3))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1,304" in text
    assert "…" not in text
    assert "3.4x" in text
    assert "1.000" in text
