"""Following the index: how a process's catalogue becomes what the index is."""

from collections.abc import Iterable
from typing import Final

from daric_rag.storage.catalog import Catalog
from daric_rag.storage.condemned import Condemned
from daric_rag.storage.database import ReadOnlyDatabase, RecordDatabase, State

__all__ = ["Replica"]

_FEW_CHANGES: Final = 100


class Replica:
    """A catalogue and how far it follows the index. Not thread-safe.

    Args:
        catalog: Follows the index, but for condemned records.
        condemned: Records that pass for absent.
    """

    def __init__(self, catalog: Catalog, condemned: Condemned) -> None:
        self._catalog = catalog
        self._condemned = condemned
        # Number of the last change that the catalogue knows; -1: of none.
        self._seen = -1

    def forget(self) -> None:
        """Read all rows the next time."""
        self._seen = -1

    def set_seen(self, number: int) -> None:
        """Note that the catalogue is as a transaction left the index."""
        self._seen = number

    def load(self, database: RecordDatabase | ReadOnlyDatabase) -> None:
        """Read all rows.

        Raises:
            sqlite3.Error, diskcache.Timeout: If the index cannot be read.
        """
        broken: list[int] = []
        state = database.state()
        rows = self._condemned.without(database.rows(broken))
        refused = self._catalog.replace(rows, state.clock)
        self._seen = state.changes
        if (broken or refused) and isinstance(database, RecordDatabase):
            # What is left of them are files without a row, see `reclaiming`.
            with database.changing() as change:
                database.delete_broken(broken)
                for row in refused:
                    database.delete(row.key, change.number)
                self._seen = change.number

    def learn(self, database: RecordDatabase | ReadOnlyDatabase) -> None:
        """Read what changed, or all rows if that is not known any more.

        Raises:
            sqlite3.Error, diskcache.Timeout: If the index cannot be read.
        """
        state = database.state()
        if state.forgotten <= self._seen <= state.changes:
            self._follow(database, state)
        else:
            self.load(database)

    def look_up(
        self, database: RecordDatabase | ReadOnlyDatabase, keys: Iterable[bytes]
    ) -> None:
        """Learn of these records at least, in a short time.

        Raises:
            sqlite3.Error: If the index cannot be read.
        """
        state = database.state()
        if state.forgotten <= self._seen <= state.changes <= self._seen + _FEW_CHANGES:
            self._follow(database, state)
            return
        # To read all rows takes seconds where there are many. `learn` does that.
        for key in keys:
            row = database.find(key, [])
            if row is None or self._condemned.hides(row) or not self._catalog.put(row):
                self._catalog.discard(key)

    def _follow(
        self, database: RecordDatabase | ReadOnlyDatabase, state: State
    ) -> None:
        if state.changes == self._seen:
            return
        for key in database.deleted_since(self._seen):
            self._catalog.discard(key)
        changed = database.changed_since(self._seen, [])
        for row in self._condemned.without(changed):
            self._catalog.put(row)
        self._catalog.advance(state.clock)
        self._seen = state.changes
