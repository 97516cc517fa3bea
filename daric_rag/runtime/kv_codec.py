"""How a segment's K and V become a record's payload: as they are, or one byte each.

| `kv_storage` | Record dtype  | Payload                                    |
|--------------|---------------|--------------------------------------------|
| `"model"`    | the model's   | K, V                                       |
| `"int8"`     | `int8`        | codes of K, of V, then scales of K, of V   |
| `"fp8"`      | `float8_e4m3` | likewise                                   |

K, V and codes are ``[num_layers, num_tokens, num_kv_heads, head_dim]``, scales
``[num_layers, num_tokens, num_kv_heads]``, all of them C-contiguous.

A vector is one token's K or V of one head in one layer. Its scale, float16, is its
largest magnitude, and an element is ``code / max_code * scale`` with a `max_code` of
127 for int8 and 448 for e4m3. Largest magnitudes rather than steps, because bfloat16
and float16 models' are stored without rounding (above 6e-5, where float16 is normal):
what a record gives, stored again, is the same record. Beyond float16's range (65,504)
elements are clipped.

An element is off by half a code at most: by ``scale / 254`` for int8; for e4m3 by
1/16 of itself, or by ``scale / 458_752`` if that is more. A float32 model's scales are
rounded, which adds ``scale / 2048``; the model's dtype rounds once more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from daric_rag.errors import ConfigError

__all__ = ["KvCodec", "KvShape", "codec_of"]

_MAX_SCALE: Final = 65504.0  # of float16
_CPU: Final = torch.device("cpu")
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


class KvCodec(Protocol):
    """Worker process, one thread. Between tensors and a record's payload."""

    dtype_name: str
    """Of the record."""

    def staging(self, out: memoryview, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return K and V to gather into before `payload_of`, to spare a copy.

        They are shaped as `tensors_of` returns them, hold anything, and are valid
        until the next call but `payload_of`. `out` is the payload to be.
        """
        ...

    def payload_of(self, keys: Tensor, values: Tensor, out: memoryview) -> None:
        """Write a segment as a payload.

        Args:
            keys: ``[num_layers, num_tokens, num_kv_heads, head_dim]``, of the model's
                dtype, finite; not changed.
            values: Like `keys`.
            out: Writable, of exactly the payload's length.
        """
        ...

    def tensors_of(self, payload: memoryview, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return a payload's K and V.

        Returns:
            ``[num_layers, num_tokens, num_kv_heads, head_dim]`` each, of the model's
            dtype, until the next call of the codec. Nobody may write to them: they
            may be the payload itself, and torch has no read-only tensors.
        """
        ...


class ModelCodec:
    """K and V as the model has them; nothing is copied. See `KvCodec`."""

    def __init__(self, shape: KvShape) -> None:
        """Keep the shape."""
        self._shape = shape
        self.dtype_name = shape.dtype_name

    def staging(self, out: memoryview, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the payload's own K and V; see `KvCodec.staging`."""
        return self.tensors_of(out, num_tokens)

    def payload_of(self, keys: Tensor, values: Tensor, out: memoryview) -> None:
        """See `KvCodec.payload_of`; nothing to do for what `staging` returned."""
        for source, target in zip(
            (keys, values), self.tensors_of(out, keys.shape[1]), strict=True
        ):
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)

    def tensors_of(self, payload: memoryview, num_tokens: int) -> tuple[Tensor, Tensor]:
        """View a payload; the views keep it alive."""
        both = _bytes_of(payload).view(self._shape.dtype)
        keys, values = both.view(2, *self._shape.of(num_tokens))
        return keys, values


class QuantizedCodec(ABC):
    """One byte per element and a scale per vector. See `KvCodec`.

    Buffers grow with the segments and are kept: fresh pages would cost more than the
    arithmetic. That goes through float32, which torch multiplies faster than bfloat16
    on a CPU and which leaves one rounding, the last.

    Attributes:
        dtype_name: The record's dtype.
        max_code: What a vector's largest magnitude becomes.
        gain: `_unpack` leaves numbers smaller by this factor.
    """

    dtype_name: str
    max_code: float
    gain: float

    def __init__(self, shape: KvShape, device: torch.device = _CPU) -> None:
        """Keep the shape; payloads are decoded on the device."""
        self._shape, self._device = shape, device
        self._wide = _Buffer(torch.float32, device)
        self._both = _Buffer(shape.dtype, device)

    @abstractmethod
    def _pack(self, wide: Tensor, codes: Tensor) -> None:
        """Round float32 in [-max_code, max_code] to codes, typed int8."""

    @abstractmethod
    def _unpack(self, codes: Tensor, wide: Tensor) -> None:
        """Turn codes, typed int8, into float32."""

    def staging(self, out: memoryview, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return buffers; see `KvCodec.staging`."""
        keys, values = self._both.of((2, *self._shape.of(num_tokens)))
        return keys, values

    def payload_of(self, keys: Tensor, values: Tensor, out: memoryview) -> None:
        """See `KvCodec.payload_of`."""
        parts = self._parts(_bytes_of(out), keys.shape[1])
        for vectors, codes, scales in zip((keys, values), *parts, strict=True):
            self._quantize(vectors, codes, scales)

    def tensors_of(self, payload: memoryview, num_tokens: int) -> tuple[Tensor, Tensor]:
        """See `KvCodec.tensors_of`."""
        raw = _bytes_of(payload).to(self._device, non_blocking=True)
        parts = self._parts(raw, num_tokens)
        keys, values = self.staging(payload, num_tokens)
        for codes, scales, out in zip(*parts, (keys, values), strict=True):
            self._dequantize(codes, scales, out)
        return keys, values

    def _quantize(self, vectors: Tensor, codes: Tensor, scales: Tensor) -> None:
        wide = self._wide.of(vectors.shape)
        largest = _largest(vectors, wide).float().clamp_(max=_MAX_SCALE).half()
        scales.copy_(largest)
        # Where the scale is 0 all codes are to be, not 0 times infinity.
        factor = (self.max_code / largest.float()).masked_fill_(largest == 0, 0.0)
        wide.copy_(vectors)
        wide.mul_(factor[..., None])
        # A scale that was rounded down or clipped leaves elements beyond the codes.
        self._pack(wide.clamp_(-self.max_code, self.max_code), codes)

    def _dequantize(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        wide = self._wide.of(out.shape)
        self._unpack(codes, wide)
        factor = scales.float() / self.max_code * self.gain
        wide.mul_(factor[..., None])
        out.copy_(wide)

    def _parts(self, raw: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """View a payload's bytes as codes and scales, each of K and V.

        Returns:
            int8 ``[2, num_layers, num_tokens, num_kv_heads, head_dim]`` and float16
            ``[2, num_layers, num_tokens, num_kv_heads]``.
        """
        shape = (2, *self._shape.of(num_tokens))
        codes, scales = raw.split([math.prod(shape), 2 * math.prod(shape[:-1])])
        scales = scales.view(torch.float16)
        return codes.view(torch.int8).view(shape), scales.view(shape[:-1])


class Int8Codec(QuantizedCodec):
    """Steps of equal size. See `QuantizedCodec`."""

    dtype_name, max_code, gain = "int8", 127.0, 1.0

    def _pack(self, wide: Tensor, codes: Tensor) -> None:
        codes.copy_(wide.round_())

    def _unpack(self, codes: Tensor, wide: Tensor) -> None:
        wide.copy_(codes)


class Float8Codec(QuantizedCodec):
    """Floats of 4 exponent and 3 mantissa bits. See `QuantizedCodec`."""

    dtype_name, max_code, gain = "float8_e4m3", 448.0, 2.0**120

    def _pack(self, wide: Tensor, codes: Tensor) -> None:
        codes.view(torch.float8_e4m3fn).copy_(wide)

    def _unpack(self, codes: Tensor, wide: Tensor) -> None:
        # Sign, exponent and mantissa to their places in a float32, which leaves the
        # difference of the exponents' biases, 7 and 127, as a factor. torch's own
        # conversion takes 20 times as long.
        bits = wide.view(torch.int32)
        bits.copy_(codes)  # the sign fills all higher bits
        bits.bitwise_left_shift_(20)
        bits.bitwise_and_(0x87F0_0000 - (1 << 32))


_QUANTIZED: Final = {"fp8": Float8Codec, "int8": Int8Codec}


def codec_of(kv_storage: str, shape: KvShape, device: torch.device = _CPU) -> KvCodec:
    """Return the codec that `DaricConfig.kv_storage` names.

    Args:
        kv_storage: ``"model"``, ``"fp8"`` or ``"int8"``.
        shape: Of the engine's KV.
        device: Where quantised payloads are decoded. They cross to it as codes.

    Raises:
        ConfigError: `kv_storage` is something else.
    """
    if kv_storage == "model":
        return ModelCodec(shape)
    if kv_storage not in _QUANTIZED:
        known = ", ".join(repr(name) for name in ("model", *_QUANTIZED))
        raise ConfigError(f"kv_storage is {kv_storage!r}; it must be one of {known}")
    return _QUANTIZED[kv_storage](shape, device)


def _largest(vectors: Tensor, spare: Tensor) -> Tensor:
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


class _Buffer:
    """Memory that is used again, and grows when more is asked for."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(0, dtype=dtype, device=device)

    def of(self, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of that shape, which the next call's overlaps."""
        num_elements = math.prod(shape)
        if self._flat.numel() < num_elements:
            self._flat = self._flat.new_empty(num_elements)
        return self._flat[:num_elements].view(shape)


def _bytes_of(payload: memoryview) -> Tensor:
    """View bytes as uint8; the tensor keeps them alive."""
    return torch.from_dlpack(np.frombuffer(payload, dtype=np.uint8))
