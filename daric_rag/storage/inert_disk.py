"""diskcache without its serialisation and its endless patience."""

import sqlite3
import time
from collections.abc import Callable
from typing import Any

import diskcache

from daric_rag.errors import StoreError

__all__ = ["RecordDisk", "retrying"]


class RecordDisk(diskcache.Disk):  # type: ignore[misc]
    """diskcache's serialisation, switched off: nothing is ever pickled or followed.

    The default class unpickles what it finds (advisory GHSA-w8v5-vhqr-4h9v) and
    opens and deletes whatever path a row names. Rows and files are ours.
    """

    def put(self, key: object) -> tuple[object, bool]:
        """Refuse."""
        raise StoreError("records are stored by DiskTier.write only")

    def get(self, key: object, raw: object) -> bytes:
        """Return nothing of what the row holds."""
        return b""

    def store(self, value: object, read: bool, key: object = None) -> Any:
        """Refuse."""
        raise StoreError("records are stored by DiskTier.write only")

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        """Return nothing of what the row names."""
        return b""

    def remove(self, file_path: object) -> None:
        """Leave the file alone."""


def retrying(
    execute: Callable[..., sqlite3.Cursor], timeout_s: float
) -> Callable[..., sqlite3.Cursor]:
    """Repeat a statement while the index is locked.

    SQLite itself does not wait where a lock that is held is to be a stronger one.
    """

    def retry(*args: object) -> sqlite3.Cursor:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return execute(*args)
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.001)

    return retry
