"""The demo on a terminal: a table per question, bars of reuse, a summary."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from daric_rag.engine import ReuseStats
from daric_rag.evaluation.demo import QuestionOutcome
from daric_rag.evaluation.demo_report import Summary, conclusion, summarize
from daric_rag.evaluation.situations import (
    COLD,
    FULL,
    NEW_DOCUMENT,
    REORDERED,
    WARM,
)

__all__ = ["reuse_bar", "show_intro", "show_question", "show_summary", "split_of"]

MEANING = {
    FULL: "ordinary vLLM",
    COLD: "nothing stored yet",
    WARM: "all stored",
    REORDERED: "all moved",
    NEW_DOCUMENT: "one not stored",
}

# (name, style, glyph, ASCII glyph): told apart without colours too.
_PARTS = (
    ("prefix", "blue", "═", "="),
    ("contiguous", "green", "█", "#"),
    ("disjoint", "cyan", "▓", "%"),
    ("generated", "yellow", "▒", "+"),
    ("recomputed", "red", "░", "."),
)
_LEGEND = {
    "prefix": "vLLM's prefix cache",
    "contiguous": "loaded",
    "disjoint": "loaded, behind a missing document",
    "generated": "computed alone and stored",
    "recomputed": "computed in full context",
}
_BAR_LEN = 24


def show_intro(console: Console, *, model: str, store: str, num_questions: int) -> None:
    """Say what is about to be seen."""
    text = Text.assemble(
        ("One question, the same documents, five states of the store. ", "bold"),
        "vLLM keeps the KV cache of a prompt's beginning only; daric_rag keeps every "
        "document's and puts it to use wherever the document stands in the next "
        "prompt, recomputing a few tokens of each. Time to first token (TTFT) is what "
        "the user waits for.\n\n",
        ("Fair play: ", "bold"),
        "vLLM's own prefix cache is emptied before every run, so all reuse shown is "
        "daric_rag's. The engine is warmed up first, since its first passes are "
        "slower. Answers are greedy. Full prefill is an ordinary request to the same "
        "engine.\n\n",
        ("Model ", "dim"),
        model,
        ("   questions ", "dim"),
        str(num_questions),
        ("   store ", "dim"),
        store,
    )
    console.print(Panel(text, title="daric demo", border_style="blue"))


def show_question(console: Console, question: QuestionOutcome, number: int) -> None:
    """Show one question's runs."""
    record = question.record
    asked = record.question.removeprefix("Question:").strip()
    console.print()
    console.print(Text(f"{number}. {asked}", style="bold"))
    facts = f"{len(record.chunks)} documents, {question.prompt_tokens:,} tokens"
    if question.skipped:
        console.print(Text(f"   {facts}. Skipped: {question.skipped}.", "yellow"))
        return
    right = " / ".join(record.answers)
    if len(right) > 160:
        right = right[:159] + "…"
    console.print(Text(f"   {facts}; right: {right}", style="dim"))
    console.print(_runs_table(question, ascii_only=console.options.ascii_only))
    console.print(_answers(question))


def show_summary(console: Console, questions: Sequence[QuestionOutcome]) -> None:
    """Show medians over all questions, the legend and the conclusion."""
    lines = summarize(questions)
    if lines:
        console.print()
        console.print(_legend(ascii_only=console.options.ascii_only))
        console.print()
        console.print(_summary_table(lines))
    console.print(Panel(Text(conclusion(questions)), border_style="green"))
    console.print(
        Text(
            "A model of 135 million parameters changes its answer easily. With a "
            "larger --budget more of each document is recomputed: answers come closer "
            "to full prefill's, and later. Every time above is one run on this "
            "machine; for medians at up to 7.7k tokens run: daric bench ttft",
            style="dim",
        )
    )


def split_of(stats: ReuseStats) -> dict[str, int]:
    """Return a prompt's tokens by where their KV came from in the end; no overlaps.

    Loaded and generated tokens that were recomputed afterwards count as recomputed;
    how many of each kind these are is shared out in proportion.
    """
    prefix = stats.gpu_prefix_tokens
    rest = max(0, stats.prompt_tokens - prefix - stats.recomputed_tokens)
    counts = {
        "contiguous": stats.contiguous_hit_tokens,
        "disjoint": stats.disjoint_hit_tokens,
        "generated": stats.generated_tokens,
    }
    return {
        "prefix": prefix,
        **_shared_out(rest, counts),
        # Without reuse, everything was.
        "recomputed": stats.prompt_tokens - prefix - rest * any(counts.values()),
    }


def reuse_bar(stats: ReuseStats, length: int, *, ascii_only: bool = False) -> Text:
    """Return a bar of `length` cells, a colour and a glyph per origin."""
    cells = _shared_out(length, split_of(stats))
    bar = Text()
    for name, style, glyph, ascii_glyph in _PARTS:
        bar.append((ascii_glyph if ascii_only else glyph) * cells[name], style=style)
    return bar


def _shared_out(total: int, counts: dict[str, int]) -> dict[str, int]:
    """Return `total` shared out in proportion to counts, by largest remainders."""
    whole = sum(counts.values())
    if whole == 0:
        return dict.fromkeys(counts, 0)
    shares = {name: total * count // whole for name, count in counts.items()}
    remainders = sorted(counts, key=lambda name: -(total * counts[name] % whole))
    for name in remainders[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


def _runs_table(question: QuestionOutcome, *, ascii_only: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("TTFT", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("the prompt's KV", no_wrap=True, min_width=_BAR_LEN)
    for name in ("loaded", "computed"):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in question.outcomes:
        stats, is_full = outcome.reuse, outcome.situation == FULL
        table.add_row(
            Text(outcome.situation, style="" if is_full else "bold"),
            f"{outcome.ttft_s * 1e3:,.0f} ms",
            "" if is_full else _speedup(outcome.speedup),
            reuse_bar(stats, _BAR_LEN, ascii_only=ascii_only),
            f"{stats.hit_tokens:,}",
            f"{stats.generated_tokens + stats.recomputed_tokens:,}",
        )
    return table


def _answers(question: QuestionOutcome) -> Table:
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for outcome in question.outcomes:
        answer = Text(" ".join(outcome.answer.split()))
        if outcome.broken_claim:
            answer = Text(f"not what it claims: {outcome.broken_claim}", style="red")
        score = Text("" if outcome.f1 is None else f"F1 {outcome.f1:.2f}")
        score.stylize("green" if outcome.found else "yellow")
        table.add_row(outcome.situation, score, answer)
    return table


def _speedup(factor: float) -> Text:
    return Text(f"{factor:.1f}x", style="bold green" if factor >= 1.05 else "yellow")


def _legend(*, ascii_only: bool) -> Text:
    legend = Text()
    for name, style, glyph, ascii_glyph in _PARTS[1:]:
        legend.append((ascii_glyph if ascii_only else glyph) * 2, style=style)
        legend.append(f" {_LEGEND[name]}   ")
    return legend


def _summary_table(lines: Sequence[Summary]) -> Table:
    table = Table(
        title="Medians over the questions",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
    )
    table.add_column("")
    table.add_column("", style="dim")
    for name in ("TTFT", "speed-up", "least to most", "answered", "F1"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        is_full = line.situation == FULL
        table.add_row(
            line.situation,
            MEANING[line.situation],
            f"{line.ttft_s * 1e3:,.0f} ms",
            "" if is_full else _speedup(line.speedup),
            "" if is_full else f"{line.min_speedup:.1f} to {line.max_speedup:.1f}",
            f"{line.num_found} of {line.num_scored}" if line.num_scored else "",
            "" if line.f1 is None else f"{line.f1:.2f}",
        )
    return table
