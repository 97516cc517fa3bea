"""KV as tensors: its shape, views of bytes, and memory that is used again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

__all__ = ["Buffer", "KvShape", "bytes_of", "largest_magnitudes"]

# An integer of an element's size, by bytes, and the bits of its magnitude.
_BITS: Final = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFF_FFFF)}


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of one token's KV: what every record of this engine must have.

    Attributes:
        num_layers: Layers.
        num_kv_heads: Key-value heads per layer.
        head_dim: Elements per head.
        dtype: Of the elements.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """The record format's name of the dtype."""
        return str(self.dtype).removeprefix("torch.")

    def of(self, num_tokens: int) -> tuple[int, int, int, int]:
        """``(num_layers, num_tokens, num_kv_heads, head_dim)``."""
        return (self.num_layers, num_tokens, self.num_kv_heads, self.head_dim)


class Buffer:
    """Memory that is used again, and grows when more is asked for.

    Args:
        dtype: Of its elements.
        device: Where it lies.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(0, dtype=dtype, device=device)

    def of(self, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of that shape, which the next call's overlaps."""
        num_elements = math.prod(shape)
        if self._flat.numel() < num_elements:
            self._flat = self._flat.new_empty(num_elements)
        return self._flat[:num_elements].view(shape)


def bytes_of(payload: memoryview) -> Tensor:
    """View bytes as uint8; the tensor keeps them alive."""
    return torch.from_dlpack(np.frombuffer(payload, dtype=np.uint8))


def largest_magnitudes(vectors: Tensor, spare: Tensor) -> Tensor:
    """Return the largest magnitudes over the last dimension, of the same dtype.

    Args:
        vectors: Of two or four bytes per element.
        spare: float32, of the same shape; overwritten.
    """
    # Without their signs floats are ordered as their bits are, and torch finds the
    # largest integer five times as fast as the largest magnitude.
    bits, unsigned = _BITS[vectors.element_size()]
    magnitudes = spare.view(bits)[..., : vectors.shape[-1]]
    torch.bitwise_and(vectors.view(bits), unsigned, out=magnitudes)
    return magnitudes.amax(dim=-1).view(vectors.dtype)
