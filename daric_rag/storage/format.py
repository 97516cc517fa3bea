"""The record: one segment's keys and values as bytes, with a header that proves it.

A record is `header | payload`. The payload is K then V, each C-contiguous
`[num_layers, num_tokens, num_kv_heads, head_dim]` in the header's dtype. Nothing in
it is ever unpickled or evaluated: the header is a fixed struct, checked field by
field before a single byte is allocated for the payload.

| offset | field            | bytes |
|--------|------------------|-------|
| 0      | magic            | 8     |
| 8      | format version   | 2     |
| 10     | header length    | 2     |
| 12     | reserved, zero   | 4     |
| 16     | segment key      | 32    |
| 48     | fingerprint      | 32    |
| 80     | num_layers       | 4     |
| 84     | num_tokens       | 4     |
| 88     | num_kv_heads     | 4     |
| 92     | head_dim         | 4     |
| 96     | dtype, ascii     | 16    |
| 112    | payload_len      | 8     |
| 120    | side_data_len    | 8     |
| 128    | payload checksum | 8     |
| 136    | header checksum  | 8     |

Numbers are little-endian; checksums are xxh3_64. They find damage and prove nothing
against a forger: whoever may write to the store's folder is trusted.
"""

import struct
from dataclasses import dataclass
from typing import Final, Literal

import xxhash

from daric_rag.errors import DaricError

MAGIC: Final = b"DARICKV\0"
FORMAT_VERSION: Final = 1
KEY_LEN: Final = 32
DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}

_STRUCT: Final = struct.Struct("<8sHHI32s32sIIII16sQQQ")
_CHECKSUM: Final = struct.Struct("<Q")
HEADER_LEN: Final = _STRUCT.size + _CHECKSUM.size

# Far above any model we serve; they keep the product of a header's sizes small
# enough that no arithmetic on it can surprise.
_MAX_DIM: Final = 1 << 20
_MAX_PAYLOAD_LEN: Final = 1 << 40

RecordErrorKind = Literal[
    "short", "magic", "version", "checksum", "shape", "length", "identity"
]


class RecordError(DaricError, ValueError):
    """A record's bytes cannot be what they claim to be.

    Inside the store it is a miss, never an error for the caller.

    Attributes:
        kind: What was wrong, for logs and tests.
    """

    def __init__(self, kind: RecordErrorKind, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind: RecordErrorKind = kind


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record holds, for whom, and in which shape.

    Attributes:
        segment_key: `SegmentKey`, 32 bytes.
        fingerprint: `ModelFingerprint`, 32 bytes.
        num_layers: Layers of the model.
        num_tokens: Tokens of the segment.
        num_kv_heads: Key-value heads per layer (of this rank).
        head_dim: Elements per head.
        dtype: A key of `DTYPE_BYTES`.
        payload_len: Bytes of K and V together; must equal what the shape says.
        side_data_len: Bytes after the payload; reserved, zero in this version.

    Raises:
        RecordError: At construction, if sizes are out of range or contradict.
    """

    segment_key: bytes
    fingerprint: bytes
    num_layers: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    payload_len: int
    side_data_len: int = 0

    def __post_init__(self) -> None:
        for name in ("segment_key", "fingerprint"):
            if len(getattr(self, name)) != KEY_LEN:
                raise RecordError("shape", f"{name} must have {KEY_LEN} bytes")
        for name in ("num_layers", "num_tokens", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not 1 <= value <= _MAX_DIM:
                raise RecordError("shape", f"{name} is {value}, not 1 to {_MAX_DIM}")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise RecordError("shape", f"dtype {self.dtype!r} is none of {known}")
        if self.side_data_len != 0:
            raise RecordError("shape", "side data is reserved and must be empty")
        expected = payload_len_of(self.shape, self.dtype)
        if self.payload_len != expected or expected > _MAX_PAYLOAD_LEN:
            raise RecordError(
                "length",
                f"payload_len is {self.payload_len}, but K and V of {self.shape} "
                f"{self.dtype} take {expected} bytes (limit {_MAX_PAYLOAD_LEN})",
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of K, and again of V: `[num_layers, num_tokens, num_kv_heads, head_dim]`."""
        return (self.num_layers, self.num_tokens, self.num_kv_heads, self.head_dim)

    @property
    def record_bytes(self) -> int:
        """Bytes that the record counts for in every tier: header and payload."""
        return HEADER_LEN + self.payload_len

    @classmethod
    def for_shape(
        cls,
        segment_key: bytes,
        fingerprint: bytes,
        shape: tuple[int, int, int, int],
        dtype: str,
    ) -> "RecordHeader":
        """Make a header whose `payload_len` follows from the shape.

        Args:
            segment_key: 32 bytes.
            fingerprint: 32 bytes.
            shape: Of K: `[num_layers, num_tokens, num_kv_heads, head_dim]`.
            dtype: A key of `DTYPE_BYTES`.

        Raises:
            RecordError: If sizes or dtype are out of range.
        """
        payload_len = payload_len_of(shape, dtype)
        return cls(segment_key, fingerprint, *shape, dtype, payload_len)


def payload_len_of(shape: tuple[int, int, int, int], dtype: str) -> int:
    """Bytes of K and V together for K's shape; 0 for an unknown dtype."""
    num_layers, num_tokens, num_kv_heads, head_dim = shape
    num_elements = num_layers * num_tokens * num_kv_heads * head_dim
    return 2 * num_elements * DTYPE_BYTES.get(dtype, 0)


def payload_checksum(payload: memoryview) -> int:
    """xxh3_64 of the payload; releases the GIL while it runs."""
    return xxhash.xxh3_64_intdigest(payload)


def encode_header(header: RecordHeader, checksum: int) -> bytes:
    """Pack a header for its record.

    Args:
        header: Valid by construction.
        checksum: `payload_checksum` of the payload.

    Returns:
        `HEADER_LEN` bytes.
    """
    packed = _STRUCT.pack(
        MAGIC,
        FORMAT_VERSION,
        HEADER_LEN,
        0,
        header.segment_key,
        header.fingerprint,
        *header.shape,
        header.dtype.encode("ascii"),
        header.payload_len,
        header.side_data_len,
        checksum,
    )
    return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))


def decode_header(data: bytes | bytearray | memoryview) -> tuple[RecordHeader, int]:
    """Unpack and check a header; allocates nothing for the payload.

    Args:
        data: At least `HEADER_LEN` bytes; what follows them is ignored.

    Returns:
        The header and the checksum that its payload must have.

    Raises:
        RecordError: On any damage; `kind` says which.
    """
    if len(data) < HEADER_LEN:
        raise RecordError("short", f"{len(data)} bytes are no header ({HEADER_LEN})")
    packed = bytes(data[: _STRUCT.size])
    magic, version, header_len, reserved, *rest = _STRUCT.unpack(packed)
    if magic != MAGIC:
        raise RecordError("magic", "not a daric_rag record")
    # Before the checksum: a later version may put its checksum elsewhere.
    if version != FORMAT_VERSION:
        raise RecordError("version", f"format {version}, this is {FORMAT_VERSION}")
    (checksum,) = _CHECKSUM.unpack_from(data, _STRUCT.size)
    if checksum != xxhash.xxh3_64_intdigest(packed):
        raise RecordError("checksum", "the header is damaged")
    if header_len != HEADER_LEN or reserved != 0:
        raise RecordError("length", f"header length {header_len}, flags {reserved}")
    key, fingerprint, *dims, dtype, payload_len, side_data_len, payload_sum = rest
    try:
        name = dtype.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError as error:
        raise RecordError("shape", "the dtype's name is not ascii") from error
    shape = (dims[0], dims[1], dims[2], dims[3])
    header = RecordHeader(key, fingerprint, *shape, name, payload_len, side_data_len)
    return header, payload_sum


def check_identity(header: RecordHeader, key: bytes, fingerprint: bytes) -> None:
    """Check that a record is the one that was asked for.

    Raises:
        RecordError: With kind `identity` if the key or the model differs, as when
            two files were swapped.
    """
    if header.segment_key != key:
        raise RecordError("identity", "the record belongs to another segment")
    if header.fingerprint != fingerprint:
        raise RecordError("identity", "the record belongs to another model")
