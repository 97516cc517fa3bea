"""Blocks to generate chunks in, borrowed from vLLM's pool while they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["ScratchBlocks"]


class ScratchBlocks:
    """Scheduler process. Takes free blocks while a step is planned, returns them after.

    What asynchronous requests generate in is held until none of them is left.

    Borrowing may push the least recently used blocks out of the prefix cache. The pool
    hands returned blocks out first, so step after step uses the same few.

    Args:
        pool: vLLM's block pool.
        block_size: Tokens per block.
        tokens_per_pass: Most tokens of one forward pass.
    """

    def __init__(self, pool: Any, block_size: int, tokens_per_pass: int) -> None:
        """Borrow nothing yet."""
        self._pool, self._block_size = pool, block_size
        # A block per chunk may be filled only partly.
        self._per_pass = 2 * -(-tokens_per_pass // block_size)
        self._borrowed: list[Any] = []
        self._held: list[Any] = []
        # One block is vLLM's null block.
        self._capacity = pool.num_gpu_blocks - 1

    @property
    def has_prefix_cache(self) -> bool:
        """Whether a request may take another one's blocks."""
        return bool(self._pool.enable_caching)

    @property
    def block_ids(self) -> tuple[int, ...]:
        """What this step has borrowed."""
        return tuple(block.block_id for block in self._borrowed)

    @property
    def held_block_ids(self) -> tuple[int, ...]:
        """What asynchronous requests hold; only ever longer until `release`."""
        return tuple(block.block_id for block in self._held)

    def max_generated_len(self, num_tokens: int) -> int:
        """Longest chunk that can be generated beside a request of `num_tokens`.

        It depends on the cache's size alone, never on its load: the same prompt always
        gets the same treatment.
        """
        return (self._capacity - self._blocks(num_tokens)) * self._block_size

    def has_room(
        self, num_tokens: int, chunk_lens: Sequence[int], *, asynchronous: bool
    ) -> bool:
        """Whether a request and the longest of its chunks fit in what is free now."""
        scratch = self._longest(chunk_lens, num_tokens)
        if asynchronous:
            scratch = max(0, scratch - len(self._held))
        needed = self._blocks(num_tokens) + scratch
        return bool(self._pool.get_num_free_blocks() >= needed)

    def borrow(
        self,
        num_tokens: int,
        chunk_lens: Sequence[int],
        missing_lens: Sequence[int],
        *,
        asynchronous: bool,
    ) -> None:
        """Take blocks for an admitted request.

        Enough for its longest chunk, since any record may turn out to be lost, and
        for all missing ones together while the pool has them: where they are held,
        while that leaves half of what is free.

        Args:
            num_tokens: Of the request.
            chunk_lens: Tokens of every chunk to load or to generate.
            missing_lens: Of those to generate.
            asynchronous: Whether to hold them until `release`.
        """
        least = self._longest(chunk_lens, num_tokens)
        # More than one pass computes would only push others out of the prefix cache.
        useful = min(sum(map(self._blocks, missing_lens)), self._per_pass)
        wanted, free = max(least, useful), self._pool.get_num_free_blocks()
        if asynchronous:
            held = len(self._held)
            # They are held over many steps, in which running requests grow.
            wanted = max(0, least - held, min(wanted - held, free // 2))
        num_blocks = min(wanted, free)
        blocks = self._pool.get_new_blocks(num_blocks)
        if asynchronous:
            self._held += blocks
        else:
            self._borrowed += blocks

    def give_back(self) -> None:
        """Return what the step borrowed; harmless when nothing is borrowed."""
        self._borrowed = self._return(self._borrowed)

    def release(self) -> None:
        """Return what asynchronous requests held; harmless when nothing is held."""
        self._held = self._return(self._held)

    def _return(self, blocks: list[Any]) -> list[Any]:
        if blocks:
            self._pool.free_blocks(reversed(blocks))
        return []

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _longest(self, chunk_lens: Sequence[int], num_tokens: int) -> int:
        # A chunk that could never be generated is computed in place if it is lost.
        limit = self.max_generated_len(num_tokens)
        return max((self._blocks(n) for n in chunk_lens if n <= limit), default=0)
