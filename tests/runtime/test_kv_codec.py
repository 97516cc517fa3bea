"""Codecs against a naive reading of their payload, and what their errors may be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from daric_rag.errors import ConfigError
from daric_rag.runtime.kv_codec import KvShape, codec_of
from daric_rag.storage.base import Record
from daric_rag.storage.format import RecordHeader, SegmentIdentity, payload_len_of

QUANTIZED = ("int8", "fp8")
MAX_CODE = {"int8": 127.0, "fp8": 448.0}
SMALLEST_FLOAT16 = 2.0**-24

quantized = pytest.mark.parametrize("name", QUANTIZED)
every_name = pytest.mark.parametrize("name", ["model", *QUANTIZED])
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32]
)


def random_kv(dtype: torch.dtype, num_tokens: int, seed: int = 0) -> Tensor:
    """K and V, `[2, layers, tokens, heads, head_dim]`; vectors of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, 2, num_tokens, 3, 8, generator=generator)
    return (kv * 10.0 ** torch.randint(-3, 4, kv.shape[:-1])[..., None]).to(dtype)


def shape_of(kv: Tensor) -> KvShape:
    _, num_layers, _, num_heads, head_dim = kv.shape
    return KvShape(num_layers, num_heads, head_dim, kv.dtype)


def encode(name: str, kv: Tensor) -> memoryview:
    """The payload of K and V, in a buffer that was full of something else."""
    codec = codec_of(name, shape_of(kv))
    payload_len = payload_len_of(shape_of(kv).of(kv.shape[2]), codec.dtype_name)
    out = memoryview(bytearray(b"\xa5" * payload_len))
    codec.payload_of(kv[0], kv[1], out)
    return out


def decode(name: str, payload: memoryview, like: Tensor) -> Tensor:
    codec = codec_of(name, shape_of(like))
    return torch.stack(codec.tensors_of(payload, like.shape[2]))


def round_trip(name: str, kv: Tensor) -> Tensor:
    return decode(name, encode(name, kv), kv)


def scales_of(payload: memoryview, kv: Tensor) -> Tensor:
    """`[2, layers, tokens, heads, 1]` in float64."""
    scales = np.frombuffer(payload[kv.numel() :], dtype=np.float16)
    return torch.from_numpy(scales.astype(np.float64)).view(*kv.shape[:-1], 1)


def e4m3(code: int) -> float:
    """The number that an e4m3 code means, by its definition."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 0x7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def int8(code: int) -> float:
    return code - 256.0 if code > 127 else float(code)


def by_hand(name: str, payload: memoryview, like: Tensor) -> Tensor:
    """A payload's K and V in float64, one code after the other."""
    read = {"int8": int8, "fp8": e4m3}[name]
    numbers = torch.tensor([read(code) for code in bytes(payload[: like.numel()])])
    scales = scales_of(payload, like)
    return numbers.double().view(like.shape) / MAX_CODE[name] * scales


def rounding(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """What the last two roundings may cost: to float32, and to the dtype."""
    limits = torch.finfo(dtype)
    return exact.abs() * limits.eps + limits.smallest_normal * limits.eps


def bound(name: str, kv: Tensor) -> Tensor:
    """How far an element may be off, as the module promises."""
    exact = kv.double().abs()
    scale = exact.amax(dim=-1, keepdim=True)
    if name == "int8":
        error = scale / 254
    else:
        error = torch.maximum(exact / 16, scale / 458_752)
    # Scales below float16's normal range are multiples of its smallest number.
    error = error + torch.maximum(scale / 2048, torch.tensor(SMALLEST_FLOAT16 / 2))
    return error + rounding(exact, kv.dtype)


# What a payload is.


@quantized
@every_dtype
def test_a_payload_read_by_hand_is_what_the_codec_returns(
    name: str, dtype: torch.dtype
) -> None:
    kv = random_kv(dtype, num_tokens=5)
    payload = encode(name, kv)

    expected = by_hand(name, payload, kv)

    actual = decode(name, payload, kv).double()
    assert ((actual - expected).abs() <= rounding(expected, dtype)).all()
    assert ((expected - kv.double()).abs() <= bound(name, kv)).all()
    assert torch.equal(
        scales_of(payload, kv), kv.abs().amax(-1, keepdim=True).half().double()
    )


@every_dtype
def test_every_e4m3_code_means_what_the_format_defines(dtype: torch.dtype) -> None:
    codes = [code for code in range(256) if code & 0x7F != 0x7F]  # two are NaN
    scales = np.full(2, 448.0, dtype=np.float16)
    payload = memoryview(bytes(codes) + scales.tobytes())

    actual = decode("fp8", payload, torch.empty(2, 1, 1, 1, 127, dtype=dtype))

    expected = torch.tensor([e4m3(code) for code in codes])
    assert torch.equal(actual.flatten().float(), expected)


@every_name
@every_dtype
def test_a_record_takes_the_payload(name: str, dtype: torch.dtype) -> None:
    kv = random_kv(dtype, num_tokens=3)
    identity = SegmentIdentity(b"k" * 32, b"p" * 32, b"f" * 32)
    dtype_name = codec_of(name, shape_of(kv)).dtype_name
    header = RecordHeader.for_shape(identity, shape_of(kv).of(3), dtype_name)

    record = Record(header, encode(name, kv))

    assert torch.equal(decode(name, record.payload, kv), round_trip(name, kv))


@every_name
@pytest.mark.parametrize("change", [-2, 2])
def test_a_payload_of_another_length_is_refused(name: str, change: int) -> None:
    kv = random_kv(torch.bfloat16, num_tokens=3)
    wrong = (bytes(encode(name, kv)) + bytes(2))[: change - 2 or None]
    with pytest.raises(RuntimeError):
        decode(name, memoryview(wrong), kv)


# What is lost.


def vectors_of(dtype: torch.dtype, smallest: float = 0.0) -> st.SearchStrategy[Tensor]:
    """Vectors of four, as large as a scale may be, and as small as a subnormal."""
    numbers = st.one_of(
        st.floats(-65504.0, 65504.0, width=32),
        st.floats(-1.0, 1.0, width=32),
        st.integers(-150, 15).map(lambda exponent: 2.0**exponent),
    ).map(lambda number: number if abs(number) > smallest else 0.0)
    elements = st.lists(numbers, min_size=16, max_size=16)
    return elements.map(lambda x: torch.tensor(x).to(dtype).view(2, 1, 2, 1, 4))


@quantized
@every_dtype
@given(data=st.data())
def test_errors_stay_within_half_a_code(
    name: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    kv = data.draw(vectors_of(dtype))
    error = round_trip(name, kv).double() - kv.double()
    assert (error.abs() <= bound(name, kv)).all()


@quantized
@every_dtype
@given(data=st.data())
def test_what_a_payload_gives_becomes_the_same_payload(
    name: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    # Below this a scale in float16 has too few bits to come back as it was.
    kv = data.draw(vectors_of(dtype, smallest=2.0**-20))
    payload = encode(name, kv)
    assert bytes(encode(name, decode(name, payload, kv))) == bytes(payload)


@quantized
@every_dtype
def test_idempotent_for_every_bfloat16_mantissa(name: str, dtype: torch.dtype) -> None:
    """Every largest element of eight significant bits, beside every int8 code."""
    largest = torch.arange(128, 256).view(1, 128, 1, 1) / 64
    others = largest * torch.arange(-127, 128) / 127
    keys = torch.cat((largest, others), dim=-1).to(dtype)
    kv = torch.stack((keys, -keys))
    payload = encode(name, kv)
    assert bytes(encode(name, decode(name, payload, kv))) == bytes(payload)


@quantized
@every_dtype
def test_zeros_are_zeros_and_lend_nothing_to_their_neighbours(
    name: str, dtype: torch.dtype
) -> None:
    kv = random_kv(dtype, num_tokens=4)
    alone = round_trip(name, kv)
    kv[:, :, 1] = 0.0

    actual = round_trip(name, kv)

    assert not actual[:, :, 1].any()
    assert torch.equal(actual[:, :, 2:], alone[:, :, 2:])
    assert not any(encode(name, torch.zeros_like(kv)))


@quantized
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_beyond_the_range_of_scales_elements_are_clipped(
    name: str, dtype: torch.dtype
) -> None:
    kv = torch.zeros(2, 1, 1, 1, 8, dtype=dtype)
    kv[..., 0], kv[..., 1], kv[..., 2] = 3e38, -1e6, 30_000.0

    actual = round_trip(name, kv)

    expected = torch.tensor([65504.0, -65504.0]).to(dtype).expand(2, 1, 1, 1, 2)
    torch.testing.assert_close(actual[..., :2], expected, rtol=1e-6, atol=0)
    assert ((actual[..., 2] - 30_000).abs() < 30_000 / 16).all()


# How it is called.


def test_the_models_own_dtype_is_not_copied() -> None:
    kv = random_kv(torch.bfloat16, num_tokens=3)
    payload = encode("model", kv)
    keys, values = codec_of("model", shape_of(kv)).tensors_of(payload, 3)
    assert torch.equal(torch.stack((keys, values)), kv)
    payload[:2] = bytes(2)
    assert keys.flatten()[0] == 0 != kv.flatten()[0]


@every_name
@every_dtype
def test_what_was_gathered_into_staging_is_the_payload(
    name: str, dtype: torch.dtype
) -> None:
    kv, other = random_kv(dtype, num_tokens=5), random_kv(dtype, 7, seed=1)
    codec = codec_of(name, shape_of(kv))
    codec.tensors_of(encode(name, other), 7)
    out = memoryview(bytearray(encode(name, kv).nbytes))

    keys, values = codec.staging(out, 5)
    keys.copy_(kv[0])
    values.copy_(kv[1])
    codec.payload_of(keys, values, out)

    assert bytes(out) == bytes(encode(name, kv))


@quantized
def test_long_and_short_segments_share_a_codec(name: str) -> None:
    codec = codec_of(name, shape_of(random_kv(torch.bfloat16, 1)))
    for seed, num_tokens in enumerate((3, 17, 1, 9)):
        kv = random_kv(torch.bfloat16, num_tokens, seed)
        found = codec.tensors_of(encode(name, kv), num_tokens)
        assert torch.equal(torch.stack(found), round_trip(name, kv))


@quantized
def test_neither_direction_changes_what_it_reads(name: str) -> None:
    kv = random_kv(torch.float32, num_tokens=6)
    before = kv.clone()
    payload = bytes(encode(name, kv))
    assert torch.equal(kv, before)
    copy = bytes(bytearray(payload))
    decode(name, memoryview(payload), kv)
    assert payload == copy


@quantized
def test_strided_tensors_are_taken(name: str) -> None:
    kv = random_kv(torch.bfloat16, num_tokens=6)
    strided = torch.zeros(2, 2, 3, 12, 8, dtype=kv.dtype).transpose(2, 3)[:, :, ::2]
    strided.copy_(kv)
    assert bytes(encode(name, strided)) == bytes(encode(name, kv))


@every_name
@every_dtype
def test_layers_one_at_a_time_are_the_same_bytes_and_tensors(
    name: str, dtype: torch.dtype
) -> None:
    kv = random_kv(dtype, num_tokens=6)
    codec = codec_of(name, shape_of(kv))
    payload = encode(name, kv)
    parts = codec.parts_of(payload, 6)
    assert sum(part.nbytes for part in parts) == len(payload)
    for layer in range(kv.shape[1]):
        of_layer = [part[:, layer] for part in parts]
        assert torch.equal(codec.decode(of_layer), decode(name, payload, kv)[:, layer])
        for part, mine in zip(of_layer, codec.encode(kv[:, layer]), strict=True):
            assert torch.equal(part, mine)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'model', 'fp8', 'int8'"):
        codec_of("int4", shape_of(random_kv(torch.bfloat16, 1)))
