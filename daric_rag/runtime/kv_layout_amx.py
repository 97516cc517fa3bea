"""vLLM's CPU layout for AMX tiles (bfloat16 on Xeons from Sapphire Rapids on).

A tile holds sixteen rows of 32-bit lanes, two bfloat16 each. Inside of a (block, head),
found by `kv_probe` on such a machine and held against it at every start::

    K   [block_size / 16, head_dim / 2, 16, 2]    token = 16 i + k, dim = 2 j + l
    V   [head_dim / 16, block_size / 2, 16, 2]    dim = 16 i + k, token = 2 j + l
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from daric_rag.runtime.kv_layout import WriteSlots, block_pieces, flat_groups
from daric_rag.runtime.kv_layout_learned import scatter_by_slots

__all__ = ["AmxKv"]

_ROWS, _LANE = 16, 2

_Pair = tuple[Tensor, Tensor]
"""The same tokens: in a record, and in the blocks."""


class AmxKv:
    """K and V in AMX tiles."""

    def __init__(
        self,
        layers: Sequence[Tensor],
        head_dim: int,
        write_slots: WriteSlots | None = None,
    ) -> None:
        """View the layers, which `fits` accepts; nothing is copied.

        Args:
            layers: One cache tensor per layer.
            head_dim: Elements per head.
            write_slots: The kernel's operator; needed for `scatter` only.
        """
        self.block_size = layers[0].shape[2]
        self._write_slots = write_slots
        self._groups: list[tuple[slice, Tensor, Tensor]] = []
        for layers_of, flat in flat_groups(layers):
            rows, block_size = flat.shape[:3], self.block_size
            half = block_size * head_dim
            keys = flat[..., :half].view(
                *rows, block_size // _ROWS, head_dim // _LANE, _ROWS, _LANE
            )
            values = flat[..., half:].view(
                *rows, head_dim // _ROWS, block_size // _LANE, _ROWS, _LANE
            )
            # Token-major: [num_layers, num_blocks, (token), heads, (dim)].
            self._groups.append(
                (
                    layers_of,
                    keys.permute(0, 1, 3, 5, 2, 4, 6),
                    values.permute(0, 1, 4, 6, 2, 3, 5),
                )
            )

    @staticmethod
    def fits(block_size: int, head_dim: int) -> bool:
        """Whether whole tiles make up a block."""
        return block_size % _ROWS == 0 and head_dim % _ROWS == 0

    def scatter(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """See `KvLayout.scatter`. The kernel's operator; our copies take twice as long.

        (256 tokens of 30 layers with 3 heads of 64: 1.1 ms against 2.5 ms.)
        """
        assert self._write_slots is not None
        scatter_by_slots(
            self._write_slots, keys, values, block_ids, start, self.block_size
        )

    def gather(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """See `KvLayout.gather`. A few strided copies per block, for all layers."""
        for tokens, cached in self._pairs(keys, values, block_ids, start):
            tokens.copy_(cached)

    def read_slots(self, layer: int, slots: Tensor) -> Tensor:
        """See `KvLayout.read_slots`."""
        inside = slots % self.block_size
        layers, cache_k, cache_v = next(
            group for group in self._groups if group[0].start <= layer < group[0].stop
        )
        index, blocks = layer - layers.start, slots // self.block_size
        keys = cache_k[index, blocks, inside // _ROWS, inside % _ROWS]
        values = cache_v[index, blocks, inside // _LANE, inside % _LANE]
        return torch.stack([tokens.flatten(-2) for tokens in (keys, values)])

    def _pairs(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> Iterator[_Pair]:
        end = start + keys.shape[1]
        for layers, cache_k, cache_v in self._groups:
            group_k = keys[layers].unflatten(-1, (-1, _LANE))
            group_v = values[layers].unflatten(-1, (-1, _ROWS))
            for offset, num, index, inside in block_pieces(start, end, self.block_size):
                block, tokens = block_ids[index], slice(offset, offset + num)
                yield from _key_pairs(group_k[:, tokens], cache_k[:, block], inside)
                yield from _value_pairs(group_v[:, tokens], cache_v[:, block], inside)


def _key_pairs(tokens: Tensor, cached: Tensor, inside: int) -> Iterator[_Pair]:
    """Pair tokens from offset `inside` on with their places in a block, row by row.

    Args:
        tokens: ``[num_layers, num_tokens, num_heads, head_dim / 2, 2]``.
        cached: ``[num_layers, block_size / 16, 16, num_heads, head_dim / 2, 2]``.
        inside: Of the first token, in the block.
    """
    num_tokens = tokens.shape[1]
    if num_tokens == cached.shape[1] * _ROWS:
        yield tokens.unflatten(1, (-1, _ROWS)), cached
        return
    for offset, num, tile, row in block_pieces(inside, inside + num_tokens, _ROWS):
        yield tokens[:, offset : offset + num], cached[:, tile, row : row + num]


def _value_pairs(tokens: Tensor, cached: Tensor, inside: int) -> Iterator[_Pair]:
    """Pair tokens from offset `inside` on with their places in a block, by parity.

    Args:
        tokens: ``[num_layers, num_tokens, num_heads, head_dim / 16, 16]``.
        cached: ``[num_layers, block_size / 2, 2, num_heads, head_dim / 16, 16]``.
        inside: Of the first token, in the block.
    """
    for offset in range(min(_LANE, tokens.shape[1])):
        lane, parity = divmod(inside + offset, _LANE)
        every_other = tokens[:, offset::_LANE]
        yield every_other, cached[:, lane : lane + every_other.shape[1], parity]
