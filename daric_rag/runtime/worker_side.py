"""The connector's worker side: stage 1 fills blocks, stage 2 recomputes in place.

One engine step (section 3.3.3)::

    prepare_step   stage 1   read hits, re-encode, place
                             generate misses in scratch blocks, save, re-encode, place
                   stage 2   early windows that do not fit beside vLLM's requests
    vLLM's pass    stage 2   the other early windows, every request's last window,
                             ordinary requests, a share of the fill queue
    finish_step              save what the pass completed

Requests with little to compute go through both stages in the step that admits them.
Those with more wait in the fill queue, which has what room is left beside them.

It obeys the step plan. The one thing it decides is what to do about a record that is
not there or not intact: its chunk is generated in the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from daric_rag.config import KvStorageName
from daric_rag.keys import Scalar, model_fingerprint
from daric_rag.runtime.block_filler import BlockFiller
from daric_rag.runtime.chunk_blocks import ChunkBlocks, save_segment
from daric_rag.runtime.fill_queue import FillQueue
from daric_rag.runtime.kv_codec import KvShape, codec_of
from daric_rag.runtime.kv_layout import KvLayout, WriteSlots
from daric_rag.runtime.kv_mover import KvMover
from daric_rag.runtime.kv_probe import probe_layout
from daric_rag.runtime.metadata import (
    DaricMetadata,
    DaricWorkerMetadata,
    RequestReport,
)
from daric_rag.runtime.pinned_memory import pin_arena
from daric_rag.runtime.rope import Reencoder, RopeParameters, RotateFn
from daric_rag.runtime.step_builder import (
    RunPass,
    StepBuilder,
    StepPasses,
    SubRequest,
    empty_step,
)
from daric_rag.runtime.vllm_api import SchedulerOutput
from daric_rag.selection import Span, merge
from daric_rag.steps import Limits, Piece, RequestStep, StepPlan, window_waves
from daric_rag.storage import TieredStore

__all__ = ["WorkerSide"]

# vLLM's null block: nobody's data, so it may be written while probing.
_SPARE_BLOCK = 0

# The fill queue gets at least this part of a pass, beside vLLM's own if need be, so
# that a stream of ordinary requests cannot starve it.
_LEAST_SHARE = 4


class WorkerSide:
    """Worker process. Executes step plans.

    Args:
        store: The KV store; owned and closed here.
        fields: What the model's KV depends on, this rank's.
        limits: Of one forward pass.
        block_size: Tokens per block.
        kv_storage: How records hold keys and values; see `DaricConfig`.
    """

    def __init__(
        self,
        store: TieredStore,
        fields: dict[str, Scalar],
        limits: Limits,
        *,
        block_size: int,
        kv_storage: KvStorageName,
    ) -> None:
        """Wait for `register_layers` and `bind_model`."""
        self.store = store
        self._fingerprint = model_fingerprint(fields)
        self._limits, self._block_size = limits, block_size
        self._kv_storage = kv_storage
        self._layers: list[Tensor] = []
        self._builder = StepBuilder()
        self._layout: KvLayout | None = None
        self._mover: KvMover | None = None
        self._plan = StepPlan()
        self._report = DaricWorkerMetadata()
        self._queue = FillQueue(block_size)
        self._filled: set[str] = set()
        self._joined = False
        self._backlog_len = 0
        self._unpin: Callable[[], object] = lambda: None
        self._pass_started_s = 0.0
        self._chunks_of_step: ChunkBlocks | None = None

    def register_layers(self, layers: Sequence[Tensor]) -> None:
        """Take the KV cache's tensors, in order of layers."""
        self._layers = list(layers)

    def bind_model(
        self, rope: RopeParameters, rotate: RotateFn, write_slots: WriteSlots
    ) -> None:
        """Learn the block layout and get ready to run.

        Raises:
            UnsupportedModelError: The layout is unknown.
        """
        first = self._layers[0]
        _, num_kv_heads, _, width = first.shape
        head_dim = width // 2
        self._unpin = pin_arena(self.store.host.arena, first.device)
        layout = probe_layout(self._layers, head_dim, write_slots, _SPARE_BLOCK)
        self._clear_spare_block()
        self._layout = layout
        shape = KvShape(len(self._layers), num_kv_heads, head_dim, first.dtype)
        self._mover = KvMover(
            self.store,
            layout,
            Reencoder(rope, rotate),
            shape=shape,
            codec=codec_of(self._kv_storage, shape, first.device),
            fingerprint=self._fingerprint,
            device=first.device,
        )

    def cached_keys_of(self, token_ids: Sequence[int], run_pass: RunPass) -> Tensor:
        """Run a few tokens on their own and return the keys they left in the cache.

        Args:
            token_ids: At most a block of ids.
            run_pass: Runs a pass of sub-requests.

        Returns:
            ``[num_layers, num_tokens, num_kv_heads, head_dim]``.
        """
        assert self._layout is not None
        sub = SubRequest(token_ids, 0, len(token_ids), [_SPARE_BLOCK])
        run_pass(self._builder.alone(empty_step(), [sub], first=True))
        first = self._layers[0]
        shape = (len(self._layers), len(token_ids), first.shape[1], first.shape[3] // 2)
        keys = torch.empty(shape, dtype=first.dtype, device=first.device)
        self._layout.gather(keys, torch.empty_like(keys), [_SPARE_BLOCK], 0)
        self._clear_spare_block()
        return keys

    def prepare_step(
        self, scheduled: SchedulerOutput, run_pass: RunPass
    ) -> SchedulerOutput:
        """Run everything of a step that comes before vLLM's own pass.

        Args:
            scheduled: What vLLM scheduled; not mutated.
            run_pass: Runs a pass of sub-requests.

        Returns:
            What vLLM's own pass runs.
        """
        metadata = scheduled.kv_connector_metadata
        assert isinstance(metadata, DaricMetadata)
        plan = self._plan = metadata.plan
        self._report = DaricWorkerMetadata(
            reports={step.req_id: RequestReport() for step in plan.requests}
        )
        self._bound_mover.protect(plan.hit_keys())
        self._chunks_of_step = ChunkBlocks(self._bound_mover, self._report)
        passes = StepPasses(scheduled, run_pass, self._builder)
        filler = BlockFiller(
            self._chunks,
            self._report,
            plan.scratch_block_ids,
            limits=self._limits,
            block_size=self._block_size,
        )
        now = plan.admitted(asynchronous=False)
        with torch.inference_mode():
            unfilled = filler.fill(now, passes)
            self._queue.drop(scheduled.finished_req_ids)
            self._queue.hold(plan.held_block_ids)
            self._queue.add(plan.admitted(asynchronous=True), self._chunks)
            self._pass_started_s = time.perf_counter()
            joining = self._recompute(passes, now, unfilled)
            joining += self._run_queue(passes, joining)
        return passes.join(joining)

    def finish_step(self) -> None:
        """After vLLM's pass: save what it completed."""
        now = time.perf_counter()
        for step in self._plan.admitted(asynchronous=False):
            report = self._report.report_of(step.req_id)
            report.recompute_s += now - self._pass_started_s
        with torch.inference_mode():
            if self._joined:
                self._joined = False
                self._queue.complete(self._chunks, self._report, self._pass_started_s)
            for save in self._plan.saves:
                identity = self._bound_mover.identity(
                    save.key, save.parent, save.index, save.document
                )
                save_segment(
                    self._bound_mover,
                    self._report,
                    identity,
                    save.block_ids,
                    save.start,
                    save.end - save.start,
                )
        self._filled = self._queue.take_filled()
        self._plan = StepPlan()

    def filled(self) -> set[str]:
        """Return asynchronous requests that wait no longer, after `finish_step`.

        Their blocks are filled, or they were aborted and nothing is written to their
        blocks any more.
        """
        return self._filled

    def take_report(self) -> DaricWorkerMetadata | None:
        """Return what this step did, once; None if nothing."""
        report, self._report = self._report, DaricWorkerMetadata()
        self._bound_mover.release()
        report.evicted = self._bound_mover.take_evicted()
        report.backlog_len = self._queue.backlog_len
        before, self._backlog_len = self._backlog_len, report.backlog_len
        if (
            report.saved
            or report.lost
            or report.evicted
            or report.reports
            or before != report.backlog_len
        ):
            return report
        return None

    def close(self) -> None:
        """Save what is on its way, and close the store."""
        self._unpin()
        self.store.close()

    def _recompute(
        self,
        passes: StepPasses,
        requests: Sequence[RequestStep],
        unfilled: dict[str, list[Span]],
    ) -> list[SubRequest]:
        """Stage 2: run what does not fit beside vLLM's requests; return the rest."""
        waves = window_waves(
            [
                _early_windows(request, unfilled.get(request.req_id, ()))
                for request in requests
            ],
            limits=self._limits,
            scheduled=passes.scheduled_size,
        )

        def subs_of(pieces: Sequence[Piece]) -> list[SubRequest]:
            return [
                SubRequest(
                    requests[piece.index].token_ids,
                    piece.start,
                    piece.end,
                    requests[piece.index].block_ids,
                )
                for piece in pieces
            ]

        for wave in waves.early:
            passes.run(subs_of(wave))
        return subs_of(waves.final)

    def _run_queue(
        self, passes: StepPasses, joining: Sequence[SubRequest]
    ) -> list[SubRequest]:
        """Let the fill queue go on; returns what of it joins vLLM's pass."""
        size = passes.scheduled_size
        taken = size.max_num_tokens + sum(sub.end - sub.start for sub in joining)
        seats = self._limits.max_num_seqs - size.max_num_seqs - len(joining)
        room = self._limits.max_num_tokens - taken
        share = -(-self._limits.max_num_tokens // _LEAST_SHARE)
        # In a pass of its own nothing is sampled, which pays where there is nobody to
        # sample for.
        alone = taken == 0 or room < share or seats < 1
        if not alone:
            subs = self._queue.next_pass(Limits(room, seats), self._chunks)
            self._joined = bool(subs)
            return subs
        most = self._limits.max_num_tokens if taken == 0 else share
        limits = Limits(most, self._limits.max_num_seqs)
        subs = self._queue.next_pass(limits, self._chunks)
        if subs:
            passes.run(subs)
            self._queue.complete(self._chunks, self._report, self._pass_started_s)
        return []

    def _clear_spare_block(self) -> None:
        for layer in self._layers:
            layer[_SPARE_BLOCK].zero_()

    @property
    def _chunks(self) -> ChunkBlocks:
        assert self._chunks_of_step is not None, "prepare_step comes first"
        return self._chunks_of_step

    @property
    def _bound_mover(self) -> KvMover:
        assert self._mover is not None, "bind_model comes before the first step"
        return self._mover


def _early_windows(request: RequestStep, unfilled: Sequence[Span]) -> Sequence[Span]:
    """A request's windows before the last one, and what stage 1 could not fill."""
    if not unfilled:
        return request.early_windows
    windows = merge([*request.early_windows, *unfilled])
    return [(start, min(end, request.hit_len)) for start, end in windows]
