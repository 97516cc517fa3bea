"""Sums up a demo: medians over the questions, plain sentences, JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from daric_rag.evaluation.demo import Outcome, QuestionOutcome
from daric_rag.evaluation.situations import (
    COLD,
    FULL,
    NEW_DOCUMENT,
    REORDERED,
    SITUATIONS,
    WARM,
)

__all__ = ["Summary", "conclusion", "summarize", "to_json"]


@dataclass(frozen=True, slots=True)
class Summary:
    """One situation over all questions.

    Attributes:
        situation: One of `SITUATIONS`.
        num_runs: Runs that were what they claim.
        ttft_s: Median.
        speedup: Median.
        min_speedup: Least.
        max_speedup: Greatest.
        f1: Mean; None if no question is scored so.
        num_found: Answers that hold an accepted one.
        num_scored: Answers that were looked at for that.
    """

    situation: str
    num_runs: int
    ttft_s: float
    speedup: float
    min_speedup: float
    max_speedup: float
    f1: float | None
    num_found: int
    num_scored: int


def summarize(questions: Iterable[QuestionOutcome]) -> list[Summary]:
    """Return one line per situation that was run as claimed at least once."""
    found: dict[str, list[Outcome]] = {name: [] for name in SITUATIONS}
    for question in questions:
        for outcome in question.outcomes:
            if not outcome.broken_claim:
                found[outcome.situation].append(outcome)
    return [_summary(name, outcomes) for name, outcomes in found.items() if outcomes]


def _summary(name: str, outcomes: Sequence[Outcome]) -> Summary:
    speedups = [outcome.speedup for outcome in outcomes]
    scores = [outcome.f1 for outcome in outcomes if outcome.f1 is not None]
    return Summary(
        situation=name,
        num_runs=len(outcomes),
        ttft_s=statistics.median(outcome.ttft_s for outcome in outcomes),
        speedup=statistics.median(speedups),
        min_speedup=min(speedups),
        max_speedup=max(speedups),
        f1=statistics.fmean(scores) if scores else None,
        num_found=sum(outcome.found is True for outcome in outcomes),
        num_scored=len(scores),
    )


def conclusion(questions: Sequence[QuestionOutcome]) -> str:
    """Say in plain sentences what was seen, good or bad."""
    lines = {line.situation: line for line in summarize(questions)}
    broken = sum(bool(o.broken_claim) for q in questions for o in q.outcomes)
    said: list[str] = []
    if WARM in lines:
        warm = lines[WARM]
        said.append(
            f"Once its documents are stored, a question's first token comes "
            f"{_range(warm)} sooner than with full prefill"
        )
        if REORDERED in lines:
            said[-1] += (
                f"; with the same documents in another order {_range(lines[REORDERED])}"
            )
        if NEW_DOCUMENT in lines:
            said[-1] += f"; with a new one among them {_range(lines[NEW_DOCUMENT])}"
        said[-1] += "."
    if COLD in lines:
        said.append(
            f"The first time, with nothing stored yet, it comes {_range(lines[COLD])}."
        )
    if broken:
        said.append(
            f"{broken} runs were not what they claim and are left out of these figures."
        )
    if FULL in lines and WARM in lines and lines[FULL].num_scored:
        full, warm = lines[FULL], lines[WARM]
        said.append(
            f"The right answer is in {full.num_found} of {full.num_scored} answers "
            f"with full prefill and in {warm.num_found} of {warm.num_scored} warm: "
            f"partial recomputation is an approximation, and a small model feels it."
        )
    return " ".join(said) or "No question was run."


def to_json(questions: Sequence[QuestionOutcome]) -> dict[str, Any]:
    """Return everything that was measured as JSON values."""
    return {
        "questions": [
            {
                "id": question.record.id,
                "question": question.record.question,
                "answers": list(question.record.answers),
                "num_documents": len(question.record.chunks),
                "prompt_tokens": question.prompt_tokens,
                "skipped": question.skipped,
                "situations": [asdict(outcome) for outcome in question.outcomes],
            }
            for question in questions
        ],
        "summary": [asdict(line) for line in summarize(questions)],
        "conclusion": conclusion(questions),
    }


def _range(line: Summary) -> str:
    if line.num_runs == 1:
        return f"{line.speedup:.1f} times"
    return f"{line.min_speedup:.1f} to {line.max_speedup:.1f} times"
