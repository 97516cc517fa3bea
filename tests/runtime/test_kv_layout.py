"""Block layouts: found by probing, and moving tokens in and out without loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from daric_rag.errors import UnsupportedModelError
from daric_rag.runtime.kv_layout import (
    PackedKv,
    SplitKv,
    block_pieces,
    slots_of,
)
from daric_rag.runtime.kv_layout_amx import AmxKv
from daric_rag.runtime.kv_layout_learned import PermutedKv
from daric_rag.runtime.kv_probe import probe_layout

NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK, HEAD_DIM = 3, 9, 2, 32, 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _layers(dtype: torch.dtype, *, stacked: bool = True) -> list[Tensor]:
    shape = (NUM_BLOCKS, NUM_HEADS, BLOCK, 2 * HEAD_DIM)
    if stacked:
        return list(torch.zeros((NUM_LAYERS, *shape), dtype=dtype))
    return [torch.zeros(shape, dtype=dtype) for _ in range(NUM_LAYERS)]


def _packed(layers: list[Tensor]) -> Callable[..., None]:
    def write(layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        flat = layers[layer].view(NUM_BLOCKS, NUM_HEADS, -1)
        for token, slot in enumerate(slots.tolist()):
            block, inside = divmod(slot, BLOCK)
            for head in range(NUM_HEADS):
                half = BLOCK * HEAD_DIM
                raw = flat[block, head]
                raw[:half].view(HEAD_DIM, BLOCK)[:, inside] = keys[token, head]
                raw[half:].view(BLOCK, HEAD_DIM)[inside] = values[token, head]

    return write


def _split(layers: list[Tensor]) -> Callable[..., None]:
    def write(layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        both = torch.cat((keys, values), dim=-1)
        layers[layer][slots // BLOCK, :, slots % BLOCK] = both

    return write


def _pairs(layers: list[Tensor]) -> Callable[..., None]:
    """Pairs of tokens interleaved, as matrix units want them."""

    def write(layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for token, slot in enumerate(slots.tolist()):
            block, inside = divmod(slot, BLOCK)
            for head in range(NUM_HEADS):
                raw = layers[layer][block, head].view(2, BLOCK // 2, HEAD_DIM, 2)
                raw[0, inside // 2, :, inside % 2] = keys[token, head]
                raw[1, inside // 2, :, inside % 2] = values[token, head]

    return write


def _tiles(layers: list[Tensor]) -> Callable[..., None]:
    """As AMX kernels have it: tiles of sixteen rows, two elements in a lane."""

    def write(layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        half = BLOCK * HEAD_DIM
        for token, slot in enumerate(slots.tolist()):
            block, inside = divmod(slot, BLOCK)
            for head in range(NUM_HEADS):
                raw = layers[layer][block, head].view(-1)
                raw_k = raw[:half].view(BLOCK // 16, HEAD_DIM // 2, 16, 2)
                raw_v = raw[half:].view(HEAD_DIM // 16, BLOCK // 2, 16, 2)
                raw_k[inside // 16, :, inside % 16] = keys[token, head].view(-1, 2)
                raw_v[:, inside // 2, :, inside % 2] = values[token, head].view(-1, 16)

    return write


WRITERS: dict[str, tuple[Any, type]] = {
    "packed": (_packed, PackedKv),
    "split": (_split, SplitKv),
    "tiles": (_tiles, AmxKv),
    "pairs": (_pairs, PermutedKv),
}


@pytest.mark.parametrize(
    ("start", "num_tokens"), [(29, 71), (3, 1), (17, 14), (32, 64)]
)
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRITERS)
def test_probe_and_round_trip(
    name: str, dtype: torch.dtype, stacked: bool, start: int, num_tokens: int
) -> None:
    """The layout is recognised, and scatter, kernel and gather agree bit for bit."""
    make_writer, expected = WRITERS[name]
    layers = _layers(dtype, stacked=stacked)
    write = make_writer(layers)
    layout = probe_layout(layers, HEAD_DIM, write, 0)
    assert type(layout) is expected

    table = [7, 3, 8, 1]
    keys, values = torch.randn(2, NUM_LAYERS, num_tokens, NUM_HEADS, HEAD_DIM).to(dtype)
    layout.scatter(keys, values, table, start)
    mine = [layer.clone() for layer in layers]
    positions = torch.arange(start, start + num_tokens)
    slots = torch.tensor(table)[positions // BLOCK] * BLOCK + positions % BLOCK
    for layer in range(NUM_LAYERS):
        layers[layer][1:] = 0
        write(layer, keys[layer], values[layer], slots)
        assert torch.equal(mine[layer][1:], layers[layer][1:])

    found_k, found_v = torch.empty_like(keys), torch.empty_like(values)
    layout.gather(found_k, found_v, table, start)
    assert torch.equal(found_k, keys)
    assert torch.equal(found_v, values)

    assert slots_of(table, start, start + num_tokens, BLOCK) == slots.tolist()
    order = torch.randperm(num_tokens)
    for layer in range(NUM_LAYERS):
        both = layout.read_slots(layer, slots[order])
        assert both.is_contiguous()
        assert torch.equal(both[0], keys[layer, order])
        assert torch.equal(both[1], values[layer, order])


def test_blocks_of_incomplete_tiles_are_learned() -> None:
    layers = [torch.zeros(2, NUM_HEADS, BLOCK, 2 * 40, dtype=torch.bfloat16)]

    def write(layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        both = torch.cat((values, keys), dim=-1)
        layers[layer][slots // BLOCK, :, slots % BLOCK] = both

    assert type(probe_layout(layers, 40, write, 1)) is PermutedKv


def test_many_elements_need_two_digits() -> None:
    """A block of more elements than 16 bits count is still told apart."""
    layers = [torch.zeros(2, 16, 128, 2 * HEAD_DIM, dtype=torch.bfloat16)]

    def write(layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        both = torch.cat((values, keys), dim=-1)  # the wrong way round
        layers[layer][slots // 128, :, slots % 128] = both

    assert type(probe_layout(layers, HEAD_DIM, write, 1)) is PermutedKv


def test_lossy_kernels_are_refused() -> None:
    """A kernel that does not keep every element is no permutation."""
    layers = _layers(torch.bfloat16)
    exact = _packed(layers)

    def write(layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        exact(layer, keys, values.zero_(), slots)

    with pytest.raises(UnsupportedModelError, match="does not know"):
        probe_layout(layers, HEAD_DIM, write, 0)


def test_unequal_layers_are_refused() -> None:
    """K and V of different head sizes, or layers of different shapes."""
    layers = _layers(torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="same head size"):
        probe_layout(layers, HEAD_DIM // 2, _packed(layers), 0)


def test_block_pieces() -> None:
    """[29, 70) over blocks of 32: 3, then 32, then 6 tokens."""
    assert list(block_pieces(29, 70, 32)) == [
        (0, 3, 0, 29),
        (3, 32, 1, 0),
        (35, 6, 2, 0),
    ]
