"""The connector's worker side: stage 1 fills blocks, stage 2 recomputes in place.

One engine step (section 3.3.3)::

    prepare_step   stage 1   read hits, re-encode, place
                             generate misses in scratch blocks, save, re-encode, place
                   stage 2   early windows that do not fit beside vLLM's requests
    vLLM's pass    stage 2   the other early windows, every request's last window,
                             ordinary requests
    finish_step              save what the pass completed of first chunks

It obeys the step plan. The one thing it decides is what to do about a record that is
not there or not intact: its chunk is generated in the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from daric_rag.keys import Scalar, SegmentKey, model_fingerprint
from daric_rag.plan import ChunkPlan
from daric_rag.runtime.kv_layout import KvLayout, WriteSlots
from daric_rag.runtime.kv_mover import KvMover, KvShape
from daric_rag.runtime.kv_probe import probe_layout
from daric_rag.runtime.metadata import (
    DaricMetadata,
    DaricWorkerMetadata,
    RequestReport,
)
from daric_rag.runtime.rope import Reencoder, RopeParameters, RotateFn
from daric_rag.runtime.step_builder import StepBuilder, SubRequest, empty_step
from daric_rag.runtime.vllm_api import SchedulerOutput
from daric_rag.selection import Span, merge
from daric_rag.steps import (
    GenerationBatch,
    GenerationItem,
    Limits,
    Piece,
    RequestStep,
    StepPlan,
    generation_batches,
    window_waves,
)
from daric_rag.storage import TieredStore
from daric_rag.storage.base import Record

__all__ = ["RunPass", "WorkerSide"]

RunPass = Callable[[SchedulerOutput], None]
"""Runs one pass of sub-requests and drops its logits."""

# vLLM's null block: nobody's data, so it may be written while probing.
_SPARE_BLOCK = 0


@dataclass
class _Missing:
    """A chunk to generate, and everywhere in this step that it is wanted."""

    chunk: ChunkPlan
    token_ids: tuple[int, ...]
    loaded: list[Record]
    wanted: list[tuple[RequestStep, ChunkPlan]] = field(default_factory=list)

    @property
    def loaded_len(self) -> int:
        """Leading tokens that the store provided."""
        return sum(record.header.num_tokens for record in self.loaded)


class WorkerSide:
    """Worker process. Executes step plans.

    Args:
        store: The KV store; owned and closed here.
        fields: What the model's KV depends on, this rank's.
        limits: Of one forward pass.
        block_size: Tokens per block.
    """

    def __init__(
        self,
        store: TieredStore,
        fields: dict[str, Scalar],
        limits: Limits,
        *,
        block_size: int,
    ) -> None:
        """Wait for `register_layers` and `bind_model`."""
        self.store = store
        self._fingerprint = model_fingerprint(fields)
        self._limits, self._block_size = limits, block_size
        self._layers: list[Tensor] = []
        self._builder = StepBuilder()
        self._layout: KvLayout | None = None
        self._mover: KvMover | None = None
        self._plan = StepPlan()
        self._report = DaricWorkerMetadata()
        self._pass_started_s = 0.0
        # Lost chunks of this step that are computed in full context instead.
        self._in_place: list[tuple[str, Span]] = []

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
        layout = probe_layout(self._layers, head_dim, write_slots, _SPARE_BLOCK)
        self._clear_spare_block()
        self._layout = layout
        self._mover = KvMover(
            self.store,
            layout,
            Reencoder(rope, rotate),
            shape=KvShape(len(self._layers), num_kv_heads, head_dim, first.dtype),
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
        self._plan = metadata.plan
        self._report = DaricWorkerMetadata(
            reports={step.req_id: RequestReport() for step in self._plan.requests}
        )
        step = _Step(scheduled, run_pass, self._builder)
        with torch.inference_mode():
            missing = self._load()
            fitting = [entry for entry in missing if self._fits_scratch(entry)]
            if fitting:
                self._generate(fitting, step)
            self._in_place = [
                (request.req_id, (max(chunk.start, chunk.place_from), chunk.end))
                for entry in missing
                if entry not in fitting
                for request, chunk in entry.wanted
            ]
        self._pass_started_s = time.perf_counter()
        return self._recompute(step)

    def finish_step(self) -> None:
        """After vLLM's pass: save first chunks that it completed."""
        now = time.perf_counter()
        for report in self._report.reports.values():
            report.recompute_s += now - self._pass_started_s
        with torch.inference_mode():
            for save in self._plan.saves:
                num_tokens = save.end - save.start
                self._save(save.key, save.block_ids, save.start, num_tokens)
        self._plan = StepPlan()

    def take_report(self) -> DaricWorkerMetadata | None:
        """Return what this step did, once; None if nothing."""
        report, self._report = self._report, DaricWorkerMetadata()
        if report.saved or report.lost or report.reports:
            return report
        return None

    def close(self) -> None:
        """Save what is on its way, and close the store."""
        self.store.close()

    # Stage 1: hits.

    def _load(self) -> list[_Missing]:
        """Place every hit; return what has to be generated, each chunk once."""
        missing: dict[SegmentKey, _Missing] = {}
        for step in self._plan.requests:
            started_s = time.perf_counter()
            records = self._read_hits(step.chunks)
            for chunk in step.chunks:
                loaded = _leading(records, chunk)
                self._note_lost(step, chunk, len(loaded))
                if len(loaded) == len(chunk.keys):
                    self._place(loaded, step, chunk)
                    continue
                ids = tuple(step.token_ids[chunk.start : chunk.end])
                entry = _Missing(chunk, ids, loaded)
                entry = missing.setdefault(chunk.keys[-1], entry)
                entry.wanted.append((step, chunk))
            spent_s = time.perf_counter() - started_s
            self._report.reports[step.req_id].load_s += spent_s
        return list(missing.values())

    def _read_hits(self, chunks: Sequence[ChunkPlan]) -> dict[SegmentKey, Record]:
        keys: list[SegmentKey] = []
        lens: list[int] = []
        for chunk in chunks:
            for index in range(chunk.num_hit_segments):
                start, end = chunk.segment_span(index)
                keys.append(chunk.keys[index])
                lens.append(end - start)
        if not keys:
            return {}
        records = self._bound_mover.read(keys, lens)
        return {
            key: record
            for key, record in zip(keys, records, strict=True)
            if record is not None
        }

    def _note_lost(self, step: RequestStep, chunk: ChunkPlan, num_loaded: int) -> None:
        if num_loaded >= chunk.num_hit_segments:
            return
        self._report.lost.add(chunk.keys[num_loaded])
        loaded_end = chunk.start + chunk.segment_span(num_loaded)[0]
        hit_end = chunk.start + chunk.hit_len
        unread = hit_end - max(loaded_end, min(chunk.place_from, hit_end))
        report = self._report.reports[step.req_id]
        if chunk.contiguous:
            report.unread_contiguous += unread
        else:
            report.unread_disjoint += unread

    def _place(
        self, records: Sequence[Record], step: RequestStep, chunk: ChunkPlan
    ) -> None:
        for index, record in enumerate(records):
            self._bound_mover.place(
                record,
                step.block_ids,
                chunk_start=chunk.start,
                segment_start=chunk.segment_span(index)[0],
                place_from=chunk.place_from,
                # The rest lies in the last window, which vLLM computes over as many
                # steps as it likes, and whose blocks it allocates step by step.
                place_until=step.hit_len,
            )

    # Stage 1: misses.

    def _generate(self, missing: Sequence[_Missing], step: _Step) -> None:
        """Compute missing chunks on their own, save them, and place them."""
        items = [GenerationItem(entry.token_ids, entry.loaded_len) for entry in missing]
        batches = generation_batches(
            items,
            scratch_block_ids=self._plan.scratch_block_ids,
            block_size=self._block_size,
            limits=self._limits,
        )
        for batch in batches:
            started_s = time.perf_counter()
            self._run_batch(batch, items, missing, step)
            served: set[str] = set()
            for index, blocks in batch.block_ids.items():
                served |= self._harvest(missing[index], blocks)
            spent_s = time.perf_counter() - started_s
            for req_id in served:
                self._report.reports[req_id].generation_s += spent_s

    def _run_batch(
        self,
        batch: GenerationBatch,
        items: Sequence[GenerationItem],
        missing: Sequence[_Missing],
        step: _Step,
    ) -> None:
        for index, blocks in batch.block_ids.items():
            entry = missing[index]
            for number, record in enumerate(entry.loaded):
                self._bound_mover.place(
                    record,
                    blocks,
                    chunk_start=0,
                    segment_start=entry.chunk.segment_span(number)[0],
                    place_from=0,
                    place_until=len(entry.token_ids),
                )
        for wave in batch.waves:
            step.run(
                [
                    SubRequest(
                        items[piece.index].token_ids,
                        piece.start,
                        piece.end,
                        batch.block_ids[piece.index],
                    )
                    for piece in wave
                ]
            )

    def _harvest(self, entry: _Missing, blocks: Sequence[int]) -> set[str]:
        """Save a generated chunk and place it wherever it is wanted."""
        records = list(entry.loaded)
        for index in range(len(records), len(entry.chunk.keys)):
            start, end = entry.chunk.segment_span(index)
            key = entry.chunk.keys[index]
            records.append(self._save(key, blocks, start, end - start))
        # The first to want it pays for it; the others find it made.
        payer = self._report.reports[entry.wanted[0][0].req_id]
        payer.generated_tokens += len(entry.token_ids) - entry.loaded_len
        payer.saved_tokens += sum(
            record.header.num_tokens
            for record in records[len(entry.loaded) :]
            if record.key in self._report.saved
        )
        for request, chunk in entry.wanted:
            self._place(records, request, chunk)
        return {request.req_id for request, _ in entry.wanted}

    def _save(
        self, key: SegmentKey, blocks: Sequence[int], start: int, num_tokens: int
    ) -> Record:
        record, stored = self._bound_mover.save(key, blocks, start, num_tokens)
        if stored:
            self._report.saved[key] = record.record_bytes
        return record

    # Stage 2.

    def _recompute(self, step: _Step) -> SchedulerOutput:
        """Run what does not fit beside vLLM's requests; join the rest to them."""
        requests = self._plan.requests
        waves = window_waves(
            [self._early_windows(request) for request in requests],
            limits=self._limits,
            scheduled=Limits(
                step.scheduled.total_num_scheduled_tokens,
                len(step.scheduled.num_scheduled_tokens),
            ),
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
            step.run(subs_of(wave))
        return step.join(subs_of(waves.final))

    def _early_windows(self, request: RequestStep) -> tuple[Span, ...]:
        extra = [span for req_id, span in self._in_place if req_id == request.req_id]
        if not extra:
            return request.early_windows
        windows = merge([*request.early_windows, *extra])
        return tuple((start, min(end, request.hit_len)) for start, end in windows)

    def _fits_scratch(self, entry: _Missing) -> bool:
        # A lost chunk too long for what could be borrowed is computed in full context,
        # as the scheduler side would have planned it, had it known.
        num_blocks = -(-len(entry.token_ids) // self._block_size)
        return num_blocks <= len(self._plan.scratch_block_ids)

    def _clear_spare_block(self) -> None:
        for layer in self._layers:
            layer[_SPARE_BLOCK].zero_()

    @property
    def _bound_mover(self) -> KvMover:
        assert self._mover is not None, "bind_model comes before the first step"
        return self._mover


class _Step:
    """The passes of one engine step, in order."""

    def __init__(
        self, scheduled: SchedulerOutput, run_pass: RunPass, builder: StepBuilder
    ) -> None:
        self.scheduled = scheduled
        self._run_pass, self._builder = run_pass, builder
        self._first = True

    def run(self, subs: Sequence[SubRequest]) -> None:
        """Run a pass of sub-requests only."""
        self._run_pass(self._builder.alone(self.scheduled, subs, first=self._first))
        self._first = False

    def join(self, subs: Sequence[SubRequest]) -> SchedulerOutput:
        """Return vLLM's own pass with `subs` beside it."""
        return self._builder.joined(self.scheduled, subs, first=self._first)


def _leading(records: dict[SegmentKey, Record], chunk: ChunkPlan) -> list[Record]:
    """The chunk's records up to the first that is missing."""
    found: list[Record] = []
    for key in chunk.keys[: chunk.num_hit_segments]:
        record = records.get(key)
        if record is None:
            break
        found.append(record)
    return found
