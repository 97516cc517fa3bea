"""Small records with checkable content, shared by the store's tests."""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from daric_rag.storage import Record, RecordHeader
from daric_rag.storage.format import HEADER_LEN, SegmentIdentity

FINGERPRINT = b"m" * 32
OTHER_FINGERPRINT = b"o" * 32
ROOT = b"r" * 32  # The parent of a document's first segment.
SHAPE = (2, 3, 1, 4)  # [num_layers, num_tokens, num_kv_heads, head_dim]
PAYLOAD_LEN = 2 * 2 * 3 * 1 * 4 * 2  # K and V, 2 * 3 * 1 * 4 elements of 2 bytes
RECORD_BYTES = HEADER_LEN + PAYLOAD_LEN
CAPACITY_BYTES = 100 * RECORD_BYTES

# Where a child process finds this module.
REPOSITORY = Path(__file__).parents[2]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def header(
    number: int,
    *,
    num_tokens: int = 3,
    parent: bytes = ROOT,
    index: int = 0,
    side_data: bytes = b"",
) -> RecordHeader:
    identity = SegmentIdentity(key(number), parent, FINGERPRINT, index, side_data)
    return RecordHeader.for_shape(identity, (2, num_tokens, 1, 4), "bfloat16")


def payload(number: int, *, num_tokens: int = 3) -> bytes:
    length = PAYLOAD_LEN // 3 * num_tokens
    return bytes((number * 7 + position) % 256 for position in range(length))


def record(
    number: int,
    *,
    num_tokens: int = 3,
    parent: bytes = ROOT,
    index: int = 0,
    side_data: bytes = b"",
) -> Record:
    head = header(
        number, num_tokens=num_tokens, parent=parent, index=index, side_data=side_data
    )
    content = memoryview(payload(number, num_tokens=num_tokens))
    return Record(head, content, side_data)


def document(numbers: Sequence[int], side_data: bytes = b"") -> list[Record]:
    """A chain of segments, the last of which carries the side data."""
    parents = [ROOT, *map(key, numbers)]
    last = len(numbers) - 1
    return [
        record(
            number,
            parent=parents[index],
            index=index,
            side_data=side_data if index == last else b"",
        )
        for index, number in enumerate(numbers)
    ]


def put(store, number: int) -> None:
    """Writes a record to a tiered store, whose buffer the caller gave."""
    store.write(header(number), memoryview(payload(number)))


def read(tier, number: int) -> bytes | None:
    found = tier.read(key(number), FINGERPRINT)
    return None if found is None else bytes(found.payload)


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def uses(tier) -> dict[bytes, int]:
    """How often each record was used, as every process sees it."""
    return {row.key: row.uses for row in tier.segments()}


def path_of(tier, number: int) -> Path:
    (name,) = [row.filename for row in tier.segments() if row.key == key(number)]
    return tier.directory / name


def record_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/??/*.val"))


def disk_usage(folder: Path) -> int:
    """Bytes of all records' files, unfinished ones included, at one moment.

    First all names, then all sizes: what is counted was there in between.
    """
    paths = list(folder.glob("??/??/*"))
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def start_elsewhere(
    folder: Path, code: str, capacity_bytes: int = CAPACITY_BYTES
) -> subprocess.Popen[str]:
    """Start code in a process of its own, with `tier` open on the same folder."""
    prelude = (
        "import os, signal, sys, time\n"
        "from daric_rag.storage import DiskTier\n"
        "from tests.storage.records import *\n"
        f"tier = DiskTier({str(folder)!r}, {capacity_bytes})\n"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", prelude + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )


def run_elsewhere(folder: Path, code: str, capacity_bytes: int = CAPACITY_BYTES) -> str:
    """Run code in a process of its own and return what it prints."""
    with start_elsewhere(folder, code, capacity_bytes) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output.strip()
