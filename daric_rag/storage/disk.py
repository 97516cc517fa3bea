"""The disk tier: one file per record, found through a diskcache index.

diskcache gives an index that several processes share and that names a file only once
it is whole. What it would do beyond that is switched off (see `folder`).

A hit runs no SQL: names and sizes are kept in memory, the order of use is kept as
the files' modification times, and a name that another process made stale is looked
up again.
"""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import diskcache

from daric_rag.storage.base import Record, TierStats, check_fits
from daric_rag.storage.catalog import Catalog, Entry
from daric_rag.storage.folder import NewRecord, open_cache, remove_orphans, scan
from daric_rag.storage.format import RecordError
from daric_rag.storage.host import BufferPool
from daric_rag.storage.io_pool import ReadPool
from daric_rag.storage.record_file import read_record_file

_logger = logging.getLogger(__name__)

# After a failed write: long enough that a full disk costs nothing, short enough that
# a freed one is used again.
_PAUSE_S: Final = 60.0


class DiskTier:
    """Records on disk, least recently used evicted first.

    Processes may share the folder. Each evicts down to its own budget, counting what
    the others stored; two that write at the same moment may exceed it by a record.
    If the disk is full or read-only, saving pauses with one warning and reads go on.

    A thread that used the tier holds a database connection: it calls `close_thread`
    before it ends (`close` does so for its caller).

    Args:
        directory: A folder of ours, an empty one, or one that can be made.
        capacity_bytes: Budget for record files, headers included.
        pool: Where payload buffers come from; a pool of its own if None.
        num_readers: Threads of `read_many`; by default one per core, at most four.

    Raises:
        StoreError: If the folder cannot be used; the text names the mend.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        pool: BufferPool | None = None,
        num_readers: int | None = None,
    ) -> None:
        self._directory = Path(directory).expanduser().absolute()
        self._capacity_bytes = capacity_bytes
        self._pool = pool or BufferPool()
        self._readers = ReadPool(num_readers)
        self._catalog = Catalog()
        # Serialises what changes files and rows; a hit never waits for it.
        self._changing = threading.RLock()
        self._paused_until = 0.0
        self._cache = open_cache(self._directory)
        self._reload()
        remove_orphans(self._directory, self._catalog.filenames())

    @property
    def directory(self) -> Path:
        """The store's folder, absolute."""
        return self._directory

    @property
    def capacity_bytes(self) -> int:
        """The budget for record files."""
        return self._capacity_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the record files that this process knows of."""
        return self._catalog.nbytes

    def contains(self, key: bytes) -> bool:
        """Whether `read` would probably hit; reads no payload, touches nothing."""
        return bool(self._locate(key))

    def read(self, key: bytes, fingerprint: bytes) -> Record | None:
        """Return a verified record in a buffer of its own; None is a miss."""
        return self.read_many([key], fingerprint)[0]

    def read_many(
        self, keys: Sequence[bytes], fingerprint: bytes
    ) -> list[Record | None]:
        """`read` for several keys, their files side by side, in the keys' order."""
        used_ns = time.time_ns()

        def load(file: tuple[bytes, str]) -> Record | Exception:
            return self._load(*file, fingerprint, used_ns)

        names = {key: self._locate(key) for key in keys}
        files = [(key, name) for key, name in names.items() if name is not None]
        loaded = dict(zip(files, self._readers.map(load, files), strict=True))
        records: dict[bytes, Record | None] = {}
        for key, name in names.items():
            result = None if name is None else loaded[key, name]
            if isinstance(result, FileNotFoundError):
                # Replaced or evicted by another process since its name was learnt.
                self._catalog.drop(key, name)
                name = self._look_up(key)
                result = None if name is None else load((key, name))
            records[key] = self._settle(key, name, result, used_ns)
        return [records[key] for key in keys]

    def write(self, record: Record) -> None:
        """Store a record in a file of its own, or count why not.

        Raises:
            StoreError: If the record exceeds the whole budget.
        """
        check_fits(record, self._capacity_bytes, "disk_bytes")
        with self._changing:
            if time.monotonic() < self._paused_until:
                self._catalog.count("failed_writes")
                return
            new = NewRecord(record)
            try:
                # Before the room is measured: it need not hold both versions.
                if self._catalog.find(record.key) is not None:
                    self.delete(record.key)
                self._make_room(record.record_bytes)
                self._cache.set(record.key, new, read=True)
            except (OSError, sqlite3.Error, diskcache.Timeout) as error:
                self._abandon(new, error)
                return
            self._paused_until = 0.0
            self._catalog.put(record.key, new.filename, record.record_bytes)

    def delete(self, key: bytes) -> None:
        """Delete a record's row and file; a key that is absent is no error."""
        with self._changing:
            self._catalog.drop(key)
            try:
                self._cache.delete(key)
            except (sqlite3.Error, diskcache.Timeout) as error:
                self._roll_back(error)

    def keys(self) -> list[bytes]:
        """The keys this process knows of, least recently used first."""
        return self._catalog.keys()

    def stats(self) -> TierStats:
        """A consistent snapshot of the counters."""
        return self._catalog.stats(self._capacity_bytes)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note a use that another tier served; `flush` tells other processes."""
        self._catalog.touch_later(keys, time.time_ns())

    def flush(self) -> None:
        """Save the order of use; records are in their files since `write`."""
        for entry in self._catalog.take_unsaved():
            with suppress(OSError):
                os.utime(self._directory / entry.filename, ns=(entry.used_ns,) * 2)

    def close_thread(self) -> None:
        """Close the calling thread's database connection; it reopens when needed."""
        self._cache.close()

    def close(self) -> None:
        """End the reading threads and the caller's connection; records stay."""
        self.flush()
        self._readers.close()
        self.close_thread()

    def _locate(self, key: bytes) -> str | None:
        entry = self._catalog.find(key)
        return entry.filename if entry is not None else self._look_up(key)

    def _look_up(self, key: bytes) -> str | None:
        """Ask the index for a record's file; "" is a row that is none of ours."""
        try:
            filename: str | None = self._cache.get(key, read=True)
        except sqlite3.Error as error:
            self._roll_back(error)
            return None
        return filename

    def _load(
        self, key: bytes, filename: str, fingerprint: bytes, used_ns: int
    ) -> Record | Exception:
        """Runs in a reading thread, so it touches neither catalog nor database."""
        if not filename:
            return RecordError("identity", "the row is not one of a record")
        path = self._directory / filename
        allocate = self._pool.allocate
        try:
            return read_record_file(
                path, key, fingerprint, allocate=allocate, used_ns=used_ns
            )
        except (RecordError, OSError) as error:
            return error

    def _settle(
        self,
        key: bytes,
        filename: str | None,
        result: Record | Exception | None,
        used_ns: int,
    ) -> Record | None:
        """Count a read's outcome, keep the order of use, delete what is damaged."""
        if isinstance(result, Record) and filename is not None:
            self._catalog.count("hits")
            if not self._catalog.touch(key, filename, used_ns):
                self._adopt(key, filename, result.record_bytes)
            return result
        self._catalog.count("misses")
        if isinstance(result, RecordError):
            self._catalog.count("corrupt")
        if result is not None:
            _logger.warning("a record could not be read: %s", result)
        if isinstance(result, RecordError | FileNotFoundError) and filename is not None:
            self._delete_damaged(key, filename)
        return None

    def _adopt(self, key: bytes, filename: str, nbytes: int) -> None:
        # Another process stored it, or this one evicted it while we read it.
        with self._changing:
            if self._look_up(key) == filename:
                self._catalog.put(key, filename, nbytes)

    def _delete_damaged(self, key: bytes, filename: str) -> None:
        # Another thread may have written the record anew since we read the old file.
        with self._changing:
            self._catalog.drop(key, filename)
            if self._look_up(key) == filename:
                self.delete(key)

    def _make_room(self, nbytes: int) -> None:
        """Evict until a record of `nbytes` fits beside what all processes stored."""
        limit = self._capacity_bytes - nbytes
        total: int = self._cache.reset("size")
        if total > limit and total != self._catalog.nbytes:
            self._reload()
        while self._catalog.nbytes > limit and (oldest := self._catalog.oldest()):
            key, entry = oldest
            if not self._was_used_elsewhere(key, entry):
                self.delete(key)
                self._catalog.count("evicted")

    def _was_used_elsewhere(self, key: bytes, entry: Entry) -> bool:
        """Whether another process used the oldest record, which then is not oldest."""
        try:
            used_ns = (self._directory / entry.filename).stat().st_mtime_ns
        except OSError:
            return False
        if used_ns <= entry.used_ns:
            return False
        return self._catalog.touch(key, entry.filename, used_ns)

    def _abandon(self, new: NewRecord, error: Exception) -> None:
        self._roll_back(error)
        self._catalog.count("failed_writes")
        if new.filename:
            self._cache.disk.remove(new.filename)
        if isinstance(error, diskcache.Timeout):
            return  # Another process held the lock for long; nothing is wrong.
        if self._paused_until == 0.0:
            _logger.warning(
                "saving to %s is paused (%s): free space or make it writable; "
                "records stay in memory and stored ones stay readable",
                self._directory,
                error,
            )
        self._paused_until = time.monotonic() + _PAUSE_S

    def _roll_back(self, error: Exception) -> None:
        # After a failed COMMIT the connection is still inside its transaction and
        # would refuse the next one; closing it rolls back.
        _logger.debug("the index in %s failed: %s", self._directory, error)
        if isinstance(error, sqlite3.Error):
            self._cache.close()

    def _reload(self) -> None:
        """Learn names, sizes and order of use from the index and the files."""
        entries, broken = scan(self._cache, self._directory)
        self._catalog.replace(entries)
        for key, filename in broken:
            self._delete_damaged(key, filename)
