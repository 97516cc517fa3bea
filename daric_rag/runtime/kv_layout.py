"""How keys and values lie in vLLM's paged blocks, and moving them in and out.

vLLM hands over one tensor per layer, ``[num_blocks, num_kv_heads, block_size,
2 * head_dim]``, whose inside is the attention kernel's own business. What a kernel
does with it is found out at start, not assumed: a known pattern is written through the
kernel's public cache-writing operator into one spare block and read back.

| Layout       | Where         | Inside of a (block, head)                            |
|--------------|---------------|------------------------------------------------------|
| `PackedKv`   | CPU, "vec"    | K as [head_dim, block_size], V as [block_size, head_dim] |
| `PermutedKv` | CPU, others   | any permutation of the same elements, learned         |
| `SplitKv`    | GPU           | K in [..., :head_dim], V in [..., head_dim:]           |

Tokens move as ``[num_layers, num_tokens, num_kv_heads, head_dim]``, the record's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from daric_rag.errors import UnsupportedModelError

__all__ = ["KvLayout", "WriteSlots", "block_pieces", "probe_layout"]

WriteSlots = Callable[[int, Tensor, Tensor, Tensor], None]
"""(layer, keys, values, slots): the kernel's own operator; keys and values are
``[num_tokens, num_kv_heads, head_dim]``, slots int64 ``[num_tokens]``."""


class KvLayout(Protocol):
    """Worker process. Moves tokens between blocks and records."""

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


def probe_layout(
    layers: Sequence[Tensor], head_dim: int, write_slots: WriteSlots, spare_block: int
) -> KvLayout:
    """Find out how the kernel lays out a block.

    Args:
        layers: One cache tensor per layer.
        head_dim: Elements per head of K.
        write_slots: The kernel's operator.
        spare_block: A block that nobody uses; it is overwritten.

    Raises:
        UnsupportedModelError: The block is no permutation of K and V.
    """
    num_blocks, num_heads, block_size, width = layers[0].shape
    if width != 2 * head_dim or any(t.shape != layers[0].shape for t in layers):
        raise UnsupportedModelError(
            f"the KV cache's layers are {[tuple(t.shape) for t in layers][:2]}...; only "
            f"equal layers with K and V of the same head size are supported. Run this "
            f'model with reuse="off"'
        )
    # Distinct bit patterns survive a copy whatever they mean as floats; small positive
    # ones are ordinary numbers in bfloat16, float16 and float32 alike.
    shape = (block_size, num_heads, head_dim)
    bits = torch.int16 if layers[0].element_size() == 2 else torch.int32
    num = block_size * num_heads * head_dim
    if bits is torch.int16 and 2 * num >= 0x7C00:
        return _probe_by_digits(layers, head_dim, write_slots, spare_block)
    device = layers[0].device
    ids = torch.arange(1, 2 * num + 1, dtype=bits, device=device).view(layers[0].dtype)
    keys, values = ids[:num].view(shape), ids[num:].view(shape)
    return _choose(layers, head_dim, write_slots, spare_block, keys, values)


def _probe_by_digits(
    layers: Sequence[Tensor], head_dim: int, write_slots: WriteSlots, spare_block: int
) -> KvLayout:
    """Probe a block with more elements than 16-bit patterns: known layouts only."""
    _, num_heads, block_size, _ = layers[0].shape
    shape = (block_size, num_heads, head_dim)
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(shape, generator=generator).to(layers[0]) for _ in range(2)
    )
    return _choose(layers, head_dim, write_slots, spare_block, keys, values)


def _choose(
    layers: Sequence[Tensor],
    head_dim: int,
    write_slots: WriteSlots,
    spare_block: int,
    keys: Tensor,
    values: Tensor,
) -> KvLayout:
    block_size = layers[0].shape[2]
    slots = torch.arange(block_size, device=layers[0].device) + spare_block * block_size
    write_slots(0, keys, values, slots)
    candidates: list[KvLayout] = [PackedKv(layers, head_dim), SplitKv(layers, head_dim)]
    for layout in candidates:
        found_k, found_v = torch.empty_like(keys)[None], torch.empty_like(values)[None]
        _gather_layer0(layout, found_k, found_v, spare_block)
        if _same_bits(found_k[0], keys) and _same_bits(found_v[0], values):
            return layout
    raw = _bits(layers[0][spare_block]).flatten()
    wanted = torch.cat((_bits(keys).flatten(), _bits(values).flatten()))
    order = raw.argsort(stable=True)
    if wanted.unique().numel() != wanted.numel() or not torch.equal(
        raw[order], wanted.sort().values
    ):
        raise UnsupportedModelError(
            "the attention kernel stores keys and values in a form that daric_rag does "
            'not know; run this model with reuse="off", or another dtype or block size'
        )
    permutation = torch.empty_like(order)
    permutation[wanted.argsort(stable=True)] = order
    return PermutedKv(layers, head_dim, permutation, write_slots)


def _gather_layer0(layout: KvLayout, keys: Tensor, values: Tensor, block: int) -> None:
    assert isinstance(layout, PackedKv | SplitKv)
    layout.first_layer_only().gather(keys, values, [block], 0)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(_bits(left), _bits(right))


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
        self._layers, self._head_dim = layers, head_dim
        self.block_size = layers[0].shape[2]
        self._groups: list[tuple[slice, Tensor, Tensor]] = []
        first = 0
        for tensor in _stacked(layers):
            num_layers, num_blocks, num_heads, block_size, _ = tensor.shape
            flat = tensor.view(num_layers, num_blocks, num_heads, -1)
            half = block_size * head_dim
            rows = (num_layers, num_blocks, num_heads)
            # Token-major views [num_layers, num_blocks, block_size, heads, head_dim].
            keys = flat[..., :half].view(*rows, head_dim, block_size)
            values = flat[..., half:].view(*rows, block_size, head_dim)
            layers_of = slice(first, first + num_layers)
            self._groups.append(
                (layers_of, keys.permute(0, 1, 4, 2, 3), values.transpose(2, 3))
            )
            first += num_layers

    def first_layer_only(self) -> PackedKv:
        """The same layout over the first layer, for probing."""
        return PackedKv(self._layers[:1], self._head_dim)

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

    def first_layer_only(self) -> SplitKv:
        """The same layout over the first layer, for probing."""
        return SplitKv(self._layers[:1], self._head_dim)

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

    def _index(
        self, block_ids: Sequence[int], start: int, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        device = self._layers[0].device
        positions = torch.arange(start, start + num_tokens, device=device)
        table = torch.tensor(block_ids, device=device)
        return table[positions // self.block_size], positions % self.block_size


class PermutedKv:
    """Any permutation of a block's elements, learned from the kernel itself.

    Correct for kernels whose packing we never saw, at the price of an indexed read
    per saved block.
    """

    def __init__(
        self,
        layers: Sequence[Tensor],
        head_dim: int,
        permutation: Tensor,
        write_slots: WriteSlots,
    ) -> None:
        """Keep the permutation.

        Args:
            layers: One cache tensor per layer.
            head_dim: Elements per head.
            permutation: Where in a raw block the elements of K, then of V, as
                [block_size, num_kv_heads, head_dim] each, are found.
            write_slots: The kernel's operator.
        """
        self._layers, self._head_dim = list(layers), head_dim
        self._permutation, self._write_slots = permutation, write_slots
        self.block_size = layers[0].shape[2]

    def scatter(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """See `KvLayout.scatter`."""
        size = self.block_size
        slots = torch.tensor(
            [
                block_ids[position // size] * size + position % size
                for position in range(start, start + keys.shape[1])
            ]
        )
        for layer in range(len(self._layers)):
            self._write_slots(
                layer, keys[layer].contiguous(), values[layer].contiguous(), slots
            )

    def gather(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """See `KvLayout.gather`."""
        end = start + keys.shape[1]
        shape = (2, self.block_size, keys.shape[2], self._head_dim)
        for offset, num, index, inside in block_pieces(start, end, self.block_size):
            for layer, cache in enumerate(self._layers):
                raw = cache[block_ids[index]].flatten()
                tokens_k, tokens_v = raw[self._permutation].view(shape)
                keys[layer, offset : offset + num] = tokens_k[inside : inside + num]
                values[layer, offset : offset + num] = tokens_v[inside : inside + num]
