"""From a request's plan and what the worker reported to its trace."""

from __future__ import annotations

from collections.abc import Collection

from daric_rag.chunk_plan import ChunkPlan
from daric_rag.plan import RequestPlan
from daric_rag.runtime.metadata import RequestReport
from daric_rag.selection import Span
from daric_rag.trace import ChunkKind, ChunkTrace, RequestTrace, TraceEvent
from daric_rag.wire import RequestWire

__all__ = ["trace_of"]


def trace_of(
    wire: RequestWire,
    plan: RequestPlan,
    report: RequestReport,
    *,
    wait_s: float = 0.0,
    first_token_s: float | None = None,
    unread: Collection[int] = (),
) -> RequestTrace:
    """Return a request's trace.

    The worker reports how long each phase took, and phases follow one another within
    the admitting step; they are laid out that way.

    Args:
        wire: Its layout.
        plan: Of its first admission.
        report: What its admissions took.
        wait_s: Seconds from its arrival to its admission.
        first_token_s: Seconds from its arrival to its first token; None if unknown.
        unread: Starts of the chunks whose records could not be read.
    """
    placed = {chunk.start: chunk for chunk in plan.chunks}
    titles = wire.titles or ("",) * len(wire.spans)
    chunks = tuple(
        _chunk_trace(span, title, plan, placed.get(span[0]), span[0] in unread)
        for span, title in zip(wire.spans, titles, strict=True)
    )
    events = _events(report, wait_s, first_token_s)
    return RequestTrace(plan.prompt_len, chunks, plan.windows, events)


def _chunk_trace(
    span: Span, title: str, plan: RequestPlan, placed: ChunkPlan | None, unread: bool
) -> ChunkTrace:
    start, end = span
    hit_len = 0 if placed is None or unread else placed.hit_len
    kind = _kind(span, plan, placed, hit_len)
    return ChunkTrace(start, end, kind, hit_len, title)


def _kind(
    span: Span, plan: RequestPlan, placed: ChunkPlan | None, hit_len: int
) -> ChunkKind:
    start, end = span
    if end <= plan.gpu_prefix_len:
        return "gpu_prefix"
    if start < plan.gpu_prefix_len:
        return "mixed"
    if placed is None:
        # Neither loaded nor generated: windows are all that is left.
        return "recomputed"
    if hit_len == end - start:
        return "contiguous_hit" if placed.contiguous else "disjoint_hit"
    # Of the first chunk the plan holds the hit part only; its rest is a window.
    if hit_len == 0 and placed.end == end:
        return "generated"
    return "mixed"


def _events(
    report: RequestReport, wait_s: float, first_token_s: float | None
) -> tuple[TraceEvent, ...]:
    phases = (
        ("wait", wait_s),
        ("load", report.load_s),
        ("generate", report.generation_s),
        ("recompute", report.recompute_s),
    )
    events: list[TraceEvent] = []
    now = 0.0
    for name, seconds in phases:
        if seconds > 0:
            events.append(TraceEvent(name, now, now + seconds))
            now += seconds
    if first_token_s is not None:
        events.append(TraceEvent("first_token", first_token_s, first_token_s))
    return tuple(sorted(events, key=lambda event: event.start_s))
