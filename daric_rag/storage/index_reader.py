"""Questions to a store's index, and a connection that may only ask them."""

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from diskcache.core import DBNAME

from daric_rag.storage.rows import (
    COLUMNS,
    MODE_RECORD,
    MODE_RESERVED,
    RESERVED_KEYS,
    Reservation,
    SegmentRow,
    State,
    decode_rows,
)

__all__ = ["DATABASE_NAME", "LOCK_TIMEOUT_S", "IndexReader", "ReadOnlyDatabase"]

DATABASE_NAME: Final[str] = DBNAME
LOCK_TIMEOUT_S: Final = 10.0


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

    def state(self) -> State:
        """Return how far the index has come."""
        return State(
            *self._sql("SELECT changes, clock, forgotten FROM daric_state").fetchone()
        )

    def total_bytes(self) -> int:
        """Bytes of all records and reservations."""
        query = "SELECT value FROM Settings WHERE key = 'size'"
        return int(self._sql(query).fetchone()[0])

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
        return [Reservation(*row) for row in self._sql(query, bounds)]


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

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _connect(self) -> sqlite3.Connection:
        # A journal that is not there cannot be made in a folder that cannot be
        # written: then nobody else writes it either, and the file alone is all.
        for mode in ("mode=ro", "immutable=1"):
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
                words = ("unable to open", "readonly")
                if mode == "immutable=1" or not any(w in str(error) for w in words):
                    raise
        raise AssertionError("unreachable")
