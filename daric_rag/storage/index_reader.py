"""Questions to a store's index, and a connection that may only ask them."""

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from diskcache.core import DBNAME

from daric_rag.storage.rows import (
    COLUMNS,
    MAX_INT,
    MODE_RECORD,
    MODE_RESERVED,
    RESERVED_KEYS,
    Reservation,
    SegmentRow,
    State,
    decode_rows,
    is_reservation,
)

__all__ = [
    "DATABASE_NAME",
    "FINISHED",
    "LOCK_TIMEOUT_S",
    "IndexReader",
    "ReadOnlyDatabase",
]

DATABASE_NAME: Final[str] = DBNAME
LOCK_TIMEOUT_S: Final = 10.0
FINISHED: Final = 1


class IndexReader:
    """The questions, for a connection that may write and for one that may not."""

    _sql: Any
    _path: Path
    _identity: os.stat_result

    def is_current(self) -> bool:
        """Whether the file behind the connections is still the one in the folder."""
        try:
            return os.path.samestat(self._path.stat(), self._identity)
        except OSError:
            return False

    def is_same_file(self, other: "IndexReader") -> bool:
        """Whether another connection is to the same file."""
        return os.path.samestat(self._identity, other._identity)

    def check(self, *, thorough: bool = False) -> None:
        """Look through the whole index.

        Args:
            thorough: Also whether its parts agree, which takes several times longer.

        Raises:
            sqlite3.DatabaseError: If it is damaged.
        """
        pragma = "integrity_check" if thorough else "quick_check"
        (found,) = self._sql(f"PRAGMA {pragma}(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(str(found))

    def state(self) -> State:
        """Return how far the index has come.

        Raises:
            sqlite3.DatabaseError: If what it holds cannot be that.
        """
        query = "SELECT changes, clock, forgotten FROM daric_state"
        return State(*(self._sql(query).fetchone() or (None, None, None)))

    def total_bytes(self) -> int:
        """Bytes of all records and reservations.

        Raises:
            sqlite3.DatabaseError: If the index holds no such number.
        """
        query = "SELECT value FROM Settings WHERE key = 'size'"
        (value,) = self._sql(query).fetchone() or (None,)
        if type(value) is not int or not 0 <= value < MAX_INT:
            raise sqlite3.DatabaseError(f"its size is given as {value!r}")
        return value

    def is_finished(self) -> bool:
        """Whether it was made to its end, see `RecordDatabase.finish`."""
        return bool(self._sql("PRAGMA user_version").fetchone()[0] == FINISHED)

    def rows(self, broken: list[int]) -> Iterator[SegmentRow]:
        """Iterate over all records; ids of rows that are not ours go to `broken`."""
        return decode_rows(self._sql(f"SELECT {COLUMNS} FROM Cache"), broken)

    def changed_since(self, changes: int, broken: list[int]) -> Iterator[SegmentRow]:
        """Iterate over the records that came or changed after a change."""
        query = f"SELECT {COLUMNS} FROM Cache WHERE daric_change > ?"
        return decode_rows(self._sql(query, (changes,)), broken)

    def deleted_since(self, changes: int) -> list[bytes]:
        """List keys deleted after a change; some may be there again."""
        query = "SELECT key FROM daric_deleted WHERE change > ?"
        return [key for (key,) in self._sql(query, (changes,))]

    def find(self, key: bytes, broken: list[int]) -> SegmentRow | None:
        """Return one record's row."""
        query = f"SELECT {COLUMNS} FROM Cache WHERE key = ? AND raw = 1"
        return next(decode_rows(self._sql(query, (key,)), broken), None)

    def contains(self, key: bytes) -> bool:
        """Whether there is a record of this key."""
        query = "SELECT 1 FROM Cache WHERE key = ? AND raw = 1 AND mode = ?"
        return self._sql(query, (key, MODE_RECORD)).fetchone() is not None

    def reservations(self) -> list[Reservation]:
        """List what writers have reserved and not yet published."""
        query = (
            "SELECT key, filename, size FROM Cache"
            " WHERE key >= ? AND key < ? AND raw = 1 AND mode = ?"
        )
        bounds = (*RESERVED_KEYS, MODE_RESERVED)
        rows = self._sql(query, bounds)
        return [Reservation(*row) for row in rows if is_reservation(*row)]

    def filenames(self) -> set[str]:
        """Names of all files that have a row, reserved ones included."""
        return {name for (name,) in self._sql("SELECT filename FROM Cache")}


class ReadOnlyDatabase(IndexReader):
    """An index that this process may only read; one connection for all threads.

    Args:
        directory: The store's folder.

    Raises:
        sqlite3.Error: If there is no index, or it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / DATABASE_NAME
        self._identity = self._path.stat()
        self._connection = self._connect()
        self._sql = self._connection.execute

    def is_current(self) -> bool:
        """Whether the file is the one in the folder, and shows what that holds."""
        if not super().is_current():
            return False
        if not self._is_immutable:
            return True
        # SQLite believes what it was told and would go on with the pages it has.
        before = self._identity
        try:
            now = self._path.stat()
        except OSError:
            return False
        return (now.st_mtime_ns, now.st_size) == (before.st_mtime_ns, before.st_size)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _connect(self) -> sqlite3.Connection:
        # A journal that is not there cannot be made in a folder that cannot be
        # written. Then the file alone is all; who can write it changes its time.
        for mode in ("mode=ro", "immutable=1"):
            self._is_immutable = mode == "immutable=1"
            connection = sqlite3.connect(
                f"{self._path.as_uri()}?{mode}",
                uri=True,
                timeout=LOCK_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                connection.execute("SELECT key FROM Cache LIMIT 1").fetchone()
                return connection
            except sqlite3.OperationalError as error:
                connection.close()
                words = ("unable to open", "readonly", "disk I/O error", "is full")
                if self._is_immutable or not any(w in str(error) for w in words):
                    raise
        raise AssertionError("unreachable")
