"""What the disk tier knows of its files without asking: names, sizes, order of use."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from daric_rag.storage.base import TierStats

Count = Literal["hits", "misses", "corrupt", "evicted", "failed_writes"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One record file.

    Attributes:
        filename: Relative to the store's folder.
        nbytes: Length of the file.
        used_ns: Its last use, as kept in its modification time.
    """

    filename: str
    nbytes: int
    used_ns: int


class Catalog:
    """A thread-safe map of entries, least recently used first, with the counters."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._counts: Final[dict[Count, int]] = {
            "hits": 0,
            "misses": 0,
            "corrupt": 0,
            "evicted": 0,
            "failed_writes": 0,
        }
        self._nbytes = 0
        # Used since their modification time was last set.
        self._unsaved: set[bytes] = set()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._nbytes

    def find(self, key: bytes) -> Entry | None:
        """Return an entry without touching it."""
        with self._lock:
            return self._entries.get(key)

    def put(self, key: bytes, filename: str, nbytes: int) -> None:
        """Add or replace an entry as the most recently used one."""
        with self._lock:
            self._pop(key)
            self._entries[key] = Entry(filename, nbytes, time.time_ns())
            self._nbytes += nbytes

    def touch(self, key: bytes, filename: str, used_ns: int) -> bool:
        """Make an entry the most recently used; False if it is not of that file."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.filename != filename:
                return False
            self._entries[key] = Entry(filename, entry.nbytes, used_ns)
            self._entries.move_to_end(key)
            return True

    def touch_later(self, keys: Iterable[bytes], used_ns: int) -> None:
        """Make entries the most recently used, to be saved by `take_unsaved`."""
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    self._entries[key] = Entry(entry.filename, entry.nbytes, used_ns)
                    self._entries.move_to_end(key)
                    self._unsaved.add(key)

    def take_unsaved(self) -> list[Entry]:
        """Return the entries whose use no file shows yet; they count as saved."""
        with self._lock:
            unsaved = [e for k, e in self._entries.items() if k in self._unsaved]
            self._unsaved.clear()
            return unsaved

    def drop(self, key: bytes, filename: str | None = None) -> bool:
        """Remove an entry, only if it is of that file where one is given."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or filename not in (None, entry.filename):
                return False
            self._pop(key)
            return True

    def oldest(self) -> tuple[bytes, Entry] | None:
        """Return the least recently used entry."""
        with self._lock:
            return next(iter(self._entries.items()), None)

    def replace(self, entries: Iterable[tuple[bytes, Entry]]) -> None:
        """Forget all entries and take these, ordered by their last use."""
        ordered = sorted(entries, key=lambda item: item[1].used_ns)
        with self._lock:
            self._entries = OrderedDict(ordered)
            self._nbytes = sum(entry.nbytes for _, entry in ordered)

    def keys(self) -> list[bytes]:
        """A snapshot of the keys, least recently used first."""
        with self._lock:
            return list(self._entries)

    def filenames(self) -> set[str]:
        """A snapshot of the names of all files."""
        with self._lock:
            return {entry.filename for entry in self._entries.values()}

    def count(self, *names: Count) -> None:
        """Raise counters by one."""
        with self._lock:
            for name in names:
                self._counts[name] += 1

    def stats(self, capacity_bytes: int) -> TierStats:
        """A consistent snapshot of the counters."""
        with self._lock:
            return TierStats(
                **self._counts,
                num_records=len(self._entries),
                nbytes=self._nbytes,
                capacity_bytes=capacity_bytes,
            )

    def _pop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._nbytes -= entry.nbytes
