"""Fixing key positions: RoPE parameters, and re-encoding by a distance.

A chunk's keys are stored as they are at its own positions 0..n-1. At prompt position p
they must be turned by p more, and since rotations add up, every token of the chunk
turns by the same angles ``p * inv_freq`` (section 2.2). Values do not change.

The turn is computed in float32, whatever the cache's dtype.
An attention scaling such as YaRN's is already in the stored keys and is not applied
again.

The frequencies come from the model's configuration through transformers, and are then
checked against the table that vLLM's own rotary module uses; a model for which the two
disagree, or whose frequencies depend on the prompt's length, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from daric_rag.errors import UnsupportedModelError

__all__ = [
    "Reencoder",
    "RopeParameters",
    "RotateFn",
    "check_rope_type",
    "rope_parameters",
]

_SUPPORTED_TYPES = ("default", "linear", "llama3", "yarn")


class RotateFn(Protocol):
    """The rotation operator: turns `rows` in place.

    Args:
        positions: int64 [num_rows], into the table.
        rows: float32 [num_rows, num_heads * head_dim].
        head_dim: Elements per head.
        cos_sin: float32 [num_positions, rotary_dim], cosines then sines.
        is_neox: Halves (True) or interleaved pairs (False).
    """

    def __call__(
        self,
        positions: Tensor,
        rows: Tensor,
        head_dim: int,
        cos_sin: Tensor,
        is_neox: bool,
    ) -> None:
        """Turn `rows`."""
        ...


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """What re-encoding needs to know of a model's RoPE.

    Attributes:
        inv_freq: Angle per position and pair, float64, [rotary_dim / 2].
        rotary_dim: Leading elements of a head that turn.
        is_neox: Pairs are (i, i + rotary_dim / 2) rather than (2 i, 2 i + 1).
    """

    inv_freq: tuple[float, ...]
    rotary_dim: int
    is_neox: bool


class Reencoder:
    """Worker process. Turns stored keys to another place in the prompt."""

    def __init__(self, rope: RopeParameters, rotate: RotateFn) -> None:
        """Keep the parameters; buffers grow with the first segments."""
        self._rope, self._rotate = rope, rotate
        self._inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float64)
        self._work = torch.empty(0)
        self._turned: Tensor | None = None
        self._positions = torch.empty(0, dtype=torch.int64)

    def reencode_keys(self, keys: Tensor, distance: int) -> Tensor:
        """Return `keys` turned by `distance` positions.

        Args:
            keys: ``[num_layers, num_tokens, num_kv_heads, head_dim]``, contiguous;
                not changed.
            distance: Positions to move by; negative moves back.

        Returns:
            `keys` itself for distance 0, else a buffer of the same shape and dtype
            that is valid until the next call.
        """
        if distance == 0:
            return keys
        num_layers, num_tokens, num_heads, head_dim = keys.shape
        num_rows = num_layers * num_tokens
        self._reserve(keys, num_rows)
        rows = self._work[: keys.numel()].view(num_rows, num_heads * head_dim)
        # copy_, not float(): float() of a float32 tensor aliases it, and the rotation
        # would then corrupt the record.
        rows.copy_(keys.view(num_rows, -1))
        self._rotate(
            self._positions[:num_rows],
            rows,
            head_dim,
            self._cos_sin(distance).to(keys.device),
            self._rope.is_neox,
        )
        if keys.dtype == torch.float32:
            return rows.view(keys.shape)
        assert self._turned is not None
        turned = self._turned[: keys.numel()].view(keys.shape)
        turned.copy_(rows.view(keys.shape))
        return turned

    def rotations(self, distances: Sequence[int]) -> Tensor:
        """Return what `turn` needs to know of some distances, in host memory.

        Args:
            distances: In positions, at least one.

        Returns:
            float32 ``[num_distances, rotary_dim]``, cosines then sines.
        """
        return torch.cat([self._cos_sin(distance) for distance in distances])

    def turn(self, keys: Tensor, rows: Tensor, rotations: Tensor) -> None:
        """Turn one layer's keys in place, each token by a distance of its own.

        The same arithmetic as `reencode_keys`, and no memory is kept: calls on several
        streams do not meet. A distance of 0 is not for here, since turning by it may
        change the sign of a zero.

        Args:
            keys: ``[num_tokens, num_kv_heads, head_dim]``, contiguous; changed.
            rows: int64 ``[num_tokens]``, each token's row of `rotations`.
            rotations: As returned by `rotations`, on the keys' device.
        """
        num_tokens, num_heads, head_dim = keys.shape
        flat = keys.view(num_tokens, num_heads * head_dim)
        wide = flat.float()  # float32 keys are turned where they are
        self._rotate(rows, wide, head_dim, rotations, self._rope.is_neox)
        if keys.dtype != torch.float32:
            flat.copy_(wide)

    def _cos_sin(self, distance: int) -> Tensor:
        # The product is rounded to float32 because the model's own table is made so: an
        # exact angle would differ from the model's by 3e-4 rad at position 2,500.
        angles = (self._inv_freq.float() * float(distance)).double()
        return torch.cat((angles.cos(), angles.sin())).float()[None]

    def _reserve(self, keys: Tensor, num_rows: int) -> None:
        # Kept between calls: fresh pages would cost more than the rotation.
        if self._work.numel() < keys.numel() or self._work.device != keys.device:
            self._work = torch.empty(
                keys.numel(), dtype=torch.float32, device=keys.device
            )
            self._turned = torch.empty(keys.numel(), dtype=keys.dtype).to(keys.device)
        if self._positions.numel() < num_rows or self._positions.device != keys.device:
            self._positions = torch.zeros(
                num_rows, dtype=torch.int64, device=keys.device
            )


def rope_parameters(hf_config: Any, rotary_modules: list[Any]) -> RopeParameters:
    """Read a model's RoPE and check it against vLLM's own table.

    Args:
        hf_config: The text model's Hugging Face configuration.
        rotary_modules: vLLM's rotary modules of the model.

    Raises:
        UnsupportedModelError: With the reason.
    """
    rope_type = check_rope_type(hf_config)
    module = _only_module(rotary_modules)
    inv_freq, scaling = _frequencies(hf_config, rope_type)
    if 2 * len(inv_freq) != module.rotary_dim:
        raise _refused(
            f"its rotary dimension is {module.rotary_dim}, the configuration says "
            f"{2 * len(inv_freq)}"
        )
    _check_table(module.cos_sin_cache, inv_freq, scaling)
    return RopeParameters(
        inv_freq=tuple(inv_freq.tolist()),
        rotary_dim=int(module.rotary_dim),
        is_neox=bool(module.is_neox_style),
    )


def check_rope_type(hf_config: Any) -> str:
    """Return the model's type of RoPE, before any of it is loaded.

    Raises:
        UnsupportedModelError: Keys of that type cannot be re-encoded.
    """
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    rope_type = str(parameters.get("rope_type", "default"))
    if rope_type not in _SUPPORTED_TYPES:
        raise _refused(f"its RoPE type {rope_type!r} is not supported")
    return rope_type


def _only_module(modules: list[Any]) -> Any:
    if not modules:
        raise _refused("it has no rotary position embedding")
    first = modules[0]
    for module in modules[1:]:
        same = (
            module.rotary_dim == first.rotary_dim
            and module.is_neox_style == first.is_neox_style
            and torch.equal(module.cos_sin_cache, first.cos_sin_cache)
        )
        if not same:
            raise _refused("its layers use different rotary position embeddings")
    return first


def _frequencies(hf_config: Any, rope_type: str) -> tuple[Tensor, float]:
    parameters = hf_config.rope_parameters
    head_dim = getattr(hf_config, "head_dim", None) or (
        hf_config.hidden_size // hf_config.num_attention_heads
    )
    if rope_type == "default":
        factor = float(parameters.get("partial_rotary_factor", 1.0))
        dim = int(head_dim * factor)
        # Rounded to float32 as every engine rounds them: at position 8,000 the exact
        # frequencies would turn 5e-4 rad further than the model's own.
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        inv_freq = 1.0 / (float(parameters["rope_theta"]) ** exponents)
        return inv_freq.double(), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"))
    return inv_freq.double(), float(scaling)


def _check_table(table: Tensor, inv_freq: Tensor, scaling: float) -> None:
    """Hold the frequencies against rows of vLLM's cos/sin table."""
    rows = min(int(table.shape[0]), 512)
    positions = torch.arange(rows, dtype=torch.float64)
    angles = positions[:, None] * inv_freq
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling
    # Half a unit of a bfloat16 cosine, and float32 angles at up to 512 radians.
    tolerance = 1e-4 if table.dtype == torch.float32 else 6e-3
    error = (table[:rows].double().cpu() - expected).abs().max().item()
    if error > tolerance * max(1.0, scaling):
        raise _refused(
            f"vLLM's rotary table differs from the configuration's RoPE by {error:.3g}"
        )


def _refused(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this model's keys cannot be re-encoded: {reason}. Choose a model with "
        f"default, linear, llama3 or YaRN RoPE, or run this one with vLLM alone"
    )
