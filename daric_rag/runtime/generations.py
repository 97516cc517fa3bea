"""Missing chunks that asynchronous requests wait for, each generated once.

A chunk is computed on its own in scratch blocks, which it keeps from step to step,
however many passes it takes and however many requests want it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from daric_rag.keys import SegmentKey
from daric_rag.runtime.chunk_blocks import ChunkBlocks, MissingChunk
from daric_rag.runtime.step_builder import SubRequest

__all__ = ["Generations", "PassBudget"]


@dataclass
class PassBudget:
    """What is left of a pass.

    Attributes:
        num_tokens: Tokens.
        num_seqs: Sequences.
        has_scratch: Whether chunks may still be given scratch blocks. Once one had to
            go without, later ones do too, so that it is the next to get some.
    """

    num_tokens: int
    num_seqs: int
    has_scratch: bool = True

    def take(self, num_tokens: int) -> int:
        """Return how many of a sequence's tokens fit; they are taken."""
        if self.num_seqs <= 0:
            return 0
        taken = max(0, min(num_tokens, self.num_tokens))
        if taken:
            self.num_tokens -= taken
            self.num_seqs -= 1
        return taken


@dataclass
class _Generation:
    """A chunk being generated.

    Attributes:
        entry: The chunk, and who wants it.
        computed_len: Leading tokens whose KV is in `blocks`.
        blocks: Scratch blocks; none before its first pass.
        in_pass: `computed_len` when the running pass is over; None if it has no part
            in it.
    """

    entry: MissingChunk
    computed_len: int
    blocks: tuple[int, ...] = ()
    in_pass: int | None = None


class Generations:
    """Worker process. Chunks under way, by `MissingChunk.key`.

    Args:
        block_size: Tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        """Start empty."""
        self._block_size = block_size
        self._generations: dict[SegmentKey, _Generation] = {}
        self._held: tuple[int, ...] = ()

    @property
    def backlog_len(self) -> int:
        """Tokens still to be computed."""
        generations = self._generations.values()
        return sum(g.entry.num_tokens - g.computed_len for g in generations)

    def hold(self, block_ids: tuple[int, ...]) -> None:
        """Take note of the scratch blocks at hand; those in use are among them."""
        self._held = block_ids

    def entries(self) -> dict[SegmentKey, MissingChunk]:
        """Return the chunks under way, in a dictionary of its own."""
        return {key: g.entry for key, g in self._generations.items()}

    def expect(self, entry: MissingChunk) -> bool:
        """Generate a chunk, unless it is under way or will never fit.

        Returns:
            Whether it will be there.
        """
        # A lost chunk too long for what could be borrowed is computed in full context,
        # as the scheduler side would have planned it, had it known.
        fits = self._num_blocks(entry) <= len(self._held)
        if fits and entry.key not in self._generations:
            self._generations[entry.key] = _Generation(entry, entry.loaded_len)
        return entry.key in self._generations

    def drop(self, key: SegmentKey, req_id: str) -> None:
        """A request does not want a chunk any more."""
        entry = self._generations[key].entry
        entry.wanted = [w for w in entry.wanted if w[0].req_id != req_id]
        if not entry.wanted:
            del self._generations[key]

    def begin_pass(self) -> None:
        """A new pass is put together; one that failed computed nothing."""
        for generation in self._generations.values():
            generation.in_pass = None

    def next_pass(
        self, keys: Iterable[SegmentKey], budget: PassBudget, chunks: ChunkBlocks
    ) -> list[SubRequest]:
        """Return sub-requests for some of the chunks.

        Args:
            keys: Chunks under way, first come first served.
            budget: What the pass has room for; taken from.
            chunks: Between store and blocks.
        """
        subs: list[SubRequest] = []
        for key in keys:
            generation = self._generations[key]
            if generation.in_pass is not None:
                continue  # an earlier request waits for it too
            entry, start = generation.entry, generation.computed_len
            if not generation.blocks and not self._lend(generation, budget, chunks):
                continue
            end = start + budget.take(entry.num_tokens - start)
            if end > start:
                generation.in_pass = end
                subs.append(SubRequest(entry.token_ids, start, end, generation.blocks))
        return subs

    def expect_saves(self, chunks: ChunkBlocks) -> None:
        """The pass that was put together last is the next one to run."""
        for generation in self._generations.values():
            if generation.in_pass == generation.entry.num_tokens:
                chunks.expect_saves(generation.entry, generation.blocks)

    def complete_pass(self, chunks: ChunkBlocks) -> tuple[list[MissingChunk], set[str]]:
        """The pass has run: save and place the chunks that it completed.

        Returns:
            These chunks, and the requests for which anything was generated.
        """
        completed: list[MissingChunk] = []
        served: set[str] = set()
        for key, generation in list(self._generations.items()):
            if generation.in_pass is None:
                continue
            entry = generation.entry
            generation.computed_len, generation.in_pass = generation.in_pass, None
            served.update(step.req_id for step, _ in entry.wanted)
            if generation.computed_len == entry.num_tokens:
                chunks.harvest(entry, generation.blocks)
                del self._generations[key]
                completed.append(entry)
        return completed, served

    def _lend(
        self, generation: _Generation, budget: PassBudget, chunks: ChunkBlocks
    ) -> bool:
        """Give a chunk its scratch blocks; returns whether there were enough."""
        if not budget.has_scratch or not budget.num_tokens or not budget.num_seqs:
            return False
        used = {block for g in self._generations.values() for block in g.blocks}
        free = [block for block in self._held if block not in used]
        num_blocks = self._num_blocks(generation.entry)
        budget.has_scratch = num_blocks <= len(free)
        if budget.has_scratch:
            generation.blocks = tuple(free[:num_blocks])
            chunks.seed(generation.entry, generation.blocks)
        return budget.has_scratch

    def _num_blocks(self, entry: MissingChunk) -> int:
        return -(-entry.num_tokens // self._block_size)
