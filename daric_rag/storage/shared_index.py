"""The index that processes share, and this process's replica of it.

A transaction that changes records has a number. Before each of its own, and whenever
it is asked for a record it does not know, a process reads the rows that changed and
the keys that were deleted since the number it knows; so its catalogue is what the
index was at that number, and eviction decides on all processes' uses and pins.
"""

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from daric_rag.eviction import EvictionPolicy
from daric_rag.storage.catalog import Catalog
from daric_rag.storage.database import (
    DATABASE_ERRORS,
    Change,
    ReadOnlyDatabase,
    RecordDatabase,
    Reservation,
    SegmentRow,
)
from daric_rag.storage.folder import open_database, open_read_only
from daric_rag.storage.notices import Notices

__all__ = ["SharedIndex"]

_logger = logging.getLogger(__name__)


class SharedIndex:
    """Index and catalogue; `lock` is held for a transaction, never for file contents.

    Args:
        directory: The store's folder, absolute.
        policy: What uses are worth.
        key_id: Of the key that records are sealed with.

    Raises:
        StoreError: If the folder cannot be used; the text names the mend.
    """

    def __init__(
        self, directory: Path, policy: EvictionPolicy, key_id: str | None
    ) -> None:
        self.directory: Final = directory
        self.catalog: Final = Catalog(policy)
        self.notices: Final = Notices(_logger)
        self.lock: Final = threading.RLock()
        self._key_id = key_id
        # Number of the last change that the catalogue knows; -1: of none.
        self._seen = -1
        self._is_damaged = False
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
        filename = self.catalog.find(key)
        if filename is None:
            self.learn()
            filename = self.catalog.find(key)
        return filename

    def learn(self) -> None:
        """Follow what other processes changed; an index in trouble changes nothing."""
        with self.lock:
            try:
                self._learn()
            except DATABASE_ERRORS as error:
                self._give_up(error)

    def rows(self) -> list[SegmentRow]:
        """All records, as the index has them.

        Raises:
            sqlite3.Error: If it cannot be read.
        """
        with self.lock:
            return list(self._database.rows([]))

    def reservations(self) -> list[Reservation]:
        """What writers have reserved and not yet published.

        Raises:
            sqlite3.Error: If the index cannot be read.
        """
        with self.lock:
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
                    self._seen = -1
                raise
            self._seen = change.number

    def ensure_current(self) -> bool:
        """Open the folder anew if it, or its index, was replaced or is damaged.

        Returns:
            Whether it was.

        Raises:
            StoreError: If it cannot be used any more.
        """
        if self._database.is_current() and not self._is_damaged:
            return False
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
                self.directory, self._key_id, self._load, anew=self._is_damaged
            )
            self._is_damaged = False
        except Exception as error:
            self._database = open_read_only(self.directory, self._key_id, error)
            with suppress(*DATABASE_ERRORS):
                self._load(self._database)
            self.notices.warn(
                "read-only",
                "the store in %s can only be read (%s): nothing is saved until it can "
                "be written and is opened again",
                self.directory,
                error,
            )

    def _load(self, database: RecordDatabase | ReadOnlyDatabase) -> None:
        broken: list[int] = []
        state = database.state()
        refused = self.catalog.replace(database.rows(broken), state.clock)
        self._seen = state.changes
        if (broken or refused) and isinstance(database, RecordDatabase):
            # What is left of them are files without a row, see `reclaiming`.
            with database.changing() as change:
                database.delete_broken(broken)
                for row in refused:
                    database.delete(row.key, change.number)
                self._seen = change.number

    def _learn(self) -> None:
        state = self._database.state()
        if state.changes == self._seen:
            return
        if not state.forgotten <= self._seen <= state.changes:
            self._load(self._database)
            return
        for key in self._database.deleted_since(self._seen):
            self.catalog.discard(key)
        for row in self._database.changed_since(self._seen, []):
            self.catalog.put(row)
        self.catalog.advance(state.clock)
        self._seen = state.changes

    def _give_up(self, error: BaseException) -> None:
        if not isinstance(error, DATABASE_ERRORS):
            return
        _logger.debug("the index in %s failed: %s", self.directory, error)
        # The class itself, see `folder`: the next write makes it anew.
        if type(error) is sqlite3.DatabaseError:
            self._is_damaged = True
        self.close_thread()
