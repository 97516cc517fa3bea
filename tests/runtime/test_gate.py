"""The gate lets RoPE through as we know it, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from daric_rag.errors import UnsupportedModelError
from daric_rag.runtime.gate import check_cached_keys, turn_keys
from daric_rag.runtime.rope import RopeParameters

LAYERS, TOKENS, HEADS, DIM = 3, 16, 2, 64
INV_FREQ = tuple((10000.0 ** (-torch.arange(0, DIM, 2) / DIM)).tolist())
ROPE = RopeParameters(INV_FREQ, DIM, True)


def cached_keys(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """What a model caches of one token at 16 positions, with some rounding noise."""
    positions = torch.arange(TOKENS)
    layers = []
    for _ in range(LAYERS):
        key = (torch.randn(1, HEADS, DIM) * scale).expand(TOKENS, -1, -1)
        layers.append(turn_keys(key, positions, ROPE))
    keys = torch.stack(layers)
    return (keys + 1e-3 * scale * torch.randn_like(keys)).to(dtype)


@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rope_passes(dtype: torch.dtype, scale: float) -> None:
    check_cached_keys(cached_keys(dtype, scale), ROPE)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_without_rope_is_found(layer: int, dtype: torch.dtype) -> None:
    keys = cached_keys(dtype)
    keys[layer] = keys[layer, :1]
    with pytest.raises(UnsupportedModelError, match=f"layer {layer} "):
        check_cached_keys(keys, ROPE)


def test_a_layer_without_rope_is_found_behind_large_slow_channels() -> None:
    """Keys are often dominated by channels that hardly turn."""
    keys = cached_keys()
    keys[1, ..., DIM // 2 - 1] += 100
    check_cached_keys(keys[:1], ROPE)
    keys[1] = keys[1, :1]
    with pytest.raises(UnsupportedModelError, match="layer 1 "):
        check_cached_keys(keys, ROPE)


@pytest.mark.parametrize(
    "rope",
    [
        RopeParameters(INV_FREQ, DIM, False),
        RopeParameters(INV_FREQ[::2], DIM // 2, True),
        RopeParameters(tuple(f * 1.5 for f in INV_FREQ), DIM, True),
        RopeParameters(tuple(-f for f in INV_FREQ), DIM, True),
    ],
    ids=["pairs", "partial", "frequencies", "sign"],
)
def test_other_parameters_are_found(rope: RopeParameters) -> None:
    with pytest.raises(UnsupportedModelError, match="re-encoded"):
        check_cached_keys(cached_keys(torch.bfloat16), rope)


def test_learned_positions_are_found() -> None:
    """Hidden states that depend on the position make other keys at each of them."""
    keys = cached_keys() + 0.5 * torch.randn(LAYERS, TOKENS, HEADS, DIM)
    with pytest.raises(UnsupportedModelError):
        check_cached_keys(keys, ROPE)


def test_nan_is_no_pass() -> None:
    with pytest.raises(UnsupportedModelError):
        check_cached_keys(cached_keys() * torch.nan, ROPE)
