"""A header is packed and unpacked exactly, and any damage to it is found."""

import dataclasses

import pytest

from daric_rag.errors import DaricError, StoreError
from daric_rag.storage import Record, RecordError, RecordHeader
from daric_rag.storage.format import (
    HEADER_LEN,
    MAX_SIDE_DATA_LEN,
    SegmentIdentity,
    body_checksum,
    check_identity,
    decode_header,
    encode_header,
)
from tests.storage.records import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    PAYLOAD_LEN,
    header,
    key,
    payload,
)


def test_header_survives_a_round_trip():
    plain = header(1, parent=key(2), index=3, side_data=b"{}")
    for one in (plain, dataclasses.replace(plain, encrypted=True)):
        packed = encode_header(one, 0xFEDCBA9876543210)
        assert len(packed) == HEADER_LEN == 184
        assert decode_header(packed) == (one, 0xFEDCBA9876543210)
        assert decode_header(packed + b"payload") == (one, 0xFEDCBA9876543210)


def test_record_counts_header_payload_and_side_data():
    assert header(1).payload_len == PAYLOAD_LEN == 96
    assert header(1).record_bytes == 184 + 96
    assert header(1, side_data=b"{}").record_bytes == 184 + 96 + 2
    assert header(1).shape == (2, 3, 1, 4)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3"])
def test_a_quantised_payload_has_a_scale_per_vector(dtype):
    identity = SegmentIdentity(key(1), key(2), FINGERPRINT)
    # K and V: 2 layers * 3 tokens * 1 head of 4 codes and a float16 each.
    quantised = RecordHeader.for_shape(identity, (2, 3, 1, 4), dtype)
    assert quantised.payload_len == 2 * 6 * (4 + 2)


def test_a_checksum_covers_all_parts_in_order():
    whole = body_checksum(b"payload and side data")
    assert body_checksum(b"payload", b" and side data") == whole
    assert body_checksum(b" and side data", b"payload") != whole


def test_every_flipped_byte_is_found():
    packed = encode_header(header(1), 5)
    for position in range(HEADER_LEN):
        damaged = bytearray(packed)
        damaged[position] ^= 0x01
        with pytest.raises(RecordError):
            decode_header(damaged)


@pytest.mark.parametrize("length", [0, 1, 183])
def test_short_header_is_found(length):
    with pytest.raises(RecordError) as caught:
        decode_header(encode_header(header(1), 5)[:length])
    assert caught.value.kind == "short"


@pytest.mark.parametrize(
    ("offset", "kind"), [(0, "magic"), (8, "version"), (16, "checksum")]
)
def test_kind_says_what_is_wrong(offset, kind):
    damaged = bytearray(encode_header(header(1), 5))
    damaged[offset] ^= 0xFF
    with pytest.raises(RecordError) as caught:
        decode_header(damaged)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("segment_key", b"short", "shape"),
        ("parent_key", b"", "shape"),
        ("segment_index", -1, "shape"),
        ("segment_index", 1 << 20, "shape"),
        ("fingerprint", b"", "shape"),
        ("num_layers", 0, "shape"),
        ("num_tokens", -1, "shape"),
        ("head_dim", 1 << 31, "shape"),
        ("dtype", "int4", "shape"),
        ("dtype", "", "shape"),
        ("side_data_len", -1, "length"),
        ("side_data_len", MAX_SIDE_DATA_LEN + 1, "length"),
        ("payload_len", PAYLOAD_LEN - 1, "length"),
        ("payload_len", 1 << 62, "length"),
    ],
)
def test_impossible_header_cannot_be_made(field, value, kind):
    with pytest.raises(RecordError) as caught:
        dataclasses.replace(header(1), **{field: value})
    assert caught.value.kind == kind


def test_sizes_that_multiply_to_nonsense_are_refused():
    # Each is in range; together they would ask for 2**82 bytes.
    identity = SegmentIdentity(key(1), key(2), FINGERPRINT)
    with pytest.raises(RecordError):
        RecordHeader.for_shape(identity, (1 << 20,) * 4, "bfloat16")


def test_identity_is_key_and_model():
    check_identity(header(1), key(1), FINGERPRINT)
    for wrong in [(key(2), FINGERPRINT), (key(1), OTHER_FINGERPRINT)]:
        with pytest.raises(RecordError) as caught:
            check_identity(header(1), *wrong)
        assert caught.value.kind == "identity"


def test_record_is_read_only_and_as_long_as_its_header_says():
    record = Record(header(1), memoryview(bytearray(payload(1))))
    assert record.payload.readonly
    assert record.key == key(1)

    with pytest.raises(StoreError, match=r"allocate header\.payload_len"):
        Record(header(1), memoryview(payload(1)[:-1]))
    with pytest.raises(StoreError, match="cast"):
        Record(header(1), memoryview(payload(1) * 2)[::2])
    with pytest.raises(StoreError, match="cast"):
        Record(header(1), memoryview(payload(1)).cast("H"))
    with pytest.raises(StoreError, match="side data"):
        Record(header(1), memoryview(payload(1)), b"{}")


def test_record_error_is_a_daric_error():
    assert issubclass(RecordError, DaricError)
    assert issubclass(RecordError, ValueError)
