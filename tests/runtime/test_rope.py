"""Re-encoding against the rotation written out, and refusals of unknown RoPE."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from daric_rag.errors import UnsupportedModelError
from daric_rag.runtime.rope import Reencoder, RopeParameters, rope_parameters

pytestmark = pytest.mark.engine  # the operator is vLLM's

BASE = 10000.0


def _inv_freq(rotary_dim: int, base: float = BASE) -> Tensor:
    return 1.0 / base ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)


def _turn(x: Tensor, positions: Tensor, rotary_dim: int, neox: bool) -> Tensor:
    """RoPE of x ``[..., num_tokens, num_heads, head_dim]``, pair by pair."""
    out = x.clone()
    inv_freq = _inv_freq(rotary_dim)
    for pair in range(rotary_dim // 2):
        first = pair if neox else 2 * pair
        second = pair + rotary_dim // 2 if neox else 2 * pair + 1
        angle = (positions.float() * inv_freq[pair])[:, None]
        a, b = x[..., first], x[..., second]
        out[..., first] = a * angle.cos() - b * angle.sin()
        out[..., second] = a * angle.sin() + b * angle.cos()
    return out


def _reencoder(rotary_dim: int, neox: bool) -> Reencoder:
    from daric_rag.runtime.vllm_api import rotate_rows

    inv_freq = tuple(_inv_freq(rotary_dim).double().tolist())
    return Reencoder(RopeParameters(inv_freq, rotary_dim, neox), rotate_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [32, 64])
@pytest.mark.parametrize("distance", [1, 31, 700, 2500, -31])
def test_reencode(
    dtype: torch.dtype, neox: bool, rotary_dim: int, distance: int
) -> None:
    """Keys at p, moved by d, are the keys at p + d; the source stays as it was."""
    raw = torch.randn(3, 50, 2, 64)
    positions = torch.arange(100, 150)
    keys = _turn(raw, positions, rotary_dim, neox).to(dtype)
    before = keys.clone()
    moved = _reencoder(rotary_dim, neox).reencode_keys(keys, distance)
    assert torch.equal(keys, before)
    assert moved.dtype == dtype
    expected = _turn(raw, positions + distance, rotary_dim, neox)
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}[dtype]
    assert (moved.float() - expected).abs().max() < tolerance
    wrong = _turn(raw, positions + distance + 1, rotary_dim, neox)
    assert (moved.float() - wrong).abs().max() > 0.3


def test_distance_zero_is_the_identity() -> None:
    """No copy, no rounding."""
    keys = torch.randn(2, 5, 1, 64).bfloat16()
    assert _reencoder(64, True).reencode_keys(keys, 0) is keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("neox", [True, False])
def test_turning_tokens_of_one_layer_gives_the_same_bits(
    dtype: torch.dtype, neox: bool
) -> None:
    """Each token by a distance of its own, or all of them in all layers by one."""
    reencoder, distances = _reencoder(32, neox), [7, 2500, 31]
    keys = torch.randn(3, 90, 2, 64).to(dtype)
    rows = torch.arange(90) % len(distances)
    expected = torch.empty_like(keys)
    for row, distance in enumerate(distances):
        moved = reencoder.reencode_keys(keys, distance)
        expected[:, rows == row] = moved[:, rows == row]
    rotations = reencoder.rotations(distances)
    for layer in keys:
        reencoder.turn(layer, rows, rotations)
    assert torch.equal(keys, expected)


def test_buffers_grow_and_are_reused() -> None:
    """A short segment after a long one, and the other way round."""
    reencoder = _reencoder(64, True)
    short, long = (
        torch.randn(2, 3, 1, 64).bfloat16(),
        torch.randn(2, 300, 1, 64).bfloat16(),
    )
    first = reencoder.reencode_keys(short, 7).clone()
    reencoder.reencode_keys(long, 7)
    assert torch.equal(reencoder.reencode_keys(short, 7), first)


def _module(inv_freq: Tensor, scaling: float = 1.0, **changes: Any) -> SimpleNamespace:
    angles = torch.arange(1024).float()[:, None] * inv_freq
    table = torch.cat((angles.cos(), angles.sin()), -1) * scaling
    facts = {
        "rotary_dim": 2 * len(inv_freq),
        "is_neox_style": True,
        "cos_sin_cache": table,
    }
    return SimpleNamespace(**(facts | changes))


def _config(**rope: Any) -> SimpleNamespace:
    parameters = {"rope_type": "default", "rope_theta": BASE} | rope
    return SimpleNamespace(head_dim=64, rope_parameters=parameters)


def test_default_parameters() -> None:
    """The frequencies are the model's, rounded as the model's."""
    rope = rope_parameters(_config(), [_module(_inv_freq(64))] * 2)
    assert rope.rotary_dim == 64
    assert rope.is_neox
    assert torch.equal(torch.tensor(rope.inv_freq).float(), _inv_freq(64))


def test_partial_rotary() -> None:
    """Half a head turns."""
    config = _config(partial_rotary_factor=0.5)
    assert rope_parameters(config, [_module(_inv_freq(32))]).rotary_dim == 32


@pytest.mark.parametrize(
    ("config", "modules", "reason"),
    [
        (_config(rope_type="dynamic"), [_module(_inv_freq(64))], "'dynamic'"),
        (_config(rope_type="longrope"), [_module(_inv_freq(64))], "'longrope'"),
        (_config(), [], "no rotary"),
        (_config(), [_module(_inv_freq(64, 1e6))], "differs"),
        (_config(), [_module(_inv_freq(64), scaling=1.1)], "differs"),
        (_config(), [_module(_inv_freq(32))], "rotary dimension"),
        (
            _config(),
            [_module(_inv_freq(64)), _module(_inv_freq(64, 1e6))],
            "different rotary",
        ),
    ],
)
def test_refusals(config: Any, modules: list[Any], reason: str) -> None:
    """What cannot be re-encoded is refused, with the reason and the way out."""
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        rope_parameters(config, modules)
    assert "with vLLM alone" in str(caught.value)
