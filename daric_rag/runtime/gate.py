"""The gate that a model passes at start: are cached keys what re-encoding assumes?

Re-encoding is right for a model whose every layer caches keys turned by RoPE, last of
all and by the frequencies that we know. A layer without RoPE, a norm or scaling after
it, or another order of the pairs would garble every reused document without any error.
So one short pass is run at start, the keys are caught on their way into the rotary
module, turned by our own formula, and compared with what lies in the cache.

Inside a compiled model modules cannot be watched. There, an architecture is accepted
by name if its layers are known to be of that kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from daric_rag.errors import UnsupportedModelError
from daric_rag.runtime.rope import RopeParameters

__all__ = ["NUM_GATE_TOKENS", "check_cached_keys", "watch_keys"]

NUM_GATE_TOKENS = 16

_KNOWN_ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)

# Of the largest key, per bit of the dtype's mantissa: one rounding on each side.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@contextmanager
def watch_keys(rotary_modules: Sequence[Any]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Catch (positions, keys before RoPE) of every call, in order, within the block."""
    calls: list[tuple[Tensor, Tensor]] = []

    def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("positions", "query", "key"), args, strict=False)) | kwargs
        key = given.get("key")
        if key is not None:
            # A copy: the operator turns its input in place.
            calls.append((given["positions"].clone(), key.clone()))

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True)
        for module in dict.fromkeys(rotary_modules)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def check_cached_keys(
    calls: Sequence[tuple[Tensor, Tensor]],
    cached: Tensor,
    rope: RopeParameters,
    architectures: Sequence[str],
) -> None:
    """Hold the cache against RoPE as re-encoding assumes it.

    Args:
        calls: From `watch_keys`, of one pass.
        cached: Keys in the cache, ``[num_layers, num_tokens, num_kv_heads, head_dim]``.
        rope: What re-encoding uses.
        architectures: The model's names, for a compiled model.

    Raises:
        UnsupportedModelError: Reused documents would be garbled.
    """
    if not calls:
        if not _KNOWN_ARCHITECTURES.intersection(architectures):
            raise UnsupportedModelError(
                f"{', '.join(architectures)} is compiled, so its position encoding "
                f"cannot be verified; pass enforce_eager=True, or run it with vLLM "
                f"alone"
            )
        return
    num_layers, num_tokens = cached.shape[:2]
    if len(calls) != num_layers:
        raise UnsupportedModelError(
            f"{len(calls)} of the model's {num_layers} layers have RoPE; its keys "
            f"cannot be re-encoded. Run it with vLLM alone"
        )
    for layer, (positions, keys) in enumerate(calls):
        raw = keys[:num_tokens].view(cached.shape[1:]).float()
        expected = turn_keys(raw, positions[:num_tokens], rope)
        found = cached[layer].float()
        error = (found - expected).abs().max() / expected.abs().max()
        if not error <= _TOLERANCE[cached.dtype]:
            raise UnsupportedModelError(
                f"layer {layer} does not cache its keys as RoPE leaves them (they "
                f"differ by {error:.1%}); they cannot be re-encoded. Run this model "
                f"with vLLM alone"
            )


def turn_keys(keys: Tensor, positions: Tensor, rope: RopeParameters) -> Tensor:
    """RoPE written out in float32.

    Args:
        keys: ``[num_tokens, num_kv_heads, head_dim]`` before RoPE.
        positions: ``[num_tokens]``.
        rope: Frequencies, scaling and order of the pairs.
    """
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=keys.device)
    angles = positions[:, None].float() * inv_freq
    # [num_tokens, 1, rotary_dim / 2]
    cos = (angles.cos() * rope.scaling)[:, None]
    sin = (angles.sin() * rope.scaling)[:, None]
    turned = keys.clone()
    half = rope.rotary_dim // 2
    if rope.is_neox:
        first, second = slice(0, half), slice(half, rope.rotary_dim)
    else:
        first, second = slice(0, rope.rotary_dim, 2), slice(1, rope.rotary_dim, 2)
    turned[..., first] = keys[..., first] * cos - keys[..., second] * sin
    turned[..., second] = keys[..., first] * sin + keys[..., second] * cos
    return turned
