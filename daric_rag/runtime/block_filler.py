"""Stage 1 of a step: blocks are filled with chunks' independent KV (section 3.3.3).

Hits are read, re-encoded and placed. Misses are generated in scratch blocks, each chunk
once however often the step wants it; then saved, re-encoded and placed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from daric_rag.chunk_plan import ChunkPlan
from daric_rag.document_info import DocumentInfo
from daric_rag.keys import SegmentKey
from daric_rag.runtime.kv_mover import KvMover
from daric_rag.runtime.metadata import DaricWorkerMetadata
from daric_rag.runtime.step_builder import StepPasses, SubRequest
from daric_rag.selection import Span
from daric_rag.steps import (
    GenerationBatch,
    GenerationItem,
    Limits,
    RequestStep,
    StepPlan,
    generation_batches,
)
from daric_rag.storage.base import Record
from daric_rag.storage.format import SegmentIdentity

__all__ = ["BlockFiller", "MissingChunk", "save_segment"]


@dataclass
class MissingChunk:
    """A chunk to generate, and everywhere in this step that it is wanted."""

    chunk: ChunkPlan
    token_ids: tuple[int, ...]
    loaded: list[Record]
    wanted: list[tuple[RequestStep, ChunkPlan]] = field(default_factory=list)

    @property
    def loaded_len(self) -> int:
        """Leading tokens that the store provided."""
        return sum(record.header.num_tokens for record in self.loaded)


class BlockFiller:
    """Worker process. Carries out stage 1 of one step.

    Args:
        mover: Between store and blocks.
        plan: The step's work.
        report: What was done is added to it.
        limits: Of one forward pass.
        block_size: Tokens per block.
    """

    def __init__(
        self,
        mover: KvMover,
        plan: StepPlan,
        report: DaricWorkerMetadata,
        *,
        limits: Limits,
        block_size: int,
    ) -> None:
        self._mover, self._plan, self._report = mover, plan, report
        self._limits, self._block_size = limits, block_size

    def fill(self, passes: StepPasses) -> dict[str, list[Span]]:
        """Fill every block of the step that does not come from vLLM's own pass.

        Returns:
            Per request, spans that could not be filled: lost chunks too long for the
            scratch blocks. They are to be computed in full context.
        """
        missing = self._load()
        fitting = [entry for entry in missing if self._fits_scratch(entry)]
        if fitting:
            self._generate(fitting, passes)
        unfilled: dict[str, list[Span]] = {}
        for entry in missing:
            if not self._fits_scratch(entry):
                for request, chunk in entry.wanted:
                    span = (max(chunk.start, chunk.place_from), chunk.end)
                    unfilled.setdefault(request.req_id, []).append(span)
        return unfilled

    # Stage 1: hits.

    def _load(self) -> list[MissingChunk]:
        """Place every hit; return what has to be generated, each chunk once."""
        missing: dict[SegmentKey, MissingChunk] = {}
        for step in self._plan.requests:
            started_s = time.perf_counter()
            records = self._read_hits(step.chunks)
            for chunk in step.chunks:
                loaded = _leading(records, chunk)
                if len(loaded) < len(chunk.keys) and not self._mover.exact_records:
                    # As the plan has it: nothing is computed on top of such records.
                    loaded = []
                self._note_lost(step, chunk, len(loaded))
                if len(loaded) == len(chunk.keys):
                    self._place(loaded, step, chunk)
                    continue
                ids = tuple(step.token_ids[chunk.start : chunk.end])
                entry = MissingChunk(chunk, ids, loaded)
                entry = missing.setdefault(chunk.keys[-1], entry)
                entry.wanted.append((step, chunk))
            self._mover.settle()
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
        records = self._mover.read(keys, lens)
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
            self._mover.place(
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

    def _generate(self, missing: Sequence[MissingChunk], passes: StepPasses) -> None:
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
            self._run_batch(batch, items, missing, passes)
            served: set[str] = set()
            for index, blocks in batch.block_ids.items():
                served |= self._harvest(missing[index], blocks)
            self._mover.settle()
            spent_s = time.perf_counter() - started_s
            for req_id in served:
                self._report.reports[req_id].generation_s += spent_s

    def _run_batch(
        self,
        batch: GenerationBatch,
        items: Sequence[GenerationItem],
        missing: Sequence[MissingChunk],
        passes: StepPasses,
    ) -> None:
        for index, blocks in batch.block_ids.items():
            entry = missing[index]
            for number, record in enumerate(entry.loaded):
                self._mover.place(
                    record,
                    blocks,
                    chunk_start=0,
                    segment_start=entry.chunk.segment_span(number)[0],
                    place_from=0,
                    place_until=len(entry.token_ids),
                )
        for wave in batch.waves:
            passes.run(
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

    def _harvest(self, entry: MissingChunk, blocks: Sequence[int]) -> set[str]:
        """Save a generated chunk and place it wherever it is wanted."""
        records = list(entry.loaded)
        for index in range(len(records), len(entry.chunk.keys)):
            start, end = entry.chunk.segment_span(index)
            identity = self._identity(entry, index)
            record = save_segment(
                self._mover, self._report, identity, blocks, start, end - start
            )
            records.append(record)
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

    def _identity(self, entry: MissingChunk, index: int) -> SegmentIdentity:
        step, chunk = entry.wanted[0]
        document = None
        if chunk.ends_document and index == len(chunk.keys) - 1:
            document = DocumentInfo.of(entry.token_ids, chunk.title, step.namespace)
        parent = chunk.keys[index - 1] if index else step.root
        return self._mover.identity(chunk.keys[index], parent, index, document)

    def _fits_scratch(self, entry: MissingChunk) -> bool:
        # A lost chunk too long for what could be borrowed is computed in full context,
        # as the scheduler side would have planned it, had it known.
        num_blocks = -(-len(entry.token_ids) // self._block_size)
        return num_blocks <= len(self._plan.scratch_block_ids)


def save_segment(
    mover: KvMover,
    report: DaricWorkerMetadata,
    identity: SegmentIdentity,
    blocks: Sequence[int],
    start: int,
    num_tokens: int,
) -> Record:
    """Save a segment from blocks and report it if the store took it."""
    record, stored = mover.save(identity, blocks, start, num_tokens)
    if stored:
        report.saved[SegmentKey(identity.key)] = record.record_bytes
    return record


def _leading(records: dict[SegmentKey, Record], chunk: ChunkPlan) -> list[Record]:
    """The chunk's records up to the first that is missing."""
    found: list[Record] = []
    for key in chunk.keys[: chunk.num_hit_segments]:
        record = records.get(key)
        if record is None:
            break
        found.append(record)
    return found
