"""One engine step of the worker side, as in section 3.3.3.

Its order::

    prepare        stage 1   read hits, re-encode, place
                             generate misses in scratch blocks, save, re-encode, place
                   stage 2   early windows that do not fit beside vLLM's requests
    vLLM's pass    stage 2   the other early windows, every request's last window,
                             ordinary requests, a share of the fill queue
    finish                   save what the pass completed

Requests with little to compute go through both stages in the step that admits them.
Those with more wait in the fill queue, which has what room is left beside them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from daric_rag.runtime.background_reads import BackgroundReads
from daric_rag.runtime.block_filler import BlockFiller
from daric_rag.runtime.chunk_blocks import ChunkBlocks, save_segment
from daric_rag.runtime.fill_queue import FillQueue
from daric_rag.runtime.kv_mover import KvMover
from daric_rag.runtime.metadata import DaricWorkerMetadata, RequestReport
from daric_rag.runtime.step_builder import StepPasses, SubRequest
from daric_rag.runtime.vllm_api import SchedulerOutput
from daric_rag.selection import Span, merge
from daric_rag.steps import Limits, Piece, RequestStep, StepPlan, window_waves

__all__ = ["StepRun"]

# The fill queue gets at least this part of a pass, beside vLLM's own if need be, so
# that a stream of ordinary requests cannot starve it.
_LEAST_SHARE = 4
# A step with nothing to compute waits so long for records, rather than to come again
# and again. What arrives at the engine meanwhile waits too.
_IDLE_WAIT_S = 0.01


class StepRun:
    """Worker process. Executes one step plan.

    Attributes:
        report: What was done, complete after `finish`.

    Args:
        mover: Between store and blocks.
        reads: From the store.
        queue: Requests that wait; goes on from step to step.
        plan: The step's work.
        passes: Runs passes of sub-requests.
        limits: Of one forward pass.
        block_size: Tokens per block.
    """

    def __init__(
        self,
        mover: KvMover,
        reads: BackgroundReads,
        queue: FillQueue,
        plan: StepPlan,
        passes: StepPasses,
        *,
        limits: Limits,
        block_size: int,
    ) -> None:
        self.report = DaricWorkerMetadata(
            reports={step.req_id: RequestReport() for step in plan.requests}
        )
        self._mover, self._queue, self._plan = mover, queue, plan
        self._passes, self._limits, self._block_size = passes, limits, block_size
        self._chunks = ChunkBlocks(mover, reads, self.report)
        self._now = plan.admitted(asynchronous=False)
        self._pass_started_s = 0.0
        self._has_joined = False

    def prepare(self) -> SchedulerOutput:
        """Run what comes before vLLM's own pass; return what that one runs."""
        filler = BlockFiller(
            self._chunks,
            self.report,
            self._plan.scratch_block_ids,
            limits=self._limits,
            block_size=self._block_size,
        )
        unfilled = filler.fill(self._now, self._passes)
        self._advance_queue()
        self._pass_started_s = time.perf_counter()
        joining = self._recompute(unfilled)
        return self._passes.join(self._run_queue(joining))

    def finish(self) -> None:
        """After vLLM's pass: save what it completed."""
        self._passes.end()
        spent_s = time.perf_counter() - self._pass_started_s
        for step in self._now:
            self.report.report_of(step.req_id).recompute_s += spent_s
        if self._has_joined:
            self._queue.complete(self._chunks, self.report, self._pass_started_s)
        for save in self._plan.saves:
            identity = self._mover.identity(
                save.key, save.parent, save.index, save.document
            )
            num_tokens = save.end - save.start
            save_segment(
                self._mover,
                self.report,
                identity,
                save.block_ids,
                save.start,
                num_tokens,
            )

    def _advance_queue(self) -> None:
        """Bring the fill queue up to date before its share of a pass is taken."""
        self._queue.drop(self._passes.scheduled.finished_req_ids)
        self._queue.hold(self._plan.held_block_ids)
        self._queue.add(self._plan.admitted(asynchronous=True), self._chunks)
        if not self._now and not self._passes.scheduled_size.max_num_seqs:
            self._queue.wait_for_reads(_IDLE_WAIT_S)
        self._queue.take_reads(self._chunks, self.report)

    def _recompute(self, unfilled: dict[str, list[Span]]) -> list[SubRequest]:
        """Stage 2: run what does not fit beside vLLM's requests; return the rest."""
        waves = window_waves(
            [
                _early_windows(request, unfilled.get(request.req_id, ()))
                for request in self._now
            ],
            limits=self._limits,
            scheduled=self._passes.scheduled_size,
        )
        for wave in waves.early:
            self._passes.run(self._subs_of(wave))
        return self._subs_of(waves.final)

    def _subs_of(self, pieces: Sequence[Piece]) -> list[SubRequest]:
        requests = self._now
        return [
            SubRequest(
                requests[piece.index].token_ids,
                piece.start,
                piece.end,
                requests[piece.index].block_ids,
            )
            for piece in pieces
        ]

    def _run_queue(self, joining: list[SubRequest]) -> list[SubRequest]:
        """Let the fill queue go on; returns all that joins vLLM's pass."""
        size, limits = self._passes.scheduled_size, self._limits
        taken = size.max_num_tokens + _total(joining)
        seats = limits.max_num_seqs - size.max_num_seqs - len(joining)
        room = limits.max_num_tokens - taken
        share = -(-limits.max_num_tokens // _LEAST_SHARE)
        # In a pass of its own nothing is sampled, which pays where there is nobody to
        # sample for.
        alone = Limits(share if taken else limits.max_num_tokens, limits.max_num_seqs)
        if taken and room >= share and seats >= 1:
            beside = self._beside_vllm(Limits(room, seats), alone)
            if beside is not None:
                self._has_joined = bool(beside)
                self._queue.expect_saves(self._chunks)
                return joining + beside
        subs = self._queue.next_pass(alone, self._chunks)
        if not subs:
            return joining
        if joining:
            # The queue may attend to blocks that these fill, through a shared prefix.
            self._passes.run(joining)
        self._queue.expect_saves(self._chunks)
        self._passes.run(subs)
        self._queue.complete(self._chunks, self.report, self._pass_started_s)
        return []

    def _beside_vllm(self, room: Limits, alone: Limits) -> list[SubRequest] | None:
        """Return the queue's part of vLLM's pass; None if one of its own brings more.

        Tokens may be free where seats are not: then many short windows would take a
        step each.
        """
        subs = self._queue.next_pass(room, self._chunks)
        if len(subs) < room.max_num_seqs or _total(subs) >= alone.max_num_tokens:
            return subs
        if _total(self._queue.next_pass(alone, self._chunks)) > _total(subs):
            return None
        # What it returned last is the pass.
        return self._queue.next_pass(room, self._chunks)


def _total(subs: Sequence[SubRequest]) -> int:
    return sum(sub.end - sub.start for sub in subs)


def _early_windows(request: RequestStep, unfilled: Sequence[Span]) -> Sequence[Span]:
    """A request's windows before the last one, and what stage 1 could not fill."""
    if not unfilled:
        return request.early_windows
    windows = merge([*request.early_windows, *unfilled])
    return [(start, min(end, request.hit_len)) for start, end in windows]
