"""What a job shows while it runs, and at its end."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from daric_rag.evaluation import prewarm_view
from daric_rag.evaluation.prewarm_view import eta_s, report_lines, shown_progress
from daric_rag.prewarm import Entry, JobReport, Totals

TOTALS = replace(Totals(), computed=3, hit=2, known=1, failed=1, computed_tokens=900)


@pytest.mark.parametrize(
    ("totals", "left_s"),
    [
        # A quarter is done, in ten seconds.
        (Totals(source_bytes=25, engine_bytes=25), 30),
        # An earlier run had done fifty.
        (Totals(source_bytes=75, known_bytes=50, engine_bytes=25), 10),
        # Everything is read, and 75 wait.
        (Totals(source_bytes=25, engine_bytes=25, waiting_bytes=75), 30),
        # Of what was read, every second byte is another shard's.
        (Totals(source_bytes=30, engine_bytes=10, waiting_bytes=10), 10 + 60 * 20 / 40),
        (Totals(source_bytes=100, engine_bytes=25), 0),
        (Totals(source_bytes=120, engine_bytes=60), 0),
        (Totals(source_bytes=50, known_bytes=50), None),
    ],
)
def test_the_time_left_follows_from_what_the_engine_has_done(
    totals: Totals, left_s: float | None
) -> None:
    assert eta_s(replace(totals, engine_s=10), 100) == left_s
    assert eta_s(replace(totals, engine_s=10), None) is None
    assert eta_s(totals, 100) is None


def test_a_terminal_has_a_bar_and_the_failures_above_it() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    totals = replace(TOTALS, source_bytes=50, engine_bytes=50, engine_s=12.0)
    with shown_progress(console, 100) as on_entry:
        on_entry(Entry("[red]a.pdf", "failed", error="is no PDF"), totals)
        on_entry(Entry("b", "computed"), totals)
    text = console.file.getvalue()
    assert "[red]a.pdf: is no PDF" in text
    assert "3 computed, 3 hit, 0 skipped, 1 failed" in text
    assert "tokens/s" in text
    assert "s left" in text


def test_elsewhere_lines_of_json_tell_at_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(prewarm_view.time, "monotonic", lambda: clock[-1])
    totals = replace(TOTALS, source_bytes=50, engine_bytes=50, engine_s=12.0)
    with shown_progress(Console(file=io.StringIO()), 100) as on_entry:
        for now in (105.0, 112.0, 113.0, 123.0):
            clock.append(now)
            on_entry(Entry("b", "computed"), totals)
        on_entry(Entry("a.pdf", "failed", error="is no PDF"), totals)
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second, third = map(json.loads, captured.err.splitlines())
    assert (first["event"], first["computed"], first["failed"]) == ("progress", 3, 1)
    assert (first["elapsed_s"], first["eta_s"]) == (12.0, 12)
    assert first["tokens_per_s"] == 75.0
    assert second["elapsed_s"] == 23.0
    assert third == {"event": "failed", "id": "a.pdf", "error": "is no PDF"}


@pytest.mark.parametrize(
    ("stopped", "mend"), [("budget", "raise --budget"), ("stopped", "run the same")]
)
def test_a_report_says_how_to_go_on(stopped: str, mend: str) -> None:
    lines = report_lines(JobReport(TOTALS, stopped), 3.0)
    assert "3 documents computed (900 tokens, 0 B, 300 tokens/s)" in lines[0]
    assert mend in lines[-1]
    assert len(report_lines(JobReport(TOTALS), 3.0)) == 2
