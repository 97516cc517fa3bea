"""The two messages between the scheduler side and the worker side.

Both are picklable and share no memory: scheduler and worker may be two processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from daric_rag.keys import SegmentKey
from daric_rag.runtime.vllm_api import KVConnectorMetadata, KVConnectorWorkerMetadata
from daric_rag.steps import StepPlan

__all__ = ["DaricMetadata", "DaricWorkerMetadata", "RequestReport"]


@dataclass
class DaricMetadata(KVConnectorMetadata):
    """Scheduler -> worker, once per engine step.

    Attributes:
        plan: The step's work.
        is_step: Whether it belongs to vLLM's own pass; False in passes of
            sub-requests, which do nothing beside computing.
        answers: By request id, what the clients of requests that ended since the last
            step are told; a worker is asked for it where the scheduler cannot be.
    """

    plan: StepPlan = field(default_factory=StepPlan)
    is_step: bool = False
    answers: Mapping[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class RequestReport:
    """What one admitted request really took.

    Attributes:
        generated_tokens: Computed on their own in scratch blocks.
        saved_tokens: Written to the store, of the generated ones.
        unread_contiguous: Of the contiguous hits, tokens that the store could not
            provide intact; they are among the generated ones.
        unread_disjoint: The same of the disjoint hits.
        unread_starts: Where the chunks start that were not all read.
        late_tokens: Of these, tokens that the store did not provide in time.
        loaded_bytes: Of the records that were read for it.
        load_s: Seconds of reading, re-encoding and placing.
        generation_s: Seconds of generating, saving and placing.
        recompute_s: Seconds of the forward passes with the recompute set.
    """

    generated_tokens: int = 0
    saved_tokens: int = 0
    unread_contiguous: int = 0
    unread_disjoint: int = 0
    unread_starts: tuple[int, ...] = ()
    late_tokens: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    generation_s: float = 0.0
    recompute_s: float = 0.0

    @property
    def unread_tokens(self) -> int:
        """Tokens of hits that were none."""
        return self.unread_contiguous + self.unread_disjoint

    def add(self, other: RequestReport) -> None:
        """Add another step's report."""
        for item in fields(self):
            total = getattr(self, item.name) + getattr(other, item.name)
            setattr(self, item.name, total)


@dataclass
class DaricWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker -> scheduler, once per engine step that did anything.

    Attributes:
        saved: Records written, key to bytes.
        lost: Keys that the index believed in and the store could not provide.
        evicted: Keys that the store gave up to make room.
        demoted: Keys that are no longer in the store's memory.
        reports: By request id.
        backlog_len: Tokens still to be computed for asynchronous requests.
    """

    saved: dict[SegmentKey, int] = field(default_factory=dict)
    lost: set[SegmentKey] = field(default_factory=set)
    evicted: set[SegmentKey] = field(default_factory=set)
    demoted: set[SegmentKey] = field(default_factory=set)
    reports: dict[str, RequestReport] = field(default_factory=dict)
    backlog_len: int = 0

    def report_of(self, req_id: str) -> RequestReport:
        """Return a request's report, to be added to."""
        return self.reports.setdefault(req_id, RequestReport())

    def aggregate(self, other: KVConnectorWorkerMetadata) -> DaricWorkerMetadata:
        """Combine ranks: a segment exists when every rank has saved it."""
        assert isinstance(other, DaricWorkerMetadata)
        saved = {k: v for k, v in self.saved.items() if k in other.saved}
        return DaricWorkerMetadata(
            saved,
            self.lost | other.lost,
            self.evicted | other.evicted,
            self.demoted | other.demoted,
            self.reports,
            max(self.backlog_len, other.backlog_len),
        )
