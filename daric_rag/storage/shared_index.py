"""The index that processes share, and this process's replica of it.

A transaction that changes records has a number. Before each of its own, a process
reads the rows that changed and the keys that were deleted since the number it knows;
so its catalogue is what the index was at that number, and eviction decides on all
pins, and on all uses that were saved. It does so too when it is asked for a record that
it does not know, if that is quickly done.
"""

import logging
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from daric_rag.errors import StoreError
from daric_rag.eviction import EvictionPolicy
from daric_rag.storage.catalog import Catalog
from daric_rag.storage.condemned import Condemned
from daric_rag.storage.database import (
    DATABASE_ERRORS,
    Change,
    ReadOnlyDatabase,
    RecordDatabase,
    Reservation,
    SegmentRow,
)
from daric_rag.storage.folder import open_database, open_read_only
from daric_rag.storage.index_faults import has_room, is_damage
from daric_rag.storage.notices import Notices
from daric_rag.storage.replica import Replica

__all__ = ["SharedIndex"]

_logger = logging.getLogger(__name__)

# A transaction of one record takes less.
_PATIENCE_S: Final = 0.002


class SharedIndex:
    """Index and catalogue; `lock` is held for a transaction, never for file contents.

    Args:
        directory: The store's folder, absolute.
        policy: What uses are worth.
        key_id: Of the key that records are sealed with.
        sweeps: As in `open_database`.

    Raises:
        StoreError: If the folder cannot be used; the text names the mend.
    """

    def __init__(
        self,
        directory: Path,
        policy: EvictionPolicy,
        key_id: str | None,
        *,
        sweeps: bool = True,
    ) -> None:
        self.directory: Final = directory
        self.catalog: Final = Catalog(policy)
        self.notices: Final = Notices(_logger)
        self.condemned: Final = Condemned()
        self.lock: Final = threading.RLock()
        self._key_id, self._sweeps = key_id, sweeps
        self._replica = Replica(self.catalog, self.condemned)
        self._is_damaged = False
        self._is_busy = False
        self._is_full = False
        self._database: RecordDatabase | ReadOnlyDatabase
        self._open()

    @property
    def read_only(self) -> bool:
        """Whether the folder could only be opened for reading."""
        return isinstance(self._database, ReadOnlyDatabase)

    def is_current(self) -> bool:
        """Whether the index is still the one in the folder."""
        return self._database.is_current()

    def find(self, key: bytes) -> str | None:
        """Return a record's file name; asks the index if the catalogue lacks it."""
        return self.find_many([key])[key]

    def find_many(self, keys: Iterable[bytes]) -> dict[bytes, str | None]:
        """`find` for several keys."""
        names = {key: self.catalog.find(key) for key in keys}
        unknown = [key for key, name in names.items() if name is None]
        if unknown and self.look_up(unknown):
            names |= {key: self.catalog.find(key) for key in unknown}
        return names

    def look_up(self, keys: Iterable[bytes]) -> bool:
        """Learn what became of a few records, if that can be had at once.

        A request waits for the answer, and a wrong one costs a recomputation: while
        this process changes the index, or waits until it may, nothing is learnt.

        Returns:
            Whether it was asked.
        """
        # Once somebody has waited in vain, nobody does until the index is free again:
        # a request asks for hundreds of records.
        if not self.lock.acquire(timeout=0.0 if self._is_busy else _PATIENCE_S):
            self._is_busy = True
            return False
        try:
            self._is_busy = False
            self._look_up(keys)
        except DATABASE_ERRORS as error:
            self._give_up(error)
        finally:
            self.lock.release()
        return True

    def learn(self) -> None:
        """Follow what other processes changed, whatever it takes.

        An index that was replaced or is damaged is opened anew; one in trouble
        changes nothing.
        """
        with self.lock:
            try:
                self._keep_current()
                self._learn()
            except DATABASE_ERRORS as error:
                self._give_up(error)

    def rows(self) -> list[SegmentRow]:
        """All records, as the index has them.

        Raises:
            sqlite3.Error: If it cannot be read.
        """
        with self.lock:
            self._keep_current()
            return list(self._database.rows([]))

    def reservations(self) -> list[Reservation]:
        """What writers have reserved and not yet published.

        Raises:
            sqlite3.Error: If the index cannot be read.
        """
        with self.lock:
            self._keep_current()
            return self._database.reservations()

    @contextmanager
    def changing(self) -> Iterator[tuple[RecordDatabase, Change]]:
        """A transaction that begins with all that others did.

        Whoever changes rows changes the catalogue too. If the transaction fails, the
        catalogue is read anew, for files may be gone whose rows are not.

        Raises:
            sqlite3.Error, diskcache.Timeout: If the index cannot be written.
        """
        with self.lock:
            self._keep_current()
            database = self._database
            if isinstance(database, ReadOnlyDatabase):
                raise sqlite3.OperationalError("attempt to write a readonly database")
            has_begun = False
            try:
                # Most of it before others have to wait, for it may be a lot.
                self._learn()
                with database.changing() as change:
                    self._learn()
                    has_begun = True
                    yield database, change
            except BaseException as error:
                self._give_up(error)
                if has_begun:
                    self._replica.forget()
                raise
            self._replica.set_seen(change.number)

    def ensure_current(self) -> bool:
        """Open the folder anew if it, or its index, was replaced or is damaged.

        Returns:
            Whether it was.

        Raises:
            StoreError: If it cannot be used any more.
        """
        if self._database.is_current() and not self._is_damaged:
            return False
        if self.read_only and not self._is_damaged:
            with self.lock:
                return self._reopen_for_reading()
        if not self._is_damaged:
            self.notices.warn(
                "replaced",
                "the store in %s was deleted or replaced while in use: it is opened "
                "anew",
                self.directory,
            )
        with self.lock:
            self._database.close()
            self._open()
        return True

    def sync(self) -> None:
        """Return when what was committed survives a power cut."""
        if isinstance(self._database, RecordDatabase):
            self._database.sync()

    def shrink_journal(self) -> None:
        """Leave more room on a full disk, if that is possible."""
        with self.lock, suppress(*DATABASE_ERRORS):
            if isinstance(self._database, RecordDatabase):
                self._database.shrink_journal()

    def make_room(self, keys: Iterable[bytes]) -> bool:
        """Whether the index can be written; on a full disk, once records have gone.

        A row takes room to delete: of these records, as many files as it takes go
        first.

        Raises:
            StoreError: If the store cannot be used any more.
        """
        if not self.read_only or not self._is_full:
            return not self.read_only
        with self.lock:
            for name in filter(None, map(self.catalog.find, keys)):
                if has_room(self.directory):
                    break
                with suppress(OSError):
                    (self.directory / name).unlink()
            self._database.close()
            self._open()
        return not self.read_only

    def close_thread(self) -> None:
        """Close the calling thread's connection; it reopens when needed."""
        if isinstance(self._database, RecordDatabase):
            self._database.close()

    def close(self) -> None:
        """Close the caller's connection; one that only reads is everybody's."""
        self._database.close()

    def _open(self) -> None:
        try:
            self._database = open_database(
                self.directory,
                self._key_id,
                self._replica.load,
                anew=self._is_damaged,
                sweeps=self._sweeps,
            )
            self._is_damaged = False
        except Exception as error:
            self._database = open_read_only(self.directory, self._key_id, error)
            with suppress(*DATABASE_ERRORS):
                self._replica.load(self._database)
            self._is_full = not has_room(self.directory)
            self.notices.warn(
                "read-only",
                "the store in %s can only be read (%s): nothing is saved until it can "
                "be written and is opened again",
                self.directory,
                error,
            )

    def _keep_current(self) -> None:
        try:
            self.ensure_current()
        except StoreError as error:
            raise sqlite3.OperationalError(str(error)) from error

    def _reopen_for_reading(self) -> bool:
        try:
            database = ReadOnlyDatabase(self.directory)
        except (OSError, sqlite3.Error):
            return False
        self._database.close()
        if not self._database.is_same_file(database):
            self._replica.forget()
        self._database = database
        return True

    def _look_up(self, keys: Iterable[bytes]) -> None:
        if self.read_only and not self._database.is_current():
            self._reopen_for_reading()
        self._replica.look_up(self._database, keys)

    def _learn(self) -> None:
        self._replica.learn(self._database)

    def _give_up(self, error: BaseException) -> None:
        if not isinstance(error, DATABASE_ERRORS):
            return
        _logger.debug("the index in %s failed: %s", self.directory, error)
        if is_damage(error):
            self._is_damaged = True  # The next write makes it anew.
        self.close_thread()
