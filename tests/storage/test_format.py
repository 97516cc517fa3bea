"""A header is packed and unpacked exactly, and any damage to it is found."""

import dataclasses

import pytest

from daric_rag.errors import DaricError, StoreError
from daric_rag.storage import Record, RecordError, RecordHeader
from daric_rag.storage.format import (
    HEADER_LEN,
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
    packed = encode_header(header(1), 0xFEDCBA9876543210)

    assert len(packed) == HEADER_LEN == 144
    assert decode_header(packed) == (header(1), 0xFEDCBA9876543210)
    assert decode_header(packed + b"payload") == (header(1), 0xFEDCBA9876543210)


def test_record_counts_header_and_payload():
    assert header(1).payload_len == PAYLOAD_LEN == 96
    assert header(1).record_bytes == 144 + 96
    assert header(1).shape == (2, 3, 1, 4)


def test_every_flipped_byte_is_found():
    packed = encode_header(header(1), 5)
    for position in range(HEADER_LEN):
        damaged = bytearray(packed)
        damaged[position] ^= 0x01
        with pytest.raises(RecordError):
            decode_header(damaged)


@pytest.mark.parametrize("length", [0, 1, 143])
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
        ("fingerprint", b"", "shape"),
        ("num_layers", 0, "shape"),
        ("num_tokens", -1, "shape"),
        ("head_dim", 1 << 31, "shape"),
        ("dtype", "int4", "shape"),
        ("dtype", "", "shape"),
        ("side_data_len", 8, "shape"),
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
    with pytest.raises(RecordError):
        RecordHeader.for_shape(key(1), FINGERPRINT, (1 << 20,) * 4, "bfloat16")


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


def test_record_error_is_a_daric_error():
    assert issubclass(RecordError, DaricError)
    assert issubclass(RecordError, ValueError)
