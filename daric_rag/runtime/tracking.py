"""One DARIC request on the scheduler side: what is known of it, and what is told."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from daric_rag.chunk_plan import SegmentSave
from daric_rag.engine import ReuseStats
from daric_rag.plan import RequestPlan
from daric_rag.runtime.metadata import RequestReport
from daric_rag.runtime.tracing import trace_of
from daric_rag.wire import RequestWire, encode_reuse, salt_of

__all__ = [
    "TrackedRequest",
    "answer_params",
    "awaits_twin",
    "reads_unfilled_blocks",
    "reuse_stats",
    "why_not_reused",
]


@dataclass
class TrackedRequest:
    """A request from its arrival to its end: a DARIC one, or one that shares its salt.

    Attributes:
        wire: Its layout; None if it is damaged (see `reason`) or ordinary.
        salt: Requests of one salt share prefix-cache blocks.
        own_salt: Whether the salt stands for this very layout, not for a
            conversation, so that the first chunk's blocks are exact even where the
            prefix cache provides them.
        prompt_len: Tokens in its prompt.
        reason: Why nothing can be reused, or "".
        plan: Of its last admission.
        first_plan: Of its first one, before any preemption; what the client is told.
        token_ids: The prompt's ids, vLLM's own list.
        unsaved: Segments of the first chunk still to be saved in place.
        asynchronous: Whether the plan is carried out while vLLM lets the request wait.
        in_prefill: Whether some of what it was admitted with is not computed yet.
        prefill_len: Tokens that it was last admitted with: its prompt's, and of its
            answer what it had before it was preempted.
        is_ordinary: Whether it is no DARIC request, and only shares a salt with some.
        report: What its admissions took, summed.
        saved_tokens: Written to the store for it.
        arrived_s: When it arrived, of `time.perf_counter`.
        wait_s: Seconds until it was first admitted.
        priority: vLLM's; a lower one goes first.
    """

    wire: RequestWire | None
    salt: str
    own_salt: bool
    prompt_len: int
    reason: str = ""
    plan: RequestPlan | None = None
    first_plan: RequestPlan | None = None
    token_ids: Sequence[int] = ()
    unsaved: list[SegmentSave] = field(default_factory=list)
    asynchronous: bool = False
    in_prefill: bool = False
    prefill_len: int = 0
    is_ordinary: bool = False
    report: RequestReport = field(default_factory=RequestReport)
    saved_tokens: int = 0
    arrived_s: float = field(default_factory=time.perf_counter)
    wait_s: float = 0.0
    priority: int = 0

    @property
    def filled_from(self) -> int:
        """First position that vLLM's own passes compute, maybe over several steps."""
        return self.plan.hit_len if self.plan is not None else 0


def answer_params(tracked: TrackedRequest) -> dict[str, Any]:
    """Return what the client is told of a request, as far as it is known by now."""
    wire, plan = tracked.wire, tracked.first_plan
    trace = None
    if wire is not None and plan is not None and wire.trace:
        report = tracked.report
        trace = trace_of(
            wire, plan, report, wait_s=tracked.wait_s, unread=report.unread_starts
        )
    return encode_reuse(reuse_stats(tracked), trace)


def why_not_reused(wire: RequestWire, request: Any) -> str:
    """Return why nothing may be reused for one of vLLM's requests, or ""."""
    if request.prompt_token_ids is None:
        return "the prompt has no token ids"
    if wire.prompt_len != len(request.prompt_token_ids):
        return (
            f"the layout covers {wire.prompt_len} tokens and the prompt has "
            f"{len(request.prompt_token_ids)}; send the layout's own token ids"
        )
    if request.skip_reading_prefix_cache:
        # vLLM zeroes the external hit of such a request after it was planned.
        return "prompt log-probabilities need every prompt token to be computed"
    if request.cache_salt != salt_of(wire):
        # Its approximate blocks would be served to ordinary requests, or to
        # requests that take them for what they are not.
        return "its cache_salt is not that of its layout; use wire.salt_of"
    return ""


def awaits_twin(
    tracked: TrackedRequest,
    token_ids: Sequence[int],
    filling: Iterable[TrackedRequest | None],
) -> bool:
    """Return whether the blocks of the same prompt are being filled already.

    Several answers to one prompt begin like that. Once the first one's blocks are
    filled, the prefix cache has them for the others. Nobody waits for a less urgent
    one.

    Args:
        tracked: The request.
        token_ids: Its prompt.
        filling: Asynchronous requests that the worker side is not done with.
    """
    return any(
        twin is not None
        and twin.salt == tracked.salt
        and twin.priority <= tracked.priority
        and twin.token_ids == token_ids
        for twin in filling
    )


def reads_unfilled_blocks(
    tracked: TrackedRequest, plan: RequestPlan, others: Iterable[TrackedRequest]
) -> bool:
    """Return whether a request's early windows attend to blocks not filled yet.

    They may run in passes of their own, before the pass in which another request fills
    the blocks. That needs the same salt, and a shared prefix that reaches into the
    other's last window.
    """
    # A lost chunk may become a window.
    return bool(plan.early_windows or plan.chunks) and any(
        other.in_prefill
        and other is not tracked
        and other.salt == tracked.salt
        and plan.gpu_prefix_len > other.filled_from
        for other in others
    )


def reuse_stats(tracked: TrackedRequest) -> ReuseStats:
    """Return a request's reuse counts, as far as they are known by now."""
    wire, plan, report = tracked.wire, tracked.first_plan, tracked.report
    num_chunks = len(wire.ends) if wire is not None else 0
    if plan is None:
        reason = tracked.reason or "the request ended before it was scheduled"
        return ReuseStats(tracked.prompt_len, num_chunks=num_chunks, reason=reason)
    saved = tracked.saved_tokens + report.saved_tokens
    return ReuseStats(
        prompt_tokens=tracked.prompt_len,
        num_chunks=num_chunks,
        gpu_prefix_tokens=plan.gpu_prefix_len,
        # The report sums all admissions, the plan is the first one's.
        contiguous_hit_tokens=max(
            0, plan.contiguous_hit_len - report.unread_contiguous
        ),
        disjoint_hit_tokens=max(0, plan.disjoint_hit_len - report.unread_disjoint),
        generated_tokens=report.generated_tokens,
        recomputed_tokens=plan.recompute_len,
        saved_tokens=saved,
        load_s=report.load_s,
        generation_s=report.generation_s,
        recompute_s=report.recompute_s,
        reason=_reason(plan, report, num_chunks, saved),
    )


def _reason(
    plan: RequestPlan, report: RequestReport, num_chunks: int, saved: int
) -> str:
    """Say why nothing was reused, where nothing was."""
    hits = plan.contiguous_hit_len + plan.disjoint_hit_len - report.unread_tokens
    if hits > 0 or plan.gpu_prefix_len > 0:
        return ""
    if report.late_tokens:
        return (
            "the store was slower than computing, so its records were not waited for; "
            "put it on a faster disk, or raise host_bytes"
        )
    if report.unread_tokens:
        return "the stored records were lost or damaged; they were generated again"
    if num_chunks == 1 and not plan.saves and not plan.chunks:
        return "the prompt has one chunk, shorter than a segment"
    if plan.recompute_len >= plan.prompt_len:
        return "the whole prompt lies in the recompute set: its chunks are short"
    if saved:
        return "no chunk was in the store yet; they are from now on"
    return (
        "no chunk was in the store, and none was saved: another request did, or the "
        "store could not"
    )
