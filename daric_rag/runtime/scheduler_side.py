"""The connector's scheduler side: from a request to its plan, from plans to a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from daric_rag.config import DaricConfig
from daric_rag.errors import WireError
from daric_rag.keys import SegmentKey
from daric_rag.plan import RequestPlan, plan_request
from daric_rag.runtime.admission import Admission
from daric_rag.runtime.ended import EndedRequests
from daric_rag.runtime.metadata import DaricWorkerMetadata
from daric_rag.runtime.metrics import DaricStats
from daric_rag.runtime.pending_saves import PendingSaves
from daric_rag.runtime.scratch import ScratchBlocks
from daric_rag.runtime.store_view import StoreView
from daric_rag.runtime.tracking import (
    TrackedRequest,
    awaits_twin,
    reads_unfilled_blocks,
    why_not_reused,
)
from daric_rag.selection import total_len
from daric_rag.steps import Limits, RequestStep, SaveStep, StepPlan
from daric_rag.wire import RequestWire, decode_request

__all__ = ["SchedulerSide"]

logger = logging.getLogger(__name__)


class SchedulerSide:
    """Scheduler process. Decides; the worker side obeys.

    Args:
        config: The engine's configuration of daric_rag.
        view: What the store is believed to hold.
        limits: Of one forward pass.
    """

    def __init__(self, config: DaricConfig, view: StoreView, limits: Limits) -> None:
        self.stats = DaricStats()
        self._config, self._view = config, view
        self._tracked: dict[str, TrackedRequest] = {}
        self._admitted: list[RequestStep] = []
        self._admission = Admission(limits.max_num_tokens)
        self._live: set[str] = set()  # ordinary requests too
        # Asynchronous requests that the worker side is not done with, and what it
        # loads for them.
        self._filling: dict[str, list[SegmentKey]] = {}
        self._scratch: ScratchBlocks | None = None
        self._saving = PendingSaves()
        self._ended = EndedRequests(self.stats)
        self._told: dict[str, dict[str, Any]] = {}
        self._refusal = ""

    def end_reuse(self, reason: str) -> None:
        """Serve every request that has no blocks yet as an ordinary one."""
        self._refusal = reason

    def bind_scratch(self, scratch: ScratchBlocks) -> None:
        """Take the source of scratch blocks, once vLLM has its block pool."""
        self._scratch = scratch

    def track(self, request: Any) -> None:
        """Take notice of a new request; ordinary ones are left alone."""
        self._live.add(request.request_id)
        params = request.kv_transfer_params
        try:
            wire = decode_request(params)
            if wire is None:
                self._track_ordinary(request)
                return
            reason = why_not_reused(wire, request)
        except WireError as error:
            wire, reason = None, str(error)
        except Exception:
            # Whatever a foreign client sent: its request is answered without reuse.
            wire, reason = None, "the layout could not be read"
        if reason:
            logger.warning("request %s is not reused: %s", request.request_id, reason)
        salt = request.cache_salt or ""
        own_salt = wire is not None and wire.conversation is None
        self._tracked[request.request_id] = TrackedRequest(
            wire,
            salt,
            own_salt,
            request.num_prompt_tokens,
            reason,
            priority=request.priority,
        )

    def _track_ordinary(self, request: Any) -> None:
        """Keep an eye on a request that a DARIC one may share blocks with."""
        if request.cache_salt:
            self._tracked[request.request_id] = TrackedRequest(
                None,
                request.cache_salt,
                False,
                request.num_prompt_tokens,
                is_ordinary=True,
                priority=request.priority,
            )

    def match(self, request: Any, gpu_prefix_len: int) -> tuple[int | None, bool]:
        """Plan a request over `gpu_prefix_len` tokens of vLLM's prefix cache.

        vLLM asks in the order of its queue. It goes on to the next request when one
        is told to wait; then those behind wait as well, ordinary ones too, so that
        none is ever overtaken for good. One that waits for its twin's blocks is, until
        they are filled.

        Returns:
            Tokens that it may count as computed beyond them, None to be asked again
            in the next step; and whether it waits until they are. Changes nothing but
            the request's own pending plan, and what the view learns from the store.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            # Before anything else: one that was preempted keeps nobody waiting.
            tracked.in_prefill, tracked.plan = False, None
            if tracked.wire is not None and not tracked.reason:
                tracked.reason = self._refusal
        if self._admission.is_blocked:
            return None, False
        if tracked is None or tracked.wire is None or tracked.reason:
            return 0, False
        filling = [self._tracked.get(req_id) for req_id in self._filling]
        if self._pool.has_prefix_cache and awaits_twin(
            tracked, request.prompt_token_ids, filling
        ):
            # Nobody behind it has to wait for that.
            return None, False
        plan = None
        if not self._admission.has_backlog:
            plan = self._plan(tracked.wire, request, gpu_prefix_len)
        if plan is None or not self._may_start(tracked, plan, request.num_tokens):
            self._admission.is_blocked = True
            return None, False
        tracked.plan = plan
        return plan.num_external_tokens, tracked.asynchronous

    def admit(
        self, request: Any, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """A planned request got its blocks.

        An asynchronous one comes twice: first to wait until they are filled, then,
        without external tokens, to be scheduled.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        filled = tracked.asynchronous and not num_external_tokens
        tracked.in_prefill = filled or not tracked.asynchronous
        tracked.prefill_len = request.num_tokens
        if tracked.plan is None or tracked.wire is None or filled:
            return
        plan, now = tracked.plan, not tracked.asynchronous
        for chunk in plan.chunks:
            self._view.touch(plan.root, chunk.hit_keys)
        self._saving.expect_chunks(request.request_id, plan, now=now)
        self._pool.borrow(
            request.num_tokens,
            [chunk.num_tokens for chunk in plan.chunks],
            [c.num_tokens for c in plan.chunks if c.hit_len < c.num_tokens],
            asynchronous=not now,
        )
        if tracked.first_plan is None:
            tracked.first_plan = plan
            tracked.wait_s = time.perf_counter() - tracked.arrived_s
        # A conversation that was cut otherwise before has approximate blocks where
        # this layout has its exact first chunk. They are its own affair, the store is
        # everybody's. Where records are not exact, neither are blocks filled by them.
        own = tracked.own_salt and self._config.kv_storage == "model"
        exact = own or plan.gpu_prefix_len == 0
        tracked.unsaved = list(plan.saves) if exact else []
        tracked.token_ids = request.prompt_token_ids
        self._admission.admit(_work_len(plan), asynchronous=not now)
        if now:
            self._view.promote(plan.hit_keys())
        else:
            self._filling[request.request_id] = plan.hit_keys()
        self._admitted.append(
            RequestStep(
                req_id=request.request_id,
                token_ids=request.prompt_token_ids,
                block_ids=tuple(block_ids),
                chunks=plan.chunks,
                early_windows=plan.early_windows,
                hit_len=plan.hit_len,
                root=plan.root,
                namespace=tracked.wire.config.namespace,
                asynchronous=tracked.asynchronous,
                priority=request.priority,
            )
        )

    def build_step(
        self,
        computed_after: dict[str, int],
        block_ids_of: Callable[[str], Sequence[int]],
    ) -> StepPlan:
        """Collect the step's work and forget it.

        Args:
            computed_after: Per request in this step, tokens computed at its end.
            block_ids_of: A request's blocks.
        """
        saves: list[SaveStep] = []
        for req_id, num_computed in computed_after.items():
            tracked = self._tracked.get(req_id)
            if tracked is None or not tracked.in_prefill:
                continue
            if tracked.plan is not None:
                saves += self._saving.take_ready(
                    tracked, num_computed, partial(block_ids_of, req_id)
                )
            tracked.in_prefill = num_computed < tracked.prefill_len
        plan = StepPlan(
            tuple(self._admitted),
            tuple(saves),
            self._pool.block_ids,
            self._pool.held_block_ids,
        )
        self._admitted = []
        self._admission.end_planning()
        self._told = self._ended.begin_step()
        return plan

    def take_told(self) -> dict[str, dict[str, Any]]:
        """Return what clients of requests were told that ended before this step."""
        told, self._told = self._told, {}
        return told

    def end_step(self, filled: Iterable[str]) -> None:
        """The step has run and reported; nothing of it is left to wait for.

        Args:
            filled: Asynchronous requests that the worker side is done with.
        """
        self._pool.give_back()
        self._saving.end_step()
        self._ended.count()
        for req_id in filled:
            self._saving.forget(req_id)
            keys = self._filling.pop(req_id, ())
            if req_id in self._tracked:  # else nobody may have read them
                self._view.promote(keys)
        if not self._filling:
            self._pool.release()

    def take_report(self, report: DaricWorkerMetadata) -> None:
        """Learn what the worker really saved, missed and spent."""
        self._admission.learn_backlog(report.backlog_len)
        self.stats.add("evictions", len(report.evicted))
        self.stats.add("saved_bytes", sum(report.saved.values()))
        self._view.forget(report.evicted)
        self._view.forget(report.lost)
        self._saving.take_saved(report.saved, self._view)
        # Last: the store may have had no room for what was saved.
        self._view.demote(report.demoted)
        for req_id, part in report.reports.items():
            self.stats.add("loaded_bytes", part.loaded_bytes)
            if req_id in self._tracked:
                self._tracked[req_id].report.add(part)
        self._ended.take_reports(report.reports)

    def finish(self, request: Any) -> dict[str, Any] | None:
        """A request is over; returns its reuse counts for the client.

        `take_report` completes the returned dictionary before vLLM sends it anywhere.
        """
        self._live.discard(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or tracked.is_ordinary:
            return None
        return self._ended.add(request.request_id, tracked)

    def closing_params(self, request_id: str) -> dict[str, Any] | None:
        """Return what `finish` returned for a request, once, if not long ago."""
        return self._ended.take_answer(request_id)

    @property
    def _pool(self) -> ScratchBlocks:
        assert self._scratch is not None, "bind_scratch comes before the first request"
        return self._scratch

    def _plan(
        self, wire: RequestWire, request: Any, gpu_prefix_len: int
    ) -> RequestPlan:
        root = self._view.root(wire.config.namespace)
        return plan_request(
            wire,
            request.prompt_token_ids,
            gpu_prefix_len=gpu_prefix_len,
            root=root,
            max_segment_len=self._config.max_segment_len,
            max_generated_len=self._pool.max_generated_len(wire.prompt_len),
            match=lambda keys: self._view.match(root, keys),
            exact_records=self._config.kv_storage == "model",
        )

    def _may_start(
        self, tracked: TrackedRequest, plan: RequestPlan, num_tokens: int
    ) -> bool:
        """Whether a request can be admitted now; decides whether it then waits."""
        tracked.asynchronous = self._has_to_wait(plan)
        chunk_lens = [chunk.num_tokens for chunk in plan.chunks]
        has_room = not chunk_lens or self._pool.has_room(
            num_tokens, chunk_lens, asynchronous=tracked.asynchronous
        )
        others = self._tracked.values()
        return has_room and not reads_unfilled_blocks(tracked, plan, others)

    def _has_to_wait(self, plan: RequestPlan) -> bool:
        """Whether a request would hold up others in the step that admits it."""
        work_len = _work_len(plan)
        if work_len > 0 and (
            not self._admission.fits_step(work_len)
            # It waits for the others' chunk instead of generating its own.
            or self._saving.is_awaited(plan)
        ):
            return True
        # Nobody but the request itself waits for a disk.
        return len(self._live) > 1 and not self._view.is_near(plan.hit_keys())


def _work_len(plan: RequestPlan) -> int:
    """Tokens to be computed before the last window can be."""
    return plan.missing_len + total_len(plan.early_windows)
