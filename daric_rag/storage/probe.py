"""Asking a store's folder what it holds, without opening a tier on it.

The scheduler and the worker may be two processes: the worker owns the tiers, the
scheduler only has to know whether a record exists that it was never told of, as after
a restart, or when another process saved it.
"""

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import diskcache

from daric_rag.storage.folder import open_cache

__all__ = ["StoreProbe"]


class StoreProbe:
    """One SELECT per question; a wrong answer costs time and nothing else.

    Args:
        directory: The store's folder, made if absent; None for a store without disk.

    Raises:
        StoreError: If the folder cannot be used; the text names the mend.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._cache: Any = None
        if directory is not None:
            self._cache = open_cache(Path(directory).expanduser().absolute())

    def contains(self, key: bytes) -> bool:
        """Whether the folder's index names a record of this key."""
        if self._cache is None:
            return False
        with suppress(sqlite3.Error, diskcache.Timeout):
            return key in self._cache
        return False

    def close(self) -> None:
        """Release the database connection of the calling thread."""
        if self._cache is not None:
            self._cache.close()
