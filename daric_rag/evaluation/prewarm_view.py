"""How a pre-warm job shows itself: a bar on a terminal, else JSON lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from daric_rag.evaluation.units import human_bytes
from daric_rag.prewarm.manifest import Entry
from daric_rag.prewarm.options import JobReport, Totals
from daric_rag.prewarm.planning import Calibration, Plan
from daric_rag.prewarm_notices import log

__all__ = [
    "eta_s",
    "plan_json",
    "plan_lines",
    "report_json",
    "report_lines",
    "shown_progress",
]

_LOG_INTERVAL_S = 10.0

OnEntry = Callable[[Entry, Totals], None]


def eta_s(totals: Totals, total_bytes: int | None) -> float | None:
    """Return about how many seconds are left; None while nothing tells.

    As though the unread part were like what was read, other shards' documents and
    repetitions among it. What an earlier run did comes first as a rule, goes by at once
    and tells nothing.
    """
    if not total_bytes or not totals.engine_s or not totals.engine_bytes:
        return None
    taken = totals.engine_bytes + totals.waiting_bytes
    read = totals.source_bytes + totals.waiting_bytes
    unread = max(total_bytes - read, 0) * taken / (read - totals.known_bytes)
    return totals.engine_s * (totals.waiting_bytes + unread) / totals.engine_bytes


@contextmanager
def shown_progress(console: Console, total_bytes: int | None) -> Iterator[OnEntry]:
    """Yield what a job calls with its entries.

    Args:
        console: Of standard error.
        total_bytes: Of the source; None if unknown.
    """
    if not console.is_terminal:
        yield _Log(total_bytes)
        return
    with Progress(
        TextColumn("pre-warming"),
        BarColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("", total=total_bytes, counts="")
        start = time.monotonic()

        def on_entry(entry: Entry, totals: Totals) -> None:
            if entry.status == "failed":
                progress.console.print(
                    f"{entry.id}: {entry.error}", markup=False, highlight=False
                )
            elapsed = time.monotonic() - start
            progress.update(
                task,
                completed=totals.source_bytes,
                counts=_counts(totals, elapsed, total_bytes),
            )

        yield on_entry


class _Log:
    """Writes JSON lines to standard error: failures at once, counts at times."""

    def __init__(self, total_bytes: int | None) -> None:
        self._total_bytes = total_bytes
        self._start = self._told = time.monotonic()

    def __call__(self, entry: Entry, totals: Totals) -> None:
        if entry.status == "failed":
            log("failed", id=entry.id, error=entry.error)
        now = time.monotonic()
        if now - self._told >= _LOG_INTERVAL_S:
            self._told = now
            elapsed = now - self._start
            left = eta_s(totals, self._total_bytes)
            log(
                "progress",
                **asdict(totals),
                elapsed_s=round(elapsed, 1),
                tokens_per_s=round(totals.computed_tokens / elapsed, 1),
                eta_s=None if left is None else round(left),
            )


def _counts(totals: Totals, elapsed_s: float, total_bytes: int | None) -> str:
    rate = totals.computed_tokens / elapsed_s if elapsed_s > 0 else 0.0
    left = eta_s(totals, total_bytes)
    eta = "" if left is None else f", {left:.0f} s left"
    return (
        f"{totals.computed} computed, {totals.hit + totals.known} hit, "
        f"{totals.skipped + totals.repeated} skipped, {totals.failed} failed, "
        f"{rate:,.0f} tokens/s{eta}"
    )


def report_json(report: JobReport, elapsed_s: float, **more: Any) -> dict[str, Any]:
    """Return a report as JSON values."""
    return {
        **asdict(report.totals),
        "stopped": report.stopped,
        "num_damaged_lines": report.num_damaged_lines,
        "elapsed_s": round(elapsed_s, 3),
        **more,
    }


def report_lines(
    report: JobReport, elapsed_s: float, limit_bytes: int | None = None
) -> list[str]:
    """Return a report for people.

    Args:
        report: Of a job.
        elapsed_s: That it took.
        limit_bytes: What the store may hold.
    """
    totals = report.totals
    rate = totals.computed_tokens / elapsed_s if elapsed_s > 0 else 0.0
    lines = [
        f"{totals.computed} documents computed ({totals.computed_tokens} tokens, "
        f"{human_bytes(totals.nbytes)}, {rate:,.0f} tokens/s)",
        f"{totals.hit + totals.known} were stored before, "
        f"{totals.repeated} came again, {totals.skipped} empty, {totals.failed} failed",
    ]
    if totals.others:
        lines.append(f"{totals.others} belong to other shards")
    if report.num_damaged_lines:
        lines.append(
            f"the manifest has damaged lines ({report.num_damaged_lines}): what they "
            f"may have said of documents was looked up in the store"
        )
    if totals.removed:
        lines.append(f"{totals.removed} vanished ones given up")
    if report.stopped == "budget":
        budget = "" if limit_bytes is None else f" of {human_bytes(limit_bytes)}"
        lines.append(
            f"stopped: the next documents would not fit in the budget{budget}; raise "
            f"--budget or evict some, and run again"
        )
    elif report.stopped == "store":
        lines.append(
            "stopped: the store cannot write (disk full, or not writable): make room "
            "or mend it, see `daric store stats`, and run again"
        )
    elif report.stopped == "stopped":
        lines.append("interrupted: run the same command again to go on")
    elif report.stopped == "unreadable":
        lines.append(
            "nothing was given up: sources could not be read as a whole, and what is "
            "missing may be there; mend them and run again"
        )
    return lines


def plan_json(
    plan: Plan, measured: Calibration | None, room_bytes: int | None
) -> dict[str, Any]:
    """Return a plan as JSON values; what could not be measured is null."""
    return {
        "num_documents": plan.num_documents,
        "num_repeated": plan.num_repeated,
        "num_empty": plan.num_empty,
        "num_refused": plan.num_refused,
        "num_others": plan.num_others,
        "num_cached": plan.num_cached,
        "num_tokens": plan.num_tokens,
        "cached_tokens": plan.cached_tokens,
        "nbytes": measured and measured.nbytes(plan.num_tokens),
        "new_bytes": measured and measured.nbytes(plan.new_tokens),
        "room_bytes": room_bytes,
        "seconds": measured and round(measured.seconds(plan.new_tokens), 3),
        "tokens_per_s": measured and round(measured.tokens_per_s, 1),
        "refused": [{"id": name, "reason": why} for name, why in plan.reasons],
    }


def plan_lines(
    plan: Plan, measured: Calibration | None, room_bytes: int | None
) -> list[str]:
    """Return a plan for people."""
    lines = [
        f"{plan.num_documents} documents, {plan.num_tokens} tokens; "
        f"{plan.num_cached} of them ({plan.cached_tokens} tokens) are stored",
        f"{plan.num_repeated} come again, {plan.num_empty} are empty, "
        f"{plan.num_refused} cannot be stored",
        *(f"  {name}: {why}" for name, why in plan.reasons),
    ]
    if plan.num_others:
        lines.append(f"{plan.num_others} are other shards'")
    if measured is not None:
        needed = measured.nbytes(plan.new_tokens)
        lines.append(
            f"{human_bytes(measured.nbytes(plan.num_tokens))} on disk, "
            f"{human_bytes(needed)} of it new; about "
            f"{measured.seconds(plan.new_tokens):,.0f} s at "
            f"{measured.tokens_per_s:,.0f} tokens/s"
        )
        if room_bytes is not None and needed > room_bytes:
            lines.append(
                f"the store has room for {human_bytes(room_bytes)}: the job would stop "
                f"before its end; raise --budget or evict some"
            )
    return lines
