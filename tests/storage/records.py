"""Small records with checkable content, shared by the store's tests."""

from pathlib import Path

from daric_rag.storage import Record, RecordHeader

FINGERPRINT = b"m" * 32
OTHER_FINGERPRINT = b"o" * 32
SHAPE = (2, 3, 1, 4)  # [num_layers, num_tokens, num_kv_heads, head_dim]
PAYLOAD_LEN = 2 * 2 * 3 * 1 * 4 * 2  # K and V, 2 * 3 * 1 * 4 elements of 2 bytes
RECORD_BYTES = 144 + PAYLOAD_LEN
CAPACITY_BYTES = 100 * RECORD_BYTES

# Where a child process finds this module.
REPOSITORY = Path(__file__).parents[2]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def header(number: int, *, num_tokens: int = 3) -> RecordHeader:
    shape = (2, num_tokens, 1, 4)
    return RecordHeader.for_shape(key(number), FINGERPRINT, shape, "bfloat16")


def payload(number: int, *, num_tokens: int = 3) -> bytes:
    length = header(number, num_tokens=num_tokens).payload_len
    return bytes((number * 7 + position) % 256 for position in range(length))


def record(number: int, *, num_tokens: int = 3) -> Record:
    content = memoryview(payload(number, num_tokens=num_tokens))
    return Record(header(number, num_tokens=num_tokens), content)


def read(tier, number: int) -> bytes | None:
    found = tier.read(key(number), FINGERPRINT)
    return None if found is None else bytes(found.payload)


def record_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/??/*.val"))
