"""Deleting files and rows, in this order, within a transaction of somebody's."""

from contextlib import suppress
from pathlib import Path

from daric_rag.storage.database import Change, RecordDatabase, Reservation
from daric_rag.storage.record_file import TEMPORARY_SUFFIX
from daric_rag.storage.shared_index import SharedIndex
from daric_rag.storage.writer_lock import is_dead

__all__ = ["NoRoomError", "Removal"]


class NoRoomError(Exception):
    """Nothing more may be evicted.

    Attributes:
        is_passing: Whether records on their way take up room that may come back.
    """

    def __init__(self, *, is_passing: bool) -> None:
        super().__init__("all records are pinned or in use")
        self.is_passing = is_passing


class Removal:
    """A file that cannot be deleted keeps its row, and so its share of the budget.

    Args:
        index: The store's index.
    """

    def __init__(self, index: SharedIndex) -> None:
        self._index = index

    def path(self, filename: str) -> Path:
        """A record's file."""
        return self._index.directory / filename

    def drop(
        self,
        database: RecordDatabase,
        change: Change,
        key: bytes,
        only: str | None = None,
    ) -> int:
        """Delete a record; returns the bytes freed.

        Args:
            database: In a transaction.
            change: That transaction.
            key: May be absent.
            only: Delete it only if it has this file.

        Raises:
            OSError: If the file cannot be deleted.
        """
        broken: list[int] = []
        row = database.find(key, broken)
        database.delete_broken(broken)
        if row is None:
            self._forget(key)
            return 0
        if only is not None and row.filename != only:
            return 0
        # Before the row: else its room would be given away while it is still taken.
        self.unlink(row.filename)
        database.delete(key, change.number)
        self._forget(key)
        return row.nbytes

    def unlink(self, filename: str) -> None:
        """Delete a file if it is there; a folder in its place is no record.

        Raises:
            OSError: If it cannot be deleted.
        """
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self.path(filename).unlink()

    def clear(self, reservation: Reservation) -> bool:
        """Delete what a reservation's writer began; False if something is left."""
        try:
            for suffix in ("", TEMPORARY_SUFFIX):
                self.unlink(reservation.filename + suffix)
        except OSError:
            return False
        return True

    def find_dead(self) -> list[Reservation]:
        """List what dead writers had reserved; changes nothing.

        Raises:
            sqlite3.Error: If the index cannot be read.
        """
        return [
            one
            for one in self._index.reservations()
            if is_dead(self._index.directory, one.writer_id, bury=False)
        ]

    def release_dead(self, database: RecordDatabase) -> list[Reservation]:
        """Give back, in a transaction, what dead writers had reserved."""
        is_dead_id: dict[bytes, bool] = {}
        dead = []
        for reservation in database.reservations():
            writer_id = reservation.writer_id
            if writer_id not in is_dead_id:
                is_dead_id[writer_id] = is_dead(self._index.directory, writer_id)
            if is_dead_id[writer_id] and self.clear(reservation):
                database.release(reservation)
                dead.append(reservation)
        return dead

    def warn(self, error: OSError) -> None:
        """Tell that a file cannot be deleted."""
        self._index.notices.warn(
            "undeletable",
            "a record in %s cannot be deleted (%s): make the folder writable",
            self._index.directory,
            error,
        )

    def _forget(self, key: bytes) -> None:
        self._index.catalog.discard(key)
        self._index.condemned.remove(key)
