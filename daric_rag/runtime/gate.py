"""The gate that a model passes at start: do its cached keys turn as we assume?

Re-encoding is right for a model whose cached keys depend on their position by RoPE
alone, turned by the frequencies that we know, in every layer. A layer without RoPE,
another order of the pairs, or learned positions would garble every reused document
without any error.

One short pass shows it, whatever the engine compiled. Its tokens are all the same one.
Equal tokens have equal values; attention averages equal values, however it weighs
them; so by induction hidden states are equal at every position of every layer, and
keys differ by their position only: the key at p must be the key at 0, turned by p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from daric_rag.errors import UnsupportedModelError
from daric_rag.runtime.rope import RopeParameters

__all__ = ["MAX_GATE_TOKENS", "check_cached_keys", "turn_keys"]

MAX_GATE_TOKENS = 16

# Largest part of the turn itself that may be wrong. Rounding stays far below it, and a
# layer that does not turn its keys as assumed is off by about the whole.
_TOLERANCE = 0.3


def check_cached_keys(cached: Tensor, rope: RopeParameters) -> None:
    """Hold the keys of a pass of equal tokens against RoPE.

    Args:
        cached: Keys in the cache, ``[num_layers, num_tokens, num_kv_heads, head_dim]``,
            of the same token at positions 0 to num_tokens - 1.
        rope: What re-encoding uses.

    Raises:
        UnsupportedModelError: Reused documents would be garbled.
    """
    positions = torch.arange(cached.shape[1], device=cached.device)
    for layer, keys in enumerate(cached.float()):
        first = keys[:1].expand_as(keys)
        expected = turn_keys(first, positions, rope)
        wrong, turned = (keys - expected).norm(), (expected - first).norm()
        # Written so that NaN does not pass.
        if not wrong <= _TOLERANCE * turned:
            raise UnsupportedModelError(
                f"layer {layer} does not turn its keys with their position as its RoPE "
                f"parameters say ({wrong:.3g} of {turned:.3g} is off); they cannot be "
                f"re-encoded. Run this model with vLLM alone"
            )


def turn_keys(keys: Tensor, positions: Tensor, rope: RopeParameters) -> Tensor:
    """RoPE written out in float32; an attention scaling is in the keys already.

    Args:
        keys: ``[num_tokens, num_kv_heads, head_dim]``.
        positions: Positions to turn by, ``[num_tokens]``.
        rope: Frequencies and order of the pairs.
    """
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=keys.device)
    angles = (positions[:, None].float() * inv_freq)[:, None]
    # [num_tokens, 1, rotary_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    turned = keys.clone()
    half = rope.rotary_dim // 2
    if rope.is_neox:
        first, second = slice(0, half), slice(half, rope.rotary_dim)
    else:
        first, second = slice(0, rope.rotary_dim, 2), slice(1, rope.rotary_dim, 2)
    turned[..., first] = keys[..., first] * cos - keys[..., second] * sin
    turned[..., second] = keys[..., first] * sin + keys[..., second] * cos
    return turned
