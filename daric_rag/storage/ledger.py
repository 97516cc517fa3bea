"""Rows and files of the records, changed together.

Budget: a record's bytes are reserved, in the index, before its file is made, and what
must go for it is deleted before the reservation is committed. So the files never
exceed the budget, whoever writes at the same time, and whoever dies when.
"""

import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from daric_rag.eviction import EvictionPolicy
from daric_rag.storage.database import (
    DATABASE_ERRORS,
    RecordDatabase,
    Reservation,
    SegmentRow,
)
from daric_rag.storage.names import new_record_name
from daric_rag.storage.removal import NoRoomError, Removal
from daric_rag.storage.shared_index import SharedIndex
from daric_rag.storage.writer_lock import WriterLock, bury_dead

__all__ = ["Ledger", "NoRoomError"]

# A few milliseconds' worth: others wait meanwhile.
_USES_PER_TRANSACTION: Final = 200
_DELETIONS_PER_TRANSACTION: Final = 100
# Between such transactions: longer than others sleep until they try again.
_GAP_S: Final = 0.002


class Ledger:
    """Reserves, publishes and deletes records, in one short transaction or several.

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
        self._removal = Removal(index)
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
        return self._removal.path(filename)

    def reserve(self, key: bytes, nbytes: int) -> Reservation | None:
        """Make room for a record, which must be published or abandoned.

        Returns:
            None if the record is there already.

        Raises:
            NoRoomError: If nothing more may be evicted.
            StoreError: If the folder was replaced by one that cannot be used.
            OSError, sqlite3.Error, diskcache.Timeout: If the store cannot be changed.
        """
        self.carry_out()
        while True:
            with self._index.lock:
                reservation, is_over = self._try_to_reserve(key, nbytes)
            if is_over:
                return reservation
            time.sleep(_GAP_S)

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
                known = database.find(row.key, [])
                is_published = known is None and database.publish(
                    reservation, row, change.number
                )
                # Else an index made anew has taken our file for the record's.
                is_other = known is not None and known.filename != reservation.filename
                if is_other and self._removal.clear(reservation):
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
            self._removal.clear(reservation)
            return known is not None

    def abandon(self, reservation: Reservation) -> None:
        """Give a reservation back, now or with the next one."""
        if not self._removal.clear(reservation):
            return  # Its room stays taken until we end.
        with self._index.lock:
            self._abandoned.append(reservation)
            if not self._index.is_current():
                return  # It is gone with its index; let the writer see that, too.
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
                    try:
                        freed += self._removal.drop(database, change, key, only)
                    except OSError as error:
                        self._removal.warn(error)
        return freed

    def carry_out(self) -> None:
        """Delete the records that were found to be unreadable.

        Raises:
            sqlite3.Error, diskcache.Timeout: If the index cannot be written; they are
                deleted the next time.
        """
        while taken := self._index.condemned.take(_DELETIONS_PER_TRANSACTION):
            try:
                for key, filename in taken.items():
                    is_lost = not self.path(filename).exists()
                    if self.remove([key], only=filename) and is_lost:
                        self._index.notices.warn(
                            "lost", "a record's file is gone: %s", filename
                        )
            except BaseException:
                self._index.condemned.put_back(taken)
                raise

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

    def save_uses(self) -> None:
        """Write uses to the rows; learn, and carry out, what is due besides.

        Raises:
            sqlite3.Error, diskcache.Timeout: If the index cannot be written; the uses
                are kept for the next time.
        """
        self._index.learn()
        self.carry_out()
        while taken := self._catalog.take_uses(_USES_PER_TRANSACTION):
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
            return self._removal.find_dead()
        with self._index.changing() as (database, _):
            dead = self._removal.release_dead(database)
        bury_dead(self._directory)
        return dead

    def close(self) -> None:
        """End as a writer."""
        with self._index.lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def _living_writer(self) -> WriterLock:
        if self._writer is not None and not self._writer.is_current():
            self._writer.abandon()
            self._writer = None
        if self._writer is None:
            self._writer = WriterLock(self._directory)
        return self._writer

    def _try_to_reserve(
        self, key: bytes, nbytes: int
    ) -> tuple[Reservation | None, bool]:
        """One transaction of `reserve`; returns its result and if that is final."""
        if self._index.ensure_current():
            self._abandoned.clear()
        writer = self._living_writer()
        reservation, victims, num_evicted = None, None, 0
        is_enough, refused = False, None
        with self._index.changing() as (database, change):
            self._release_abandoned(database)
            broken: list[int] = []
            is_stored = database.find(key, broken) is not None
            database.delete_broken(broken)
            if not is_stored:
                victims, is_enough = self._choose_victims(database, nbytes)
                for victim in victims or ():
                    try:
                        self._removal.drop(database, change, victim)
                        num_evicted += 1
                    except OSError as error:
                        refused = error
                if is_enough and refused is None:
                    reservation = Reservation.make(
                        writer.writer_id, next(self._numbers), new_record_name(), nbytes
                    )
                    database.reserve(reservation)
        self._abandoned.clear()
        self._catalog.count("evicted", num_evicted)
        if refused is not None:
            raise refused
        if victims is None and not is_stored:
            raise NoRoomError(is_passing=bool(self._index.reservations()))
        return reservation, is_stored or is_enough

    def _choose_victims(
        self, database: RecordDatabase, nbytes: int
    ) -> tuple[list[bytes] | None, bool]:
        """What may go at once for so many bytes, and if that is all that must.

        What is dead goes first. None if there is no room to be made.
        """
        limit = _DELETIONS_PER_TRANSACTION
        excess = database.total_bytes() + nbytes - self._capacity_bytes
        if excess > 0:
            excess -= sum(one.nbytes for one in self._removal.release_dead(database))
        # All or nothing: unless there is room in the end, none is to go for it. But
        # what exceeds the budget, if that was larger, goes in any case.
        most = limit + 1 if excess > nbytes else sys.maxsize
        victims = self._catalog.choose_victims(excess, most)
        if victims is None or len(victims) <= limit:
            return victims, victims is not None
        return victims[:limit], False

    def _release_abandoned(self, database: RecordDatabase) -> None:
        for reservation in self._abandoned:
            database.release(reservation)
