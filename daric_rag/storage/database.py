"""The index of a store: diskcache's tables, and all the SQL there is.

A record is a row of diskcache's `Cache` table; its triggers keep the sum of the rows'
sizes, which all processes share. Three columns are ours, and two tables:

| Column or table | What it is                                                      |
|-----------------|-----------------------------------------------------------------|
| daric_priority  | what the record's uses are worth (`eviction`)                   |
| daric_pins      | 1 if it must not be evicted, else 0                             |
| daric_change    | number of the transaction that last changed the row             |
| daric_state     | the last change's number and the logical clock                  |
| daric_deleted   | keys of the latest deletions, with their change's number        |

With the numbers, a process learns what others did since it last asked, at the cost of
what they did. (Row ids would not do: SQLite uses them again, and a row is reserved
long before its record is there.) The numbers are not in diskcache's `Settings`, which
every process that opens a `Cache` writes back as it found them a moment before.

`Cache._sql` and `Cache._transact` are not public; 5.6.3 of 2023 is diskcache's last
release, and the requirement `<6` keeps it that way.
"""

import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import diskcache

from daric_rag.storage.index_reader import (
    DATABASE_NAME,
    FINISHED,
    LOCK_TIMEOUT_S,
    IndexReader,
    ReadOnlyDatabase,
)
from daric_rag.storage.inert_disk import RecordDisk, retrying
from daric_rag.storage.rows import (
    MAX_INT,
    MODE_RECORD,
    MODE_RESERVED,
    Change,
    Reservation,
    SegmentRow,
    State,
    encode_row,
)

__all__ = [
    "DATABASE_ERRORS",
    "DATABASE_NAME",
    "Change",
    "ReadOnlyDatabase",
    "RecordDatabase",
    "Reservation",
    "SegmentRow",
    "State",
]

# Where a name in the index is damaged, not even SQLite's own message can be decoded.
DATABASE_ERRORS: Final = (sqlite3.Error, diskcache.Timeout, UnicodeDecodeError)

# Who sleeps through more deletions than this reads all rows anew.
_NUM_DELETED_KEPT: Final = 100_000


class RecordDatabase(IndexReader, diskcache.Cache):  # type: ignore[misc]
    """An index that may be written, one connection per thread that uses it.

    Args:
        directory: The store's folder, which must exist.

    Raises:
        sqlite3.Error: If there is no such index and none can be made, or it is
            damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / DATABASE_NAME
        try:
            super().__init__(
                str(directory),
                timeout=LOCK_TIMEOUT_S,
                disk=RecordDisk,
                # We evict, byte by byte. Above its limit diskcache would drop values.
                eviction_policy="none",
                cull_limit=0,
                size_limit=MAX_INT,
                statistics=0,
                tag_index=0,
                # A mapped index that somebody truncates would end us by SIGBUS.
                sqlite_mmap_size=0,
            )
            self._add_ours()
            self._identity = self._path.stat()
        except BaseException:
            self.close()
            raise

    @property
    def _sql_retry(self) -> Callable[..., sqlite3.Cursor]:
        # diskcache's own tries for 60 s, and others wait for the folder's lock.
        return retrying(self._sql, LOCK_TIMEOUT_S)

    def try_changes(self) -> None:
        """Run every trigger, which no check looks at; nothing is changed.

        Raises:
            sqlite3.Error, diskcache.Timeout: If one is damaged, or cannot be run now.
        """
        with self.transact():
            for statement in _TRIAL:
                self._sql(statement)

    def finish(self) -> None:
        """Make sure of the sum of all sizes, and say that the index is complete.

        diskcache's triggers keep that sum and nobody ever counts again, but the
        budget rests on it.
        """
        query = (
            "SELECT value, (SELECT TOTAL(size) FROM Cache)"
            " FROM Settings WHERE key = 'size'"
        )
        stored, counted = self._sql(query).fetchone() or (None, None)
        if stored != counted or type(stored) is not int:
            self._sql(
                "INSERT OR REPLACE INTO Settings"
                " SELECT 'size', CAST(TOTAL(size) AS INTEGER) FROM Cache"
            )
        if not self.is_finished():
            self._sql(f"PRAGMA user_version = {FINISHED}")

    @contextmanager
    def changing(self) -> Iterator[Change]:
        """One short transaction, numbered; other processes wait for its end.

        Raises:
            sqlite3.Error: If the index cannot be written; nothing has changed then.
            diskcache.Timeout: If another process did not let go of it.
        """
        try:
            with ExitStack() as transaction:
                self._begin(transaction)
                state = self.state()
                change = Change(state.changes + 1, state.clock)
                yield change
                self._sql(
                    "UPDATE daric_state SET changes = ?, clock = ?",
                    (change.number, change.clock),
                )
                self._forget_deleted(state)
        except (sqlite3.Error, UnicodeDecodeError):
            # After a failed COMMIT the connection is still inside its transaction
            # and would refuse the next one; closing it rolls back.
            self.close()
            raise

    def reserve(self, reservation: Reservation) -> None:
        """Add a reservation's row."""
        self._sql(
            "INSERT INTO Cache(key, raw, store_time, mode, filename, size)"
            " VALUES (?, 1, ?, ?, ?, ?)",
            (
                reservation.key,
                time.time(),
                MODE_RESERVED,
                reservation.filename,
                reservation.nbytes,
            ),
        )

    def publish(self, reservation: Reservation, row: SegmentRow, number: int) -> bool:
        """Turn a reservation into its record's row; False if it is gone."""
        values = (row.key, *encode_row(row, number), reservation.key)
        query = f"UPDATE Cache SET key = ?, {_ASSIGNED} WHERE key = ? AND raw = 1"
        return bool(self._sql(query, values).rowcount)

    def insert(self, row: SegmentRow, number: int) -> bool:
        """Add a record's row; False if the key has one."""
        names = _ASSIGNED.replace(" = ?", "")
        marks = "?, " * (1 + names.count(","))
        query = f"INSERT OR IGNORE INTO Cache(raw, {names}, key) VALUES (1, {marks}?)"
        return bool(self._sql(query, (*encode_row(row, number), row.key)).rowcount)

    def delete(self, key: bytes, number: int) -> None:
        """Delete a record's row, whatever it holds."""
        if self._sql("DELETE FROM Cache WHERE key = ? AND raw = 1", (key,)).rowcount:
            self._sql("INSERT INTO daric_deleted VALUES (?, ?)", (number, key))

    def release(self, reservation: Reservation) -> None:
        """Delete a reservation's row."""
        query = "DELETE FROM Cache WHERE key = ? AND raw = 1 AND mode = ?"
        self._sql(query, (reservation.key, MODE_RESERVED))

    def delete_broken(self, rowids: Iterable[int]) -> None:
        """Delete rows that are not ours; their files, if any, are left alone."""
        for rowid in rowids:
            self._sql("DELETE FROM Cache WHERE rowid = ?", (rowid,))

    def save_use(self, row: SegmentRow, number: int) -> None:
        """Save a record's use: time, count and priority."""
        self._sql(
            "UPDATE Cache SET access_time = ?, access_count = ?, daric_priority = ?,"
            " daric_change = ? WHERE key = ? AND raw = 1",
            (row.last_used, row.uses, row.priority, number, row.key),
        )

    def set_pinned(self, key: bytes, pinned: bool, number: int) -> bool:
        """Pin or unpin a record; returns whether that changed anything."""
        query = (
            "UPDATE Cache SET daric_pins = ?, daric_change = ?"
            " WHERE key = ? AND raw = 1 AND mode = ? AND daric_pins != ?"
        )
        values = (pinned, number, key, MODE_RECORD, pinned)
        return bool(self._sql(query, values).rowcount)

    def shrink_journal(self) -> None:
        """Give the journal's space back, which it would keep for its next use."""
        self._sql("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def sync(self) -> None:
        """Return when what was committed survives a power cut."""
        with suppress(FileNotFoundError):
            # SQLite holds no locks on this file, so that closing it drops none. On
            # cache.db itself it would drop those of the whole process.
            file = os.open(f"{self._path}-wal", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(file)
            finally:
                os.close(file)

    def _begin(self, transaction: ExitStack) -> None:
        # SQLite's own waiting sleeps ever longer, up to 100 ms: among four writers
        # whose transactions take less than one, somebody always comes too late.
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        self._sql("PRAGMA busy_timeout = 0")
        try:
            while True:
                try:
                    transaction.enter_context(self.transact())
                    return
                except diskcache.Timeout as error:
                    # diskcache calls whatever goes wrong at BEGIN a timeout.
                    cause = error.__context__
                    if isinstance(cause, sqlite3.Error) and "locked" not in str(cause):
                        raise cause from None
                    if time.monotonic() > deadline:
                        raise
                time.sleep(random.uniform(0.0002, 0.001))
        finally:
            self._sql(f"PRAGMA busy_timeout = {round(LOCK_TIMEOUT_S * 1000)}")

    def _forget_deleted(self, state: State) -> None:
        # In steps, as each costs a walk over what it forgets.
        bound = state.changes - _NUM_DELETED_KEPT
        if bound > state.forgotten + _NUM_DELETED_KEPT // 10:
            self._sql("DELETE FROM daric_deleted WHERE change <= ?", (bound,))
            self._sql("UPDATE daric_state SET forgotten = ?", (bound,))

    def _add_ours(self) -> None:
        columns = {row[1] for row in self._sql("PRAGMA table_info(Cache)")}
        if "daric_change" in columns:
            return
        with self.transact():
            columns = {row[1] for row in self._sql("PRAGMA table_info(Cache)")}
            if "daric_change" not in columns:
                for statement in _CREATE_OURS:
                    self._sql(statement)


_ASSIGNED: Final = (
    "store_time = ?, mode = ?, filename = ?, size = ?, value = ?, access_time = ?,"
    " access_count = ?, daric_priority = ?, daric_pins = ?, daric_change = ?"
)

_TRIAL: Final = (
    "INSERT INTO Cache(key, raw, size) VALUES ('', 1, 0)",
    "UPDATE Cache SET size = 1 WHERE key = ''",
    "DELETE FROM Cache WHERE key = ''",
)

_CREATE_OURS: Final = (
    "ALTER TABLE Cache ADD COLUMN daric_priority INTEGER DEFAULT 0",
    "ALTER TABLE Cache ADD COLUMN daric_pins INTEGER DEFAULT 0",
    "ALTER TABLE Cache ADD COLUMN daric_change INTEGER DEFAULT 0",
    "CREATE INDEX daric_changes ON Cache(daric_change)",
    "CREATE TABLE daric_deleted (change INTEGER, key BLOB)",
    "CREATE INDEX daric_deletions ON daric_deleted(change)",
    "CREATE TABLE daric_state (changes INTEGER, clock INTEGER, forgotten INTEGER)",
    "INSERT INTO daric_state VALUES (0, 0, 0)",
)
