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
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from daric_rag.errors import ConfigError
from daric_rag.runtime.kv_tensors import Buffer, KvShape, bytes_of, largest_magnitudes

__all__ = ["KvCodec", "KvShape", "codec_of"]

_MAX_SCALE: Final = 65504.0  # of float16
_CPU: Final = torch.device("cpu")
_WIDE: Final = torch.float32


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

    # For layers one at a time. A part is one tensor of a payload, such as its codes.

    def parts_of(self, payload: memoryview, num_tokens: int) -> tuple[Tensor, ...]:
        """View a payload's parts, ``[2, num_layers, num_tokens, ...]``, K then V.

        The views keep the payload alive. One token's elements are contiguous, and so
        are one layer's of K or of V.
        """
        ...

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """Turn one layer's parts into K and V, on their device.

        Args:
            parts: As `parts_of` returns them, without layers: ``[2, num_tokens, ...]``.

        Returns:
            ``[2, num_tokens, num_kv_heads, head_dim]``, of the model's dtype; may be
            the only part itself.
        """
        ...

    def encode(self, both: Tensor) -> tuple[Tensor, ...]:
        """Turn one layer's K and V into its parts; the other way round of `decode`."""
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
        (both,) = self.parts_of(payload, num_tokens)
        return both[0], both[1]

    def parts_of(self, payload: memoryview, num_tokens: int) -> tuple[Tensor, ...]:
        """View K and V; see `KvCodec.parts_of`."""
        both = bytes_of(payload).view(self._shape.dtype)
        return (both.view(2, *self._shape.of(num_tokens)),)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """Return K and V as they are; see `KvCodec.decode`."""
        (both,) = parts
        return both

    def encode(self, both: Tensor) -> tuple[Tensor, ...]:
        """Return K and V as they are; see `KvCodec.encode`."""
        return (both,)


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
        self._wide = Buffer(_WIDE, device)
        self._both = Buffer(shape.dtype, device)

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
        parts = self._parts(bytes_of(out), keys.shape[1])
        for vectors, codes, scales in zip((keys, values), *parts, strict=True):
            self._quantize(vectors, codes, scales, self._wide.of(vectors.shape))

    def tensors_of(self, payload: memoryview, num_tokens: int) -> tuple[Tensor, Tensor]:
        """See `KvCodec.tensors_of`."""
        raw = bytes_of(payload).to(self._device, non_blocking=True)
        parts = self._parts(raw, num_tokens)
        keys, values = self.staging(payload, num_tokens)
        for codes, scales, out in zip(*parts, (keys, values), strict=True):
            self._dequantize(codes, scales, out, self._wide.of(out.shape))
        return keys, values

    def parts_of(self, payload: memoryview, num_tokens: int) -> tuple[Tensor, ...]:
        """View codes and scales; see `KvCodec.parts_of`."""
        return self._parts(bytes_of(payload), num_tokens)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """See `KvCodec.decode`; shares no memory, for streams beside each other."""
        codes, scales = parts
        both = torch.empty(codes.shape, dtype=self._shape.dtype, device=codes.device)
        self._dequantize(codes, scales, both, torch.empty_like(both, dtype=_WIDE))
        return both

    def encode(self, both: Tensor) -> tuple[Tensor, ...]:
        """See `KvCodec.encode`; shares no memory, like `decode`."""
        codes = torch.empty_like(both, dtype=torch.int8)
        scales = both.new_empty(both.shape[:-1], dtype=torch.float16)
        self._quantize(both, codes, scales, torch.empty_like(both, dtype=_WIDE))
        return codes, scales

    def _quantize(
        self, vectors: Tensor, codes: Tensor, scales: Tensor, wide: Tensor
    ) -> None:
        largest = largest_magnitudes(vectors, wide).float()
        largest = largest.clamp_(max=_MAX_SCALE).half()
        scales.copy_(largest)
        # Where the scale is 0 all codes are to be, not 0 times infinity.
        factor = (self.max_code / largest.float()).masked_fill_(largest == 0, 0.0)
        wide.copy_(vectors)
        wide.mul_(factor[..., None])
        # A scale that was rounded down or clipped leaves elements beyond the codes.
        self._pack(wide.clamp_(-self.max_code, self.max_code), codes)

    def _dequantize(
        self, codes: Tensor, scales: Tensor, out: Tensor, wide: Tensor
    ) -> None:
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
