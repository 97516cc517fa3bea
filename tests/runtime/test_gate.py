"""The gate lets RoPE through as we know it, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from daric_rag.errors import UnsupportedModelError
from daric_rag.runtime.gate import check_cached_keys, turn_keys, watch_keys
from daric_rag.runtime.rope import RopeParameters

LAYERS, TOKENS, HEADS, DIM = 3, 16, 2, 64
INV_FREQ = tuple((10000.0 ** (-torch.arange(0, DIM, 2) / DIM)).tolist())
ROPE = RopeParameters(INV_FREQ, DIM, True)
LLAMA = ["LlamaForCausalLM"]


class Rotary(nn.Module):
    """Turns in place, as the operators of engines do."""

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> Tensor:
        key.copy_(turn_keys(key.view(-1, HEADS, DIM), positions, ROPE).view(key.shape))
        return key


def passing(dtype: torch.dtype) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """A pass of three layers: what was caught, and what was cached."""
    rotary, positions = Rotary(), torch.arange(TOKENS)
    cached = []
    with watch_keys([rotary]) as calls:
        for _ in range(LAYERS):
            key = torch.randn(TOKENS, HEADS * DIM).to(dtype)
            cached.append(rotary(positions, query=key.clone(), key=key).clone())
    rotary(positions, key, key)  # no longer watched
    return calls, torch.stack(cached).view(LAYERS, TOKENS, HEADS, DIM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rope_passes(dtype: torch.dtype) -> None:
    calls, cached = passing(dtype)
    assert len(calls) == LAYERS
    check_cached_keys(calls, cached, ROPE, LLAMA)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_without_rope_is_found(layer: int, dtype: torch.dtype) -> None:
    calls, cached = passing(dtype)
    cached[layer] = calls[layer][1].view(TOKENS, HEADS, DIM)
    with pytest.raises(UnsupportedModelError, match=f"layer {layer} "):
        check_cached_keys(calls, cached, ROPE, LLAMA)


def test_a_norm_after_rope_is_found() -> None:
    calls, cached = passing(torch.float32)
    with pytest.raises(UnsupportedModelError, match="as RoPE leaves them"):
        check_cached_keys(calls, nn.functional.normalize(cached, dim=-1), ROPE, LLAMA)


@pytest.mark.parametrize(
    "rope",
    [
        RopeParameters(INV_FREQ, DIM, False),
        RopeParameters(INV_FREQ[::2], DIM // 2, True),
        RopeParameters(INV_FREQ, DIM, True, scaling=1.2),
        RopeParameters(tuple(f * 1.5 for f in INV_FREQ), DIM, True),
    ],
    ids=["pairs", "partial", "scaling", "frequencies"],
)
def test_other_parameters_are_found(rope: RopeParameters) -> None:
    calls, cached = passing(torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="re-encoded"):
        check_cached_keys(calls, cached, rope, LLAMA)


def test_fewer_calls_than_layers_are_refused() -> None:
    calls, cached = passing(torch.float32)
    with pytest.raises(UnsupportedModelError, match="2 of the model's 3 layers"):
        check_cached_keys(calls[:2], cached, ROPE, LLAMA)


def test_compiled_models_are_known_by_name() -> None:
    _, cached = passing(torch.float32)
    check_cached_keys([], cached, ROPE, LLAMA)
    with pytest.raises(UnsupportedModelError, match="enforce_eager"):
        check_cached_keys([], cached, ROPE, ["Cohere2ForCausalLM"])


def test_nan_is_no_pass() -> None:
    calls, cached = passing(torch.float32)
    with pytest.raises(UnsupportedModelError):
        check_cached_keys(calls, cached * torch.nan, ROPE, LLAMA)
