"""Stage 1 of a step: blocks are filled with chunks' independent KV (section 3.3.3).

For requests whose blocks are filled within the step that admits them: hits are read,
re-encoded and placed; misses are generated in scratch blocks, each chunk once however
often the step wants it, then saved, re-encoded and placed. Requests that may take
several steps are `fill_queue`'s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from daric_rag.keys import SegmentKey
from daric_rag.runtime.chunk_blocks import ChunkBlocks, MissingChunk
from daric_rag.runtime.metadata import DaricWorkerMetadata
from daric_rag.runtime.step_builder import StepPasses, SubRequest
from daric_rag.selection import Span
from daric_rag.steps import (
    GenerationBatch,
    GenerationItem,
    Limits,
    RequestStep,
    generation_batches,
)

__all__ = ["BlockFiller"]


class BlockFiller:
    """Worker process. Carries out stage 1 of one step.

    Args:
        chunks: Between store and blocks.
        report: What was done is added to it.
        scratch_block_ids: Blocks to generate in.
        limits: Of one forward pass.
        block_size: Tokens per block.
    """

    def __init__(
        self,
        chunks: ChunkBlocks,
        report: DaricWorkerMetadata,
        scratch_block_ids: Sequence[int],
        *,
        limits: Limits,
        block_size: int,
    ) -> None:
        self._chunks, self._report = chunks, report
        self._scratch_block_ids = scratch_block_ids
        self._limits, self._block_size = limits, block_size

    def fill(
        self, requests: Sequence[RequestStep], passes: StepPasses
    ) -> dict[str, list[Span]]:
        """Fill every block of the requests that does not come from vLLM's own pass.

        Returns:
            Per request, spans that could not be filled: lost chunks too long for the
            scratch blocks. They are to be computed in full context.
        """
        missing: dict[SegmentKey, MissingChunk] = {}
        self._chunks.load(requests, missing)
        fitting = [m for m in missing.values() if self._fits_scratch(m)]
        if fitting:
            self._generate(fitting, passes)
        unfilled: dict[str, list[Span]] = {}
        for entry in missing.values():
            if not self._fits_scratch(entry):
                for request, chunk in entry.wanted:
                    span = (max(chunk.start, chunk.place_from), chunk.end)
                    unfilled.setdefault(request.req_id, []).append(span)
        return unfilled

    def _generate(self, missing: Sequence[MissingChunk], passes: StepPasses) -> None:
        """Compute missing chunks on their own, save them, and place them."""
        items = [GenerationItem(entry.token_ids, entry.loaded_len) for entry in missing]
        batches = generation_batches(
            items,
            scratch_block_ids=self._scratch_block_ids,
            block_size=self._block_size,
            limits=self._limits,
        )
        for batch in batches:
            started_s = time.perf_counter()
            self._run_batch(batch, items, missing, passes)
            served: set[str] = set()
            for index, blocks in batch.block_ids.items():
                served |= self._chunks.harvest(missing[index], blocks)
            spent_s = time.perf_counter() - started_s
            for req_id in served:
                self._report.report_of(req_id).generation_s += spent_s

    def _run_batch(
        self,
        batch: GenerationBatch,
        items: Sequence[GenerationItem],
        missing: Sequence[MissingChunk],
        passes: StepPasses,
    ) -> None:
        for index, blocks in batch.block_ids.items():
            self._chunks.seed(missing[index], blocks)
        for number, wave in enumerate(batch.waves, 1):
            if number == len(batch.waves):
                for piece in wave:
                    blocks = batch.block_ids[piece.index]
                    self._chunks.expect_saves(missing[piece.index], blocks)
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

    def _fits_scratch(self, entry: MissingChunk) -> bool:
        # A lost chunk too long for what could be borrowed is computed in full context,
        # as the scheduler side would have planned it, had it known.
        num_blocks = -(-entry.num_tokens // self._block_size)
        return num_blocks <= len(self._scratch_block_ids)
