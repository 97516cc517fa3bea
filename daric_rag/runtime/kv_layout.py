"""How keys and values lie in vLLM's paged blocks, and moving them in and out.

vLLM hands over one tensor per layer, ``[num_blocks, num_kv_heads, block_size,
2 * head_dim]``, whose inside is the attention kernel's own business:

| Layout       | Where       | Inside of a (block, head)                       |
|--------------|-------------|-------------------------------------------------|
| `PackedKv`   | CPU, "vec"  | K transposed, then V: see the class             |
| `AmxKv`      | CPU, "amx"  | tiles: see `kv_layout_amx`                      |
| `SplitKv`    | GPU         | K in [..., :head_dim], V in [..., head_dim:]    |
| `PermutedKv` | CPU, others | learned: see `kv_layout_learned`                |

`kv_probe` finds out which one it is. Tokens move as ``[num_layers, num_tokens,
num_kv_heads, head_dim]``, the record's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "KvLayout",
    "PackedKv",
    "SplitKv",
    "WriteSlots",
    "block_pieces",
    "flat_groups",
    "slots_of",
]

WriteSlots = Callable[[int, Tensor, Tensor, Tensor], None]
"""(layer, keys, values, slots): the kernel's own operator; keys and values are
``[num_tokens, num_kv_heads, head_dim]``, slots int64 ``[num_tokens]``."""


class KvLayout(Protocol):
    """Worker process. Moves tokens between blocks and records.

    Attributes:
        block_size: Tokens per block.
    """

    block_size: int

    def scatter(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """Write tokens to positions [start, start + num_tokens) of a block table.

        Args:
            keys: ``[num_layers, num_tokens, num_kv_heads, head_dim]``, any strides.
            values: Like `keys`.
            block_ids: The sequence's blocks from position 0 on.
            start: First position.
        """
        ...

    def gather(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """Read the same positions into `keys` and `values`, which are mutated."""
        ...

    def read_slots(self, layer: int, slots: Tensor) -> Tensor:
        """Return one layer's K and V at some slots.

        Args:
            layer: Its index.
            slots: int64 ``[num_tokens]``, on the cache's device.

        Returns:
            ``[2, num_tokens, num_kv_heads, head_dim]``, contiguous, nobody else's.
        """
        ...


def block_pieces(
    start: int, end: int, block_size: int
) -> Iterator[tuple[int, int, int, int]]:
    """Cut positions [start, end) at block boundaries.

    Yields:
        (offset from start, tokens, index into the block table, offset in the block).
    """
    position = start
    while position < end:
        index, inside = divmod(position, block_size)
        num_tokens = min(end - position, block_size - inside)
        yield position - start, num_tokens, index, inside
        position += num_tokens


def slots_of(
    block_ids: Sequence[int], start: int, end: int, block_size: int
) -> list[int]:
    """Return the slots of positions [start, end) of a block table."""
    slots: list[int] = []
    for _, num_tokens, index, inside in block_pieces(start, end, block_size):
        first = block_ids[index] * block_size + inside
        slots.extend(range(first, first + num_tokens))
    return slots


def flat_groups(layers: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """View layers that can be moved together as one tensor, in order.

    Yields:
        (which layers, ``[num_layers, num_blocks, num_kv_heads, block_size * 2 *
        head_dim]``).
    """
    first = 0
    for tensor in _stacked(layers):
        layers_of = slice(first, first + tensor.shape[0])
        yield layers_of, tensor.view(*tensor.shape[:3], -1)
        first = layers_of.stop


def _stacked(layers: Sequence[Tensor]) -> list[Tensor]:
    """View all layers as one tensor where they lie at equal distances, else each alone.

    Returns:
        Tensors ``[num_layers, num_blocks, num_kv_heads, block_size, 2 * head_dim]``
        whose leading sizes add up to all layers.
    """
    first = layers[0]
    offsets = [tensor.storage_offset() for tensor in layers]
    step = offsets[1] - offsets[0] if len(offsets) > 1 else first.numel()
    storage = first.untyped_storage().data_ptr()
    uniform = step > 0 and all(
        tensor.untyped_storage().data_ptr() == storage
        and tensor.stride() == first.stride()
        and offset == offsets[0] + index * step
        for index, (tensor, offset) in enumerate(zip(layers, offsets, strict=True))
    )
    if not uniform:
        return [tensor[None] for tensor in layers]
    size, stride = (len(layers), *first.shape), (step, *first.stride())
    return [first.as_strided(size, stride, offsets[0])]


class PackedKv:
    """K of a (block, head) as [head_dim, block_size], V as [block_size, head_dim]."""

    def __init__(self, layers: Sequence[Tensor], head_dim: int) -> None:
        """View the layers; nothing is copied."""
        self.block_size = layers[0].shape[2]
        self._groups: list[tuple[slice, Tensor, Tensor]] = []
        for layers_of, flat in flat_groups(layers):
            rows, block_size = flat.shape[:3], self.block_size
            half = block_size * head_dim
            # Token-major views [num_layers, num_blocks, block_size, heads, head_dim].
            keys = flat[..., :half].view(*rows, head_dim, block_size)
            values = flat[..., half:].view(*rows, block_size, head_dim)
            self._groups.append(
                (layers_of, keys.permute(0, 1, 4, 2, 3), values.transpose(2, 3))
            )

    def scatter(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """See `KvLayout.scatter`. One strided copy per block, for all layers."""
        for source_k, source_v, block_k, block_v in self._pieces(
            keys, values, block_ids, start
        ):
            block_k.copy_(source_k)
            block_v.copy_(source_v)

    def gather(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """See `KvLayout.gather`."""
        for target_k, target_v, block_k, block_v in self._pieces(
            keys, values, block_ids, start
        ):
            target_k.copy_(block_k)
            target_v.copy_(block_v)

    def read_slots(self, layer: int, slots: Tensor) -> Tensor:
        """See `KvLayout.read_slots`."""
        blocks, inside = slots // self.block_size, slots % self.block_size
        first, cache_k, cache_v = next(
            (layers.start, keys, values)
            for layers, keys, values in self._groups
            if layers.start <= layer < layers.stop
        )
        caches = cache_k[layer - first], cache_v[layer - first]
        return torch.stack([cache[blocks, inside] for cache in caches])

    def _pieces(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        end = start + keys.shape[1]
        for layers, cache_k, cache_v in self._groups:
            group_k, group_v = keys[layers], values[layers]
            for offset, num, index, inside in block_pieces(start, end, self.block_size):
                block, stop = block_ids[index], inside + num
                yield (
                    group_k[:, offset : offset + num],
                    group_v[:, offset : offset + num],
                    cache_k[:, block, inside:stop],
                    cache_v[:, block, inside:stop],
                )


class SplitKv:
    """K in the first half of the last dimension, V in the second (GPU kernels).

    Read from vLLM's source; not measured, for want of a GPU with vLLM at hand.
    """

    def __init__(self, layers: Sequence[Tensor], head_dim: int) -> None:
        """View the layers; nothing is copied."""
        self._layers, self._head_dim = list(layers), head_dim
        self.block_size = layers[0].shape[2]

    def scatter(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """See `KvLayout.scatter`. One indexed write per layer."""
        blocks, inside = self._index(block_ids, start, keys.shape[1])
        both = torch.cat((keys, values), dim=-1)
        for layer, tokens in zip(self._layers, both, strict=True):
            # [num_tokens, num_kv_heads, 2 * head_dim] on both sides.
            layer[blocks, :, inside] = tokens

    def gather(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """See `KvLayout.gather`."""
        blocks, inside = self._index(block_ids, start, keys.shape[1])
        for index, layer in enumerate(self._layers):
            tokens = layer[blocks, :, inside]
            keys[index].copy_(tokens[..., : self._head_dim])
            values[index].copy_(tokens[..., self._head_dim :])

    def read_slots(self, layer: int, slots: Tensor) -> Tensor:
        """See `KvLayout.read_slots`."""
        blocks, inside = slots // self.block_size, slots % self.block_size
        tokens = self._layers[layer][blocks, :, inside]
        return torch.stack(tokens.split(self._head_dim, dim=-1))

    def _index(
        self, block_ids: Sequence[int], start: int, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        device = self._layers[0].device
        positions = torch.arange(start, start + num_tokens, device=device)
        table = torch.tensor(block_ids, device=device)
        return table[positions // self.block_size], positions % self.block_size
