"""An engine for tests without vLLM: the dense reference over paged blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from daric_rag.runtime.kv_layout import SplitKv
from daric_rag.runtime.rope import Reencoder, RopeParameters
from daric_rag.runtime.step_builder import SubRequest
from daric_rag.steps import Limits
from tests.reference.dense import DenseReference
from tests.reference.outputs import KVCache

NULL_MARK = 7.0
"""What the null block is filled with; nobody may write to it."""

_AMPLE = Limits(512, 8)


class PagedReference:
    """Sub-requests over blocks, computed by the dense reference.

    Windows over the same blocks are one sequence's and see each other.
    """

    def __init__(
        self,
        reference: DenseReference,
        *,
        block_size: int = 32,
        num_blocks: int = 8,
        limits: Limits = _AMPLE,
    ) -> None:
        self.reference, self.limits = reference, limits
        head_dim, heads = reference.head_dim, reference.num_kv_heads
        shape = (num_blocks, heads, block_size, 2 * head_dim)
        self.layers = [
            torch.zeros(shape, dtype=reference.dtype)
            for _ in range(reference.num_layers)
        ]
        for layer in self.layers:
            layer[0] = NULL_MARK
        self.layout = SplitKv(self.layers, head_dim)
        self.passes = 0
        inv_freq = tuple(reference.inv_freq.double().tolist())
        is_neox = not reference.interleaved
        self.rope = RopeParameters(inv_freq, 2 * len(inv_freq), is_neox)

    def run(self, subs: Sequence[SubRequest]) -> None:
        assert sum(sub.end - sub.start for sub in subs) <= self.limits.max_num_tokens
        assert len(subs) <= self.limits.max_num_seqs
        assert all(0 not in sub.block_ids for sub in subs)
        self.passes += 1
        for table in {tuple(sub.block_ids) for sub in subs}:
            self._compute([sub for sub in subs if tuple(sub.block_ids) == table])

    def _compute(self, windows: Sequence[SubRequest]) -> None:
        last = windows[-1]
        positions = torch.tensor([p for w in windows for p in range(w.start, w.end)])
        before = self.read(last.block_ids, last.end)
        found = self.reference._compute(last.token_ids, positions, before).cache
        self.layout.scatter(found.keys, found.values, last.block_ids, 0)

    def read(self, block_ids: Sequence[int], num_tokens: int) -> KVCache:
        reference = self.reference
        heads = (reference.num_kv_heads, reference.head_dim)
        shape = (reference.num_layers, num_tokens, *heads)
        cache = KVCache(*torch.empty((2, *shape), dtype=reference.dtype))
        self.layout.gather(cache.keys, cache.values, block_ids, 0)
        return cache

    def reencoder(self, rope: RopeParameters | None = None) -> Reencoder:
        from daric_rag.runtime.vllm_api import rotate_rows

        return Reencoder(rope or self.rope, rotate_rows)
