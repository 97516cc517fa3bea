"""Asking a store's folder what it holds, without opening a tier on it.

The scheduler and the worker may be two processes: the worker owns the tiers, the
scheduler only has to know whether a record exists that it was never told of, as after
a restart, or when another process saved it.
"""

import os
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from daric_rag.storage.database import ReadOnlyDatabase
from daric_rag.storage.folder import check_folder

__all__ = ["StoreProbe"]


class StoreProbe:
    """One SELECT per question; a wrong answer costs time and nothing else.

    It never writes, and needs no key. The index may come, go and be replaced.

    Args:
        directory: The store's folder, made if absent; None for a store without disk.

    Raises:
        StoreError: If the folder cannot be used; the text names the mend.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory: Path | None = None
        self._database: ReadOnlyDatabase | None = None
        self._lock = threading.Lock()
        if directory is not None:
            self._directory = Path(directory).expanduser().absolute()
            check_folder(self._directory)

    def contains(self, key: bytes) -> bool:
        """Whether the folder's index names a record of this key."""
        return self.contains_all([key])

    def contains_all(self, keys: Iterable[bytes]) -> bool:
        """Whether the folder's index names a record of every one of these keys."""
        if self._directory is None:
            return False
        with self._lock:
            try:
                if self._database is not None and not self._database.is_current():
                    self._close()
                if self._database is None:
                    self._database = ReadOnlyDatabase(self._directory)
                return all(map(self._database.contains, keys))
            except (OSError, sqlite3.Error):
                self._close()
                return False

    def close(self) -> None:
        """Release the database connection; it reopens when needed."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()
