"""Finding out how an attention kernel lays out a block, instead of assuming it.

Every element of a spare block gets a number of its own, written through the kernel's
public operator; where the numbers are found afterwards is the layout. It is compared
with the layouts that we have fast code for; any other permutation is served by the
learned offsets, and what is no permutation (a quantised or padded cache) is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from daric_rag.errors import UnsupportedModelError
from daric_rag.runtime.kv_layout import (
    KvLayout,
    PackedKv,
    SplitKv,
    WriteSlots,
)
from daric_rag.runtime.kv_layout_amx import AmxKv
from daric_rag.runtime.kv_layout_learned import PermutedKv

__all__ = ["probe_layout"]

# Numbers are written as bit patterns, in two digits. Positive ones below this are
# ordinary finite numbers in bfloat16, float16 and float32, so no kernel changes them.
_BASE = 0x4000

_Kind = type[PackedKv] | type[AmxKv] | type[SplitKv]


def probe_layout(
    layers: Sequence[Tensor], head_dim: int, write_slots: WriteSlots, spare_block: int
) -> KvLayout:
    """Return the layout of an engine's KV cache.

    Args:
        layers: One cache tensor per layer, ``[num_blocks, num_kv_heads, block_size,
            2 * head_dim]``.
        head_dim: Elements per head of K, and of V.
        write_slots: The kernel's operator.
        spare_block: A block that nobody uses; it is overwritten.

    Raises:
        UnsupportedModelError: The cache is not K and V of equal layers, permuted.
    """
    shapes = {tuple(layer.shape) for layer in layers}
    if len(shapes) != 1 or layers[0].shape[3] != 2 * head_dim:
        raise UnsupportedModelError(
            f"the KV cache has layers of {sorted(shapes)}; only equal layers with "
            f"K and V of the same head size are supported. Run this model with vLLM "
            f"alone"
        )
    offsets = _learn_offsets(layers[0], head_dim, write_slots, spare_block)
    if torch.equal(_offsets_of(PackedKv, layers[0], head_dim), offsets):
        return PackedKv(layers, head_dim)
    if torch.equal(_offsets_of(SplitKv, layers[0], head_dim), offsets):
        return SplitKv(layers, head_dim)
    if AmxKv.fits(layers[0].shape[2], head_dim) and torch.equal(
        _offsets_of(AmxKv, layers[0], head_dim), offsets
    ):
        return AmxKv(layers, head_dim, write_slots)
    return PermutedKv(layers, offsets, write_slots)


def _learn_offsets(
    layer: Tensor, head_dim: int, write_slots: WriteSlots, spare_block: int
) -> Tensor:
    """Offset in a raw block of every element, ``[2, block_size, heads, head_dim]``."""
    _, num_heads, block_size, _ = layer.shape
    shape = (2, block_size, num_heads, head_dim)
    numbers = torch.arange(1, 1 + layer[0].numel(), device=layer.device)
    low = _read_back(layer, numbers % _BASE, shape, write_slots, spare_block)
    high = _read_back(layer, numbers // _BASE, shape, write_slots, spare_block)
    found = low + high * _BASE
    offsets = found.argsort()
    if not torch.equal(found[offsets], numbers):
        raise UnsupportedModelError(
            "the attention kernel stores keys and values in a form that daric_rag does "
            "not know; try another dtype or block_size, or run this model with vLLM "
            "alone"
        )
    return offsets.view(shape)


def _read_back(
    layer: Tensor,
    digits: Tensor,
    shape: tuple[int, int, int, int],
    write_slots: WriteSlots,
    spare_block: int,
) -> Tensor:
    bits = torch.int16 if layer.element_size() == 2 else torch.int32
    keys, values = digits.to(bits).view(layer.dtype).view(shape)
    block_size = shape[1]
    slots = torch.arange(block_size, device=layer.device) + spare_block * block_size
    write_slots(0, keys, values, slots)
    return layer[spare_block].flatten().view(bits).long()


def _offsets_of(kind: _Kind, layer: Tensor, head_dim: int) -> Tensor:
    """The offsets that `kind` reads, by letting it read a block of offsets."""
    _, num_heads, block_size, _ = layer.shape
    block = torch.arange(layer[0].numel(), device=layer.device).view(layer[:1].shape)
    offsets = torch.empty(
        (2, 1, block_size, num_heads, head_dim), dtype=torch.int64, device=layer.device
    )
    kind([block], head_dim).gather(offsets[0], offsets[1], [0], 0)
    return offsets[:, 0]
