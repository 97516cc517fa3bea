"""CPU layouts that only the attention kernel itself knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from daric_rag.runtime.kv_layout import WriteSlots, block_pieces, slots_of

__all__ = ["PermutedKv", "scatter_by_slots"]


def scatter_by_slots(
    write_slots: WriteSlots,
    keys: Tensor,
    values: Tensor,
    block_ids: Sequence[int],
    start: int,
    block_size: int,
) -> None:
    """Write tokens by the kernel's own operator; see `KvLayout.scatter`."""
    end = start + keys.shape[1]
    slots = torch.tensor(
        slots_of(block_ids, start, end, block_size), device=keys.device
    )
    for layer, (layer_k, layer_v) in enumerate(zip(keys, values, strict=True)):
        write_slots(layer, layer_k.contiguous(), layer_v.contiguous(), slots)


class PermutedKv:
    """Any permutation of a block's elements, learned from the kernel itself.

    Correct for kernels whose packing we never saw, at the price of an indexed read
    per saved block.
    """

    def __init__(
        self,
        layers: Sequence[Tensor],
        permutation: Tensor,
        write_slots: WriteSlots,
    ) -> None:
        """Keep the permutation.

        Args:
            layers: One cache tensor per layer.
            permutation: Offset in a raw block of every element of K, then of V,
                [2, block_size, num_kv_heads, head_dim].
            write_slots: The kernel's operator.
        """
        self._layers = list(layers)
        self._permutation, self._write_slots = permutation, write_slots
        self.block_size = layers[0].shape[2]

    def scatter(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """See `KvLayout.scatter`."""
        scatter_by_slots(
            self._write_slots, keys, values, block_ids, start, self.block_size
        )

    def gather(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """See `KvLayout.gather`."""
        end = start + keys.shape[1]
        for offset, num, index, inside in block_pieces(start, end, self.block_size):
            for layer, cache in enumerate(self._layers):
                raw = cache[block_ids[index]].flatten()
                tokens_k, tokens_v = raw[self._permutation]
                keys[layer, offset : offset + num] = tokens_k[inside : inside + num]
                values[layer, offset : offset + num] = tokens_v[inside : inside + num]

    def read_slots(self, layer: int, slots: Tensor) -> Tensor:
        """See `KvLayout.read_slots`."""
        blocks, inside = slots // self.block_size, slots % self.block_size
        raw = self._layers[layer][blocks].flatten(1)
        tokens = torch.arange(len(slots), device=slots.device)[:, None, None]
        # [num_tokens, 1, 1] and [2, num_tokens, num_kv_heads, head_dim].
        return raw[tokens, self._permutation[:, inside]]
