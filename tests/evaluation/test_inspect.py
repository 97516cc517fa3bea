"""``daric inspect``: what it draws, to scale, and what it prints as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from daric_rag import cli, cli_common
from daric_rag.engine import ChunkedPrompt, Completion, ReuseStats
from daric_rag.evaluation.trace_view import (
    chunk_bar,
    is_plain,
    show_no_trace,
    show_trace,
    window_bar,
)
from daric_rag.trace import ChunkTrace, RequestTrace, TraceEvent

TRACE = RequestTrace(
    100,
    (
        ChunkTrace(0, 10, "gpu_prefix"),
        ChunkTrace(10, 40, "contiguous_hit", 30, "Town archive"),
        ChunkTrace(40, 60, "generated", 0, "Räte"),
        ChunkTrace(60, 80, "disjoint_hit", 20),
        ChunkTrace(80, 90, "mixed", 5),
        ChunkTrace(90, 100, "recomputed"),
    ),
    ((40, 45), (60, 61), (90, 100)),
    (
        TraceEvent("wait", 0.0, 0.01),
        TraceEvent("generate", 0.01, 0.04),
        TraceEvent("first_token", 0.04, 0.04),
    ),
)


def drawn(trace: RequestTrace, width: int, *, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
    )
    show_trace(console, trace)
    return out.getvalue()


def test_chunks_are_drawn_to_scale() -> None:
    bar = chunk_bar(TRACE, 20, plain=True).plain
    assert bar == "==######++++%%%%~~.."


def test_windows_are_drawn_on_the_same_scale_and_a_short_one_shows() -> None:
    assert window_bar(TRACE, 20, plain=True).plain == "        ^   ^     ^^"
    assert window_bar(TRACE, 10, plain=True).plain == "    ^ ^  ^"


@pytest.mark.parametrize("width", [1, 3, 7, 40, 99, 160])
def test_bars_are_as_wide_as_asked(width: int) -> None:
    assert len(chunk_bar(TRACE, width)) == len(window_bar(TRACE, width)) == width


def test_what_no_chunk_covers_stays_empty() -> None:
    trace = RequestTrace(10, (ChunkTrace(2, 4, "generated"),))
    assert chunk_bar(trace, 10, plain=True).plain == "  ++      "


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("colour", [True, False])
def test_no_line_is_wider_than_the_terminal(width: int, colour: bool) -> None:
    console = Console(width=width)
    text = console.render_str(drawn(TRACE, width), markup=False).plain
    assert max(map(len, text.splitlines())) <= width


def test_a_terminal_without_colour_gets_ascii_but_for_titles() -> None:
    assert drawn(TRACE, 100).replace("Räte", "").isascii()
    coloured = drawn(TRACE, 100, colour=True)
    assert "\x1b[" in coloured
    assert "█" in coloured
    assert is_plain(Console(file=io.StringIO(), no_color=True, force_terminal=True))


def test_the_time_line_has_milliseconds_and_every_phase_follows_the_one_before() -> (
    None
):
    lines = [line for line in drawn(TRACE, 80).splitlines() if " ms" in line]
    assert [line.split("  ")[0] for line in lines] == [
        "wait",
        "generate",
        "first token",
    ]
    assert "10.0 ms" in lines[0]
    assert "30.0 ms" in lines[1]
    assert "at 40.0 ms" in lines[2]
    assert lines[0].rindex("#") < lines[1].index("#")


def test_every_kind_present_has_its_legend() -> None:
    text = drawn(TRACE, 120)
    for mark in ("== ", "## ", "%% ", "++ ", ".. ", "~~ ", "^^ window"):
        assert mark in text
    short = RequestTrace(4, (ChunkTrace(0, 4, "generated"),))
    assert "##" not in drawn(short, 120)


def test_a_missing_trace_is_said_to_be_missing() -> None:
    out = io.StringIO()
    show_no_trace(Console(file=out, width=80))
    assert "sent no trace" in out.getvalue()


class TracingEngine:
    """Answers everything with one trace."""

    def __init__(self, trace: RequestTrace | None) -> None:
        self.trace = trace
        self.prompts: list[ChunkedPrompt] = []
        self.calls: list[str] = []
        self.closed = False

    def clear_prefix_cache(self) -> None:
        self.calls.append("clear")

    def generate(self, prompt: ChunkedPrompt, **options: Any) -> Completion:
        assert options["trace"] is True
        self.prompts.append(prompt)
        self.calls.append("generate")
        stats = ReuseStats(prompt_tokens=100, generated_tokens=20)
        return Completion("Two.", (1,), "stop", None, 0.05, stats, self.trace)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TracingEngine:
    engine = TracingEngine(TRACE)
    monkeypatch.setattr(cli_common, "_start_engine", lambda *_: engine)
    monkeypatch.setattr("daric_rag.models.resolve_model", lambda model: model)
    return engine


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["inspect", *arguments])


def test_files_become_documents_with_their_names(
    engine: TracingEngine, tmp_path: Path
) -> None:
    files = [tmp_path / "one.txt", tmp_path / "two.md"]
    for file in files:
        file.write_text(f"Text of {file.name}.")
    result = invoke(*map(str, files), "--question", "Which?")
    assert result.exit_code == 0, result.output
    assert engine.prompts[0].titled_texts() == [
        ("Text of one.txt.", "one.txt"),
        ("Text of two.md.", "two.md"),
    ]
    assert engine.prompts[0].question == "Which?"
    assert "Town archive" in result.output
    assert engine.closed


def test_json_is_one_document_with_the_trace(engine: TracingEngine) -> None:
    result = invoke("--demo", "--json")
    report = json.loads(result.stdout)
    assert RequestTrace.from_dict(report["trace"]) == TRACE
    assert report["reuse"]["generated_tokens"] == 20
    assert engine.prompts[0].texts()


def test_every_run_starts_with_an_empty_prefix_cache(engine: TracingEngine) -> None:
    assert invoke("--demo", "--runs", "2").exit_code == 0
    assert engine.calls == ["clear", "generate"] * 2


def test_an_engine_without_traces_is_said_to_be_one(engine: TracingEngine) -> None:
    engine.trace = None
    assert "sent no trace" in invoke("--demo").output
    assert json.loads(invoke("--demo", "--json").stdout)["trace"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "either files"),
        (["--demo", "a.txt"], "either files"),
        (["a.txt"], "--question"),
        (["absent.txt", "--question", "Which?"], "cannot be read"),
    ],
)
def test_what_makes_no_prompt_is_refused_before_an_engine_starts(
    engine: TracingEngine, arguments: list[str], said: str
) -> None:
    result = invoke(*arguments)
    assert said in str(result.exception)
    assert not engine.prompts
    assert not engine.closed
