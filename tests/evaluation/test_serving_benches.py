from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from daric_rag import Completion, bench_cli
from daric_rag.config import DaricConfig
from daric_rag.engine import Delta
from daric_rag.errors import ConfigError, EngineError, PromptError
from daric_rag.evaluation.cold_bench import run_cold_bench
from daric_rag.evaluation.load_bench import LoadBench
from daric_rag.evaluation.replay import demo_replay, load_replay, parse_rates
from daric_rag.evaluation.serving_view import cold_table, load_table, stall_table
from daric_rag.evaluation.stall_bench import StallBench
from daric_rag.evaluation.workloads import TtftShape
from tests.evaluation.fakes import FakeEngine

SHAPE = TtftShape(4, 100)
RATE = 2000.0


class ServingFake(FakeEngine):
    """Streams tokens one a turn of the loop; admitting a prompt takes some turns."""

    def __init__(self, *, stream_len: int | None = None, **wrong: int) -> None:
        super().__init__(**wrong)
        self.stream_len = stream_len
        self.namespaces: list[str | None] = []
        self.prewarmed: list[str | None] = []
        self.running = 0

    def prewarm(self, documents: Any, *, namespace: str | None = None) -> int:
        self.prewarmed.append(namespace)
        for text in documents:
            self.stored.add((namespace, words_of(text)))
        return len(documents)

    async def astream(self, prompt: Any, **options: Any) -> AsyncIterator[Delta]:
        self.namespaces.append(options.setdefault("namespace", None))
        done = self.generate(prompt, **options)
        self.running += 1
        try:
            for token in done.token_ids[: self.stream_len]:
                await asyncio.sleep(0.0005)
                last = token == done.token_ids[-1]
                yield Delta("x", (token,), completion=done if last else None)
        finally:
            self.running -= 1

    async def agenerate(self, prompt: Any, **options: Any) -> Completion:
        await asyncio.sleep(0.01)
        self.namespaces.append(options["namespace"])
        return self.generate(prompt, **options)


def words_of(text: str) -> tuple[int, ...]:
    return tuple(hash(word) % 2**31 for word in text.split())


def load(engine: ServingFake, num: int = 30, **options: Any) -> LoadBench:
    return LoadBench(engine, demo_replay(num, 3), max_tokens=3, seed=1, **options)


def render(table: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    assert "…" not in out.getvalue()  # nothing was cut off
    return out.getvalue()


def test_load_counts_what_is_behind_the_warm_up_and_daric_hits() -> None:
    engine = ServingFake()
    sent: list[str] = []
    bench = load(engine, on_request=sent.append)
    rows = [bench.measure(RATE, mode) for mode in ("off", "daric")]
    assert [row["requests"] for row in rows] == [24, 24]
    assert rows[0]["prompt_tokens"] == rows[1]["prompt_tokens"]
    assert rows[0]["store_hit_share"] == 0
    # Six warm-up requests of eight documents fill most of three pools of twelve.
    assert rows[1]["store_hit_share"] > 0.5
    assert len(sent) == 60
    assert sum("warm-up" in name for name in sent) == 12
    assert json.loads(json.dumps(rows)) == rows
    assert "daric" in render(load_table(rows))


def test_every_load_run_begins_with_nothing_stored() -> None:
    engine = ServingFake()
    bench = load(engine)
    first, second = (bench.measure(RATE, "daric") for _ in range(2))
    assert first["store_hit_share"] == second["store_hit_share"]
    assert len(set(engine.namespaces)) == 2


def test_prewarmed_runs_begin_with_every_document() -> None:
    engine = ServingFake()
    bench = load(engine, prewarmed=True)
    ordinary, reused = (bench.measure(RATE, mode) for mode in ("off", "daric"))
    assert ordinary["store_hit_share"] == 0
    assert reused["generated_share"] == 0
    (prewarmed,) = engine.prewarmed
    assert prewarmed == engine.namespaces[-1]
    # Without it, some documents come for the first time.
    assert load(ServingFake()).measure(RATE, "daric")["generated_share"] > 0


def test_load_refuses_when_nothing_is_counted_or_no_token_came() -> None:
    with pytest.raises(EngineError, match="warm-up"):
        LoadBench(ServingFake(), [], max_tokens=1, seed=1).measure(RATE, "off")
    with pytest.raises(EngineError, match="without a token"):
        load(ServingFake(stream_len=0)).measure(RATE, "off")


def test_stall_takes_turns_and_leaves_no_stream_behind() -> None:
    engine = ServingFake()
    runs: list[str] = []
    bench = StallBench(engine, streams=3, shape=SHAPE, on_run=runs.append)
    row = bench.measure(2)
    assert runs == ["admitting, reuse=off", "admitting, reuse=daric"] * 3
    assert engine.running == 0
    assert row["off_ttft_ms"] >= 10
    assert row["off_intervals"] >= 3
    assert row["daric_p50_ms"] <= row["daric_p99_ms"] <= row["daric_max_ms"]
    # Streams are ordinary; every long prompt has a namespace of its own.
    used = [name for name in engine.namespaces if name]
    assert len(set(used)) == len(used) == 6
    assert "ratio" in render(stall_table([row | {"max_num_batched_tokens": 512}]))


def test_stall_refuses_warm_prompts_and_streams_that_end() -> None:
    warm = ServingFake(contiguous_hit_tokens=5)
    with pytest.raises(EngineError, match="not cold"):
        StallBench(warm, streams=1, shape=SHAPE).measure(1)
    assert warm.running == 0
    short = ServingFake(stream_len=4)
    with pytest.raises(EngineError, match="ended before"):
        StallBench(short, streams=2, shape=SHAPE).measure(1)


def test_cold_time_is_a_line_where_every_token_costs_the_same() -> None:
    shapes = [TtftShape(number, 256) for number in (2, 4, 6)]
    runs: list[str] = []
    report = run_cold_bench(FakeEngine(), shapes, repeats=2, on_run=runs.append)
    assert runs[:2] == ["6 documents"] * 2
    assert runs[2:] == ["2 documents", "4 documents", "6 documents"] * 2
    assert report["r_squared"] == pytest.approx(1, abs=1e-3)
    assert report["ms_per_document"] > 256
    assert report["first_over_second"] == 1
    assert "R^2" in render(cold_table(report))


def test_cold_refuses_a_prompt_that_was_stored() -> None:
    with pytest.raises(EngineError, match="not cold"):
        run_cold_bench(FakeEngine(disjoint_hit_tokens=1), [SHAPE], repeats=1)


def test_replay_joins_chunks_and_keeps_a_fifth_for_warm_up(tmp_path: Path) -> None:
    chunks = [{"chunk_id": name, "text": f"<{name}>"} for name in ("system", "a", "b")]
    requests = [
        {"chunk_ids": ["b", "a"], "question": str(i), "phase": phase}
        for i, phase in enumerate(["warmup"] * 4 + ["measured"] * 12)
    ]
    for name, lines in (("async_chunks", chunks), ("async_requests", requests)):
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / f"{name}.jsonl").write_text(text)
    replayed = load_replay(tmp_path, 10)
    assert [one.warm_up for one in replayed] == [True] * 2 + [False] * 8
    assert [one.prompt.question for one in replayed[:3]] == ["0", "1", "4"]
    assert replayed[0].prompt.system == "<system>"
    assert replayed[0].prompt.texts() == ["<b>", "<a>"]
    (tmp_path / "async_chunks.jsonl").write_text(json.dumps(chunks[0]))
    with pytest.raises(PromptError, match="'b' is missing"):
        load_replay(tmp_path, 10)
    with pytest.raises(PromptError, match="cannot be read"):
        load_replay(tmp_path / "none", 10)


def test_demo_replay_reuses_documents_at_other_places() -> None:
    replayed = demo_replay(30, 1)
    assert demo_replay(30, 1) == replayed != demo_replay(30, 2)
    places: dict[str, set[int]] = {}
    for one in replayed:
        for index, text in enumerate(one.prompt.documents):
            places.setdefault(text, set()).add(index)
    assert len(places) <= 36
    assert all(len(found) > 1 for found in places.values())


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "inf", "1,,nan"])
def test_rates_must_be_positive_numbers(text: str) -> None:
    assert parse_rates("0.5, 2") == [0.5, 2.0]
    with pytest.raises(ConfigError, match="rates"):
        parse_rates(text)


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["load", "--rates", "2000", "--requests", "10"], {"ttft_p95_ms", "sustained"}),
        (["stall", "--size", "1k", "--repeats", "1"], {"max_ratio", "streams"}),
        (["cold", "--documents", "2,3", "--repeats", "1"], {"cold_ms"}),
    ],
)
def test_commands_end_in_json(
    arguments: list[str], keys: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []

    def start(
        path: str, *, store: str, config: DaricConfig, **options: Any
    ) -> ServingFake:
        started.append(options)
        return ServingFake()

    monkeypatch.setattr("daric_rag.runtime.embedded.EmbeddedEngine", start)
    monkeypatch.setattr("daric_rag.models.resolve_model", lambda model: model)
    result = CliRunner().invoke(bench_cli.bench_app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert all(keys <= row.keys() for row in report["rows"])
    stalls = arguments[0] == "stall"
    assert started == [{"max_num_batched_tokens": 2048} if stalls else {}]


@pytest.mark.parametrize(
    "arguments", [["load", "--rates", "x"], ["cold", "--documents", "5,5"]]
)
def test_commands_refuse_before_an_engine_starts(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, **__: Any) -> ServingFake:
        pytest.fail("an engine was started")

    monkeypatch.setattr("daric_rag.runtime.embedded.EmbeddedEngine", start)
    result = CliRunner().invoke(bench_cli.bench_app, arguments)
    assert isinstance(result.exception, ConfigError)
