"""diskcache without its serialisation."""

from typing import Any

import diskcache

from daric_rag.errors import StoreError

__all__ = ["RecordDisk"]


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
