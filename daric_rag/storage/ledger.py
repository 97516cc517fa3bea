"""Rows and files of the records, changed together.

Budget: a record's bytes are reserved, in the index, before its file is made, and what
must go for it is deleted before the reservation is committed. So the files never
exceed the budget, whoever writes at the same time, and whoever dies when.
"""

import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from daric_rag.eviction import EvictionPolicy
from daric_rag.storage.database import (
    DATABASE_ERRORS,
    Change,
    RecordDatabase,
    Reservation,
    SegmentRow,
)
from daric_rag.storage.names import new_record_name
from daric_rag.storage.record_file import TEMPORARY_SUFFIX
from daric_rag.storage.shared_index import SharedIndex
from daric_rag.storage.writer_lock import WriterLock, bury_dead, is_dead

__all__ = ["Ledger", "NoRoomError"]

# A few milliseconds' worth: others wait meanwhile.
_USES_PER_TRANSACTION: Final = 200
_DELETIONS_PER_TRANSACTION: Final = 100


class NoRoomError(Exception):
    """Nothing more may be evicted.

    Attributes:
        is_passing: Whether records on their way take up room that may come back.
    """

    def __init__(self, *, is_passing: bool) -> None:
        super().__init__("all records are pinned or in use")
        self.is_passing = is_passing


class Ledger:
    """Reserves, publishes and deletes records. A method is a short transaction or some.

    Args:
        index: The store's index.
        capacity_bytes: The budget of this process.
        policy: What uses are worth.
    """

    def __init__(
        self, index: SharedIndex, capacity_bytes: int, policy: EvictionPolicy
    ) -> None:
        self._index = index
        self._catalog = index.catalog
        self._directory = index.directory
        self._capacity_bytes = capacity_bytes
        self._policy = policy
        self._writer: WriterLock | None = None
        self._numbers = itertools.count()
        # Reservations that could not be given back at once.
        self._abandoned: list[Reservation] = []
        with suppress(*DATABASE_ERRORS):
            self.reclaim_dead()

    def path(self, filename: str) -> Path:
        """A record's file."""
        return self._directory / filename

    def reserve(self, key: bytes, nbytes: int) -> Reservation | None:
        """Make room for a record, which must be published or abandoned.

        Returns:
            None if the record is there already.

        Raises:
            NoRoomError: If nothing more may be evicted.
            StoreError: If the folder was replaced by one that cannot be used.
            OSError, sqlite3.Error, diskcache.Timeout: If the store cannot be changed.
        """
        with self._index.lock:
            if self._index.ensure_current():
                self._abandoned.clear()
            writer = self._living_writer()
            is_stored, victims = False, None
            with self._index.changing() as (database, change):
                self._release_abandoned(database)
                broken: list[int] = []
                is_stored = database.find(key, broken) is not None
                database.delete_broken(broken)
                if not is_stored:
                    victims = self._choose_victims(database, nbytes)
                if victims is not None:
                    for victim in victims:
                        self._remove(database, change, victim)
                    reservation = Reservation.make(
                        writer.writer_id, next(self._numbers), new_record_name(), nbytes
                    )
                    database.reserve(reservation)
            self._abandoned.clear()
            if is_stored:
                return None
            if victims is None:
                raise NoRoomError(is_passing=bool(self._index.reservations()))
            self._catalog.count("evicted", len(victims))
            return reservation

    def publish(self, reservation: Reservation, row: SegmentRow) -> bool:
        """Give a reservation's file to its record.

        If another process has stored the same record meanwhile, ours is dropped.

        Returns:
            False if folder or reservation are gone: the record is not stored.
        """
        with self._index.lock:
            with self._index.changing() as (database, change):
                change.clock = self._catalog.advance(change.clock) + 1 + row.nbytes
                row = replace(row, priority=self._policy.first(change.clock))
                is_known = database.contains(row.key)
                is_published = not is_known and database.publish(
                    reservation, row, change.number
                )
                if is_known:
                    self._unlink(reservation.filename)
                    database.release(reservation)
            # A row in an index that nobody can open any more is none.
            if is_published and self._index.is_current():
                self._catalog.advance(change.clock)
                self._catalog.put(row)
                return True
            # It may have been made anew from the files, ours among them.
            self._index.ensure_current()
            if self._catalog.find(row.key) == reservation.filename:
                return True
            self._unlink(reservation.filename)
            return is_known

    def abandon(self, reservation: Reservation) -> None:
        """Give a reservation back, now or with the next one."""
        for suffix in ("", TEMPORARY_SUFFIX):
            self._unlink(reservation.filename + suffix)
        with self._index.lock:
            self._abandoned.append(reservation)
            with suppress(*DATABASE_ERRORS):
                with self._index.changing() as (database, _):
                    self._release_abandoned(database)
                self._abandoned.clear()

    def remove(self, keys: Iterable[bytes], *, only: str | None = None) -> int:
        """Delete records, files and rows.

        Args:
            keys: In this order; those that are absent are no error.
            only: Delete only what still has this file.

        Returns:
            Bytes freed.

        Raises:
            sqlite3.Error, diskcache.Timeout: If the index cannot be written.
        """
        freed = 0
        pending = iter(keys)
        while batch := list(itertools.islice(pending, _DELETIONS_PER_TRANSACTION)):
            with self._index.changing() as (database, change):
                for key in batch:
                    freed += self._remove(database, change, key, only)
        return freed

    def set_pinned(self, keys: Sequence[bytes], pinned: bool) -> int:
        """Pin or unpin records; returns how many rows changed.

        Raises:
            sqlite3.Error, diskcache.Timeout: If the index cannot be written.
        """
        num_changed = 0
        with self._index.changing() as (database, change):
            for key in keys:
                if database.set_pinned(key, pinned, change.number):
                    num_changed += 1
                    row = database.find(key, [])
                    if row is not None:
                        self._catalog.put(row)
        return num_changed

    def save_uses(self, max_records: int | None = None) -> None:
        """Write uses to the rows.

        Args:
            max_records: Stop after so many; None for all.

        Raises:
            sqlite3.Error, diskcache.Timeout: If the index cannot be written; the uses
                are kept for the next time.
        """
        num_left = 1 << 62 if max_records is None else max_records
        while num_left > 0:
            taken = self._catalog.take_uses(min(num_left, _USES_PER_TRANSACTION))
            if not taken:
                return
            num_left -= len(taken)
            try:
                with self._index.changing() as (database, change):
                    change.clock = self._catalog.advance(change.clock)
                    for key, uses in taken.items():
                        row = database.find(key, [])
                        if row is not None:
                            row = self._catalog.joined(row, uses)
                            database.save_use(row, change.number)
                            self._catalog.put(row)
            except BaseException:
                self._catalog.put_back(taken)
                raise

    def reclaim_dead(self, *, dry_run: bool = False) -> list[Reservation]:
        """Give back what dead writers had reserved; returns that.

        Raises:
            sqlite3.Error, diskcache.Timeout: If the index cannot be written.
        """
        if dry_run:
            return [
                one
                for one in self._index.reservations()
                if is_dead(self._directory, one.writer_id, bury=False)
            ]
        with self._index.changing() as (database, _):
            dead = self._release_dead(database)
        bury_dead(self._directory)
        return dead

    def close(self) -> None:
        """End as a writer."""
        with self._index.lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def _living_writer(self) -> WriterLock:
        if self._writer is None or not self._writer.is_current():
            self._writer = WriterLock(self._directory)
        return self._writer

    def _choose_victims(
        self, database: RecordDatabase, nbytes: int
    ) -> list[bytes] | None:
        """What must go for so many bytes, after what is dead; None: it cannot be."""
        excess = database.total_bytes() + nbytes - self._capacity_bytes
        if excess > 0:
            excess -= sum(one.nbytes for one in self._release_dead(database))
        return self._catalog.choose_victims(excess)

    def _release_dead(self, database: RecordDatabase) -> list[Reservation]:
        is_dead_id: dict[bytes, bool] = {}
        dead = []
        for reservation in database.reservations():
            writer_id = reservation.writer_id
            if writer_id not in is_dead_id:
                is_dead_id[writer_id] = is_dead(self._directory, writer_id)
            if is_dead_id[writer_id]:
                for suffix in ("", TEMPORARY_SUFFIX):
                    self._unlink(reservation.filename + suffix)
                database.release(reservation)
                dead.append(reservation)
        return dead

    def _release_abandoned(self, database: RecordDatabase) -> None:
        for reservation in self._abandoned:
            database.release(reservation)

    def _remove(
        self,
        database: RecordDatabase,
        change: Change,
        key: bytes,
        only: str | None = None,
    ) -> int:
        broken: list[int] = []
        row = database.find(key, broken)
        database.delete_broken(broken)
        if row is None:
            self._catalog.discard(key)
            return 0
        if only is not None and row.filename != only:
            return 0
        # Before the row: else its room would be given away while it is still taken.
        self._unlink(row.filename)
        database.delete(key, change.number)
        self._catalog.discard(key)
        return row.nbytes

    def _unlink(self, filename: str) -> None:
        with suppress(OSError):
            self.path(filename).unlink()
