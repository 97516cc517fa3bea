"""Records that were found to be unreadable and wait for their deletion."""

import threading
from collections.abc import Iterable, Iterator

from daric_rag.storage.rows import SegmentRow

__all__ = ["Condemned"]


class Condemned:
    """A thread-safe list of them, so that whoever reads need not wait for the index.

    Until its file or its row is another one, such a record passes for absent.
    """

    def __init__(self) -> None:
        self._files: dict[bytes, str] = {}
        self._waiting: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def add(self, key: bytes, filename: str) -> None:
        """Hide a record as long as it has this file, and have it deleted."""
        with self._lock:
            self._files[key] = self._waiting[key] = filename

    def remove(self, key: bytes) -> None:
        """Note that a record is deleted; harmless if it was not condemned."""
        if key in self._files:
            with self._lock:
                self._files.pop(key, None)
                self._waiting.pop(key, None)

    def take(self, limit: int) -> dict[bytes, str]:
        """Return keys and files to be deleted, each once; they stay hidden."""
        with self._lock:
            taken: dict[bytes, str] = {}
            while self._waiting and len(taken) < limit:
                key, filename = self._waiting.popitem()
                taken[key] = filename
            return taken

    def put_back(self, taken: dict[bytes, str]) -> None:
        """Undo `take`."""
        with self._lock:
            self._waiting = taken | self._waiting

    def hides(self, row: SegmentRow) -> bool:
        """Whether a row is that of a condemned record."""
        return self._files.get(row.key) == row.filename

    def without(self, rows: Iterable[SegmentRow]) -> Iterator[SegmentRow]:
        """Leave out the rows of condemned records."""
        return (row for row in rows if not self.hides(row))
