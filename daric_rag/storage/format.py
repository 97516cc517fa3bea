"""The record: one segment's keys and values as bytes, with a header that proves it.

A record is `header | payload | side data`. The payload is K then V, each C-contiguous
`[num_layers, num_tokens, num_kv_heads, head_dim]` in the header's dtype; quantised
ones are followed by the scales of K and of V, `[num_layers, num_tokens, num_kv_heads]`
each. Nothing in it is ever unpickled or evaluated: the header is a fixed struct,
checked field by field before a single byte is allocated for what follows.

| offset | field                | bytes |
|--------|----------------------|-------|
| 0      | magic                | 8     |
| 8      | format version       | 2     |
| 10     | header length        | 2     |
| 12     | flags                | 4     |
| 16     | segment key          | 32    |
| 48     | parent key           | 32    |
| 80     | fingerprint          | 32    |
| 112    | segment index        | 4     |
| 116    | num_layers           | 4     |
| 120    | num_tokens           | 4     |
| 124    | num_kv_heads         | 4     |
| 128    | head_dim             | 4     |
| 132    | reserved, zero       | 4     |
| 136    | dtype, ascii         | 16    |
| 152    | payload_len          | 8     |
| 160    | side_data_len        | 8     |
| 168    | body checksum        | 8     |
| 176    | header checksum      | 8     |

Numbers are little-endian; checksums are xxh3_64, the body's over payload and side data
as they are in the file. They find damage and prove nothing against a forger: whoever
may write to the store's folder is trusted. (Encrypted records are authenticated.)
"""

import struct
from dataclasses import dataclass
from typing import Final, Literal

import xxhash

from daric_rag.errors import DaricError

MAGIC: Final = b"DARICKV\0"
FORMAT_VERSION: Final = 2
KEY_LEN: Final = 32
DTYPE_BYTES: Final = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3": 1,
    "int8": 1,
}
# Stored with one scale per token and head, for K and for V.
QUANTIZED: Final = frozenset({"float8_e4m3", "int8"})
SCALE_DTYPE: Final = "float16"
_SCALE_BYTES: Final = 2

FLAG_ENCRYPTED: Final = 1

_STRUCT: Final = struct.Struct("<8sHHI32s32s32sIIIIII16sQQQ")
_CHECKSUM: Final = struct.Struct("<Q")
HEADER_LEN: Final = _STRUCT.size + _CHECKSUM.size

# Far above any model we serve; they keep the product of a header's sizes small
# enough that no arithmetic on it can surprise.
_MAX_DIM: Final = 1 << 20
_MAX_PAYLOAD_LEN: Final = 1 << 40
MAX_SIDE_DATA_LEN: Final = 1 << 16

RecordErrorKind = Literal[
    "short", "magic", "version", "checksum", "shape", "length", "identity", "sealing"
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
        parent_key: Key of the segment before it in its chunk, or the root: the
            fingerprint of model and namespace, 32 bytes.
        fingerprint: `ModelFingerprint` of the model alone, 32 bytes.
        segment_index: Which of its chunk's segments it is, from 0.
        num_layers: Layers of the model.
        num_tokens: Tokens of the segment.
        num_kv_heads: Key-value heads per layer (of this rank).
        head_dim: Elements per head.
        dtype: A key of `DTYPE_BYTES`.
        payload_len: Bytes of K and V together; must equal what the shape says.
        side_data_len: Bytes after the payload; what the last segment of a document
            says about it (see `documents`), 0 for others.
        encrypted: Whether payload and side data are sealed in the file. In memory
            they never are, and this says how the record was found.

    Raises:
        RecordError: At construction, if sizes are out of range or contradict.
    """

    segment_key: bytes
    parent_key: bytes
    fingerprint: bytes
    segment_index: int
    num_layers: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    payload_len: int
    side_data_len: int = 0
    encrypted: bool = False

    def __post_init__(self) -> None:
        for name in ("segment_key", "parent_key", "fingerprint"):
            if len(getattr(self, name)) != KEY_LEN:
                raise RecordError("shape", f"{name} must have {KEY_LEN} bytes")
        for name in ("num_layers", "num_tokens", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not 1 <= value <= _MAX_DIM:
                raise RecordError("shape", f"{name} is {value}, not 1 to {_MAX_DIM}")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise RecordError("shape", f"dtype {self.dtype!r} is none of {known}")
        if not 0 <= self.segment_index < _MAX_DIM:
            raise RecordError("shape", f"segment index {self.segment_index}")
        if not 0 <= self.side_data_len <= MAX_SIDE_DATA_LEN:
            raise RecordError(
                "length", f"side data of {self.side_data_len} bytes is too long"
            )
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
        """Bytes of the record: header, payload and side data."""
        return HEADER_LEN + self.payload_len + self.side_data_len

    @classmethod
    def for_shape(
        cls,
        identity: "SegmentIdentity",
        shape: tuple[int, int, int, int],
        dtype: str,
    ) -> "RecordHeader":
        """Make a header whose `payload_len` follows from the shape.

        Args:
            identity: Whose KV it is.
            shape: Of K: `[num_layers, num_tokens, num_kv_heads, head_dim]`.
            dtype: A key of `DTYPE_BYTES`.

        Raises:
            RecordError: If sizes or dtype are out of range.
        """
        return cls(
            identity.key,
            identity.parent,
            identity.fingerprint,
            identity.index,
            *shape,
            dtype,
            payload_len_of(shape, dtype),
            len(identity.side_data),
        )


@dataclass(frozen=True, slots=True)
class SegmentIdentity:
    """Which segment a record holds, apart from the shape of its KV.

    Attributes:
        key: `SegmentKey`, 32 bytes.
        parent: Key of the segment before it, or the root of model and namespace.
        fingerprint: `ModelFingerprint` of the model alone, 32 bytes.
        index: Which of its chunk's segments it is, from 0.
        side_data: About the document that ends with it; empty for others.
    """

    key: bytes
    parent: bytes
    fingerprint: bytes
    index: int = 0
    side_data: bytes = b""


def payload_len_of(shape: tuple[int, int, int, int], dtype: str) -> int:
    """Bytes of K, V and their scales for K's shape; 0 for an unknown dtype."""
    num_layers, num_tokens, num_kv_heads, head_dim = shape
    num_vectors = 2 * num_layers * num_tokens * num_kv_heads
    scale_bytes = _SCALE_BYTES if dtype in QUANTIZED else 0
    return num_vectors * (head_dim * DTYPE_BYTES.get(dtype, 0) + scale_bytes)


def body_checksum(*parts: bytes | memoryview) -> int:
    """xxh3_64 of the parts joined; releases the GIL while it runs."""
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.intdigest()


def encode_header(header: RecordHeader, checksum: int) -> bytes:
    """Pack a header for its record.

    Args:
        header: Valid by construction.
        checksum: `body_checksum` of what follows the header in the file.

    Returns:
        `HEADER_LEN` bytes.
    """
    packed = _STRUCT.pack(
        MAGIC,
        FORMAT_VERSION,
        HEADER_LEN,
        FLAG_ENCRYPTED if header.encrypted else 0,
        header.segment_key,
        header.parent_key,
        header.fingerprint,
        header.segment_index,
        *header.shape,
        0,
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
        The header and the checksum that its body must have.

    Raises:
        RecordError: On any damage; `kind` says which.
    """
    if len(data) < HEADER_LEN:
        raise RecordError("short", f"{len(data)} bytes are no header ({HEADER_LEN})")
    packed = bytes(data[: _STRUCT.size])
    magic, version, header_len, flags, *rest = _STRUCT.unpack(packed)
    if magic != MAGIC:
        raise RecordError("magic", "not a daric_rag record")
    # Before the checksum: a later version may put its checksum elsewhere.
    if version != FORMAT_VERSION:
        raise RecordError("version", f"format {version}, this is {FORMAT_VERSION}")
    (checksum,) = _CHECKSUM.unpack_from(data, _STRUCT.size)
    if checksum != xxhash.xxh3_64_intdigest(packed):
        raise RecordError("checksum", "the header is damaged")
    key, parent, fingerprint, index, *dims, reserved, dtype, length, side_len, body = (
        rest
    )
    if header_len != HEADER_LEN or reserved != 0 or flags & ~FLAG_ENCRYPTED:
        raise RecordError("length", f"header length {header_len}, flags {flags}")
    try:
        name = dtype.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError as error:
        raise RecordError("shape", "the dtype's name is not ascii") from error
    shape = (dims[0], dims[1], dims[2], dims[3])
    encrypted = bool(flags & FLAG_ENCRYPTED)
    header = RecordHeader(
        key, parent, fingerprint, index, *shape, name, length, side_len, encrypted
    )
    return header, body


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
