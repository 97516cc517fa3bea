"""Rows of a store's index: what they hold, and what is made of a strange one."""

import math
import sqlite3
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from diskcache.core import MODE_BINARY

from daric_rag.storage.format import KEY_LEN
from daric_rag.storage.names import is_record_name

__all__ = [
    "COLUMNS",
    "MAX_INT",
    "MODE_RECORD",
    "MODE_RESERVED",
    "RESERVED_KEYS",
    "Change",
    "Reservation",
    "SegmentRow",
    "State",
    "decode_rows",
    "encode_row",
    "is_reservation",
    "valid_time",
    "valid_uses",
]

MODE_RECORD: Final[int] = MODE_BINARY
MODE_RESERVED: Final = 0

# Keys of reservations, `[first, end)`: shorter than a segment's, and no digest begins
# so.
RESERVED_KEYS: Final = (b"\0daric\0\0", b"\0daric\0\1")

MAX_INT: Final = 1 << 62
_MAX_TOKENS: Final = 1 << 20
_MAX_RECORD_BYTES: Final = 1 << 40
_MAX_USES: Final = 1 << 40
_MAX_TIME: Final = float(1 << 37)  # Some time in the year 6325.

_FACTS: Final = struct.Struct("<32s32sII")

COLUMNS: Final = (
    "rowid, key, raw, mode, filename, size, value, access_time, access_count,"
    " daric_priority, daric_pins"
)


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One record as the index describes it.

    Attributes:
        key: `SegmentKey`.
        parent: Key of the segment before it, or the root of model and namespace.
        fingerprint: `ModelFingerprint`.
        segment_index: Which of its chunk's segments it is, from 0.
        num_tokens: Tokens of the segment.
        nbytes: Bytes of its file.
        filename: Relative to the store's folder.
        last_used: Seconds since 1970.
        uses: How often it was used; that it was stored counts as the first time.
        pinned: Whether it must not be evicted.
        side_data: About the document that ends with it. Sealed where the store is
            encrypted; `DiskTier.segments` opens it.
        priority: What its uses are worth, see `eviction`.
    """

    key: bytes
    parent: bytes
    fingerprint: bytes
    segment_index: int
    num_tokens: int
    nbytes: int
    filename: str
    last_used: float
    uses: int
    pinned: bool
    side_data: bytes
    priority: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """How far the index has come.

    Attributes:
        changes: Number of the last transaction that changed records.
        clock: Logical time: bytes ever stored, and 1 per use (`SegmentIndex.now`).
        forgotten: Deletions up to this change are no longer listed.
    """

    changes: int
    clock: int
    forgotten: int

    def __post_init__(self) -> None:
        """Refuse what no transaction can have written.

        Raises:
            sqlite3.DatabaseError: As SQLite does for a damaged index.
        """
        for value in (self.changes, self.clock, self.forgotten):
            if type(value) is not int or not 0 <= value < MAX_INT:
                raise sqlite3.DatabaseError(f"its state holds {value!r}")


@dataclass(slots=True)
class Change:
    """A transaction under way.

    Attributes:
        number: Its number; nobody else's until it ends.
        clock: Logical time; whoever moves it on sets it.
    """

    number: int
    clock: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for a record on its way, counted like a record.

    Attributes:
        key: Of its row.
        filename: The file to come.
        nbytes: Bytes reserved.
    """

    key: bytes
    filename: str
    nbytes: int

    @classmethod
    def make(
        cls, writer_id: bytes, number: int, filename: str, nbytes: int
    ) -> "Reservation":
        """Name a reservation after its writer."""
        key = RESERVED_KEYS[0] + writer_id + number.to_bytes(6, "big")
        return cls(key, filename, nbytes)

    @property
    def writer_id(self) -> bytes:
        """The writer, as `WriterLock.writer_id`."""
        return self.key[len(RESERVED_KEYS[0]) : len(RESERVED_KEYS[0]) + 16]


def encode_row(row: SegmentRow, number: int) -> tuple[object, ...]:
    """The row's values for `RecordDatabase.insert`, in that order."""
    facts = _FACTS.pack(row.parent, row.fingerprint, row.segment_index, row.num_tokens)
    return (
        time.time(),
        MODE_RECORD,
        row.filename,
        row.nbytes,
        facts + row.side_data,
        row.last_used,
        row.uses,
        row.priority,
        row.pinned,
        number,
    )


def decode_rows(
    rows: Iterable[tuple[Any, ...]], broken: list[int]
) -> Iterator[SegmentRow]:
    """Iterate over the records among rows of `COLUMNS`.

    Args:
        rows: As fetched.
        broken: Gets the ids of those that are neither records nor reservations.
    """
    for row in rows:
        decoded = _decode(*row[1:])
        if decoded is not None:
            yield decoded
        elif row[3] != MODE_RESERVED or not is_reservation(row[1], *row[4:6]):
            broken.append(row[0])


def is_reservation(key: object, filename: object, size: object) -> bool:
    """Whether these values of a reserved row are a `Reservation`'s."""
    return (
        type(key) is bytes
        and key.startswith(RESERVED_KEYS[0])
        and len(key) < KEY_LEN
        and is_record_name(filename)
        and type(size) is int
        and 0 <= size < _MAX_RECORD_BYTES
    )


def valid_time(value: Any) -> float:
    """A time that can be compared and shown, whatever the index holds."""
    time_s = float(value)
    return min(max(time_s, 0.0), _MAX_TIME) if math.isfinite(time_s) else 0.0


def valid_uses(value: Any) -> int:
    """A number of uses that can still be added to."""
    return min(max(int(value), 0), _MAX_USES)


def _decode(
    key: Any,
    raw: Any,
    mode: Any,
    filename: Any,
    size: Any,
    value: Any,
    last_used: Any,
    uses: Any,
    priority: Any,
    pins: Any,
) -> SegmentRow | None:
    """A row that somebody else wrote may hold anything."""
    try:
        if raw != 1 or mode != MODE_RECORD or type(key) is not bytes:
            return None
        if len(key) != KEY_LEN or not is_record_name(filename):
            return None
        parent, fingerprint, segment_index, num_tokens = _FACTS.unpack_from(value)
        if not 0 <= size < _MAX_RECORD_BYTES or num_tokens > _MAX_TOKENS:
            return None
        priority = min(max(int(priority), 0), MAX_INT)
        return SegmentRow(
            key,
            parent,
            fingerprint,
            segment_index,
            num_tokens,
            int(size),
            filename,
            valid_time(last_used),
            valid_uses(uses),
            bool(pins),
            value[_FACTS.size :],
            priority,
        )
    except (TypeError, ValueError, OverflowError, struct.error):
        return None
