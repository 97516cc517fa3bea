"""The benchmark measures what it says, on an engine whose speed is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daric_rag.engine import DocumentOutcome
from daric_rag.errors import ConfigError
from daric_rag.evaluation import prewarm_bench
from daric_rag.evaluation.prewarm_bench import passages_of, run_prewarm_bench
from tests.prewarm.engines import DiskEngine

TEXTS = [f"passage {number} of some words" for number in range(10)]


class TimedEngine(DiskEngine):
    """Prefills a token in 1 ms and pre-warms one in 2 ms."""

    now = 0.0

    def document_layout(self, part: Any) -> Any:
        text = part if isinstance(part, str) else part.text
        return super().document_layout(SimpleNamespace(text=text))

    def prewarm_each(self, documents: Sequence[Any]) -> list[DocumentOutcome]:
        outcomes = super().prewarm_each(documents)
        TimedEngine.now += 0.002 * sum(outcome.num_tokens for outcome in outcomes)
        return outcomes

    def generate_batch(self, prompts: Sequence[Any], **options: Any) -> list[Any]:
        assert options == {"max_tokens": 1, "reuse": "off"}
        TimedEngine.now += 0.001 * sum(len(prompt.chunks[0]) for prompt in prompts)
        return []

    def clear_prefix_cache(self) -> None:
        self.is_clear = True


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TimedEngine]:
    monkeypatch.setattr(prewarm_bench.time, "perf_counter", lambda: TimedEngine.now)
    with closing(TimedEngine(tmp_path / "store")) as engine:
        yield engine


def test_rates_are_tokens_over_seconds(engine: TimedEngine, tmp_path: Path) -> None:
    steps: list[str] = []
    row = run_prewarm_bench(engine, TEXTS, tmp_path, parts=3, on_run=steps.append)
    assert row == {
        "num_passages": 9,
        "num_tokens": 45,
        "parts": 3,
        "prefill_tokens_per_s": 1000.0,
        "prewarm_tokens_per_s": 500.0,
        "ratio": 0.5,
    }
    assert steps == [
        "warming up",
        *("prefill 1", "prewarm 1", "prewarm 2", "prefill 2", "prefill 3", "prewarm 3"),
    ]
    assert engine.is_clear


def test_too_few_passages_are_refused(engine: TimedEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give more"):
        run_prewarm_bench(engine, TEXTS[:3], tmp_path)


def test_a_store_that_has_them_is_refused(engine: TimedEngine, tmp_path: Path) -> None:
    run_prewarm_bench(engine, TEXTS, tmp_path)
    with pytest.raises(ConfigError, match="empty store"):
        run_prewarm_bench(engine, TEXTS, tmp_path)


def test_passages_are_distinct() -> None:
    records = [SimpleNamespace(chunks=["a", " ", "b"]), SimpleNamespace(chunks=["a"])]
    assert passages_of(records, 2) == ["a", "b"]
    with pytest.raises(ConfigError, match="2 passages and 3"):
        passages_of(records, 3)
