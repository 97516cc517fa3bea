"""Writing records to disk, and what happens when that fails."""

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

import diskcache

from daric_rag.errors import StoreError
from daric_rag.storage.base import Record, check_fits
from daric_rag.storage.cipher import RecordCipher
from daric_rag.storage.database import DATABASE_ERRORS, Reservation, SegmentRow
from daric_rag.storage.format import RecordError, RecordHeader
from daric_rag.storage.ledger import Ledger, NoRoomError
from daric_rag.storage.new_file import DirectWriter, write_cached
from daric_rag.storage.record_file import (
    file_len,
    read_header,
    seal_side_data,
    write_record_file,
)
from daric_rag.storage.shared_index import SharedIndex
from daric_rag.storage.syncing import sync, sync_file_system

__all__ = ["Saver"]

_logger = logging.getLogger(__name__)

# After a failed write: long enough that a full disk costs nothing, short enough that
# a freed one is used again.
_PAUSE_S: Final = 60.0
# Finding out that nothing may be evicted takes a look at everything.
_NO_ROOM_PAUSE_S: Final = 5.0
# For room that other writers' records on their way take up.
_ROOM_TIMEOUT_S: Final = 2.0
_ROOM_POLL_S: Final = 0.005
# Others may evict what was used here and not yet told.
_USES_INTERVAL_S: Final = 5.0
# Beyond it the oldest half is synced behind the writes: who never flushes must not
# remember all names it ever wrote, nor sync them all at its end.
_MAX_UNSYNCED: Final = 512
# Where pages are not kept, so that those of few files are used over and over.
_MAX_UNSYNCED_UNKEPT: Final = 32


class Saver:
    """Reserves room, writes the file, publishes the row; pauses after a failure.

    Args:
        index: The store's index.
        ledger: Changes it.
        capacity_bytes: The budget.
        cipher: Seals payloads and side data.
        keeps_pages: Whether what was written stays in the system's page cache; else it
            is written past it where that is possible.
    """

    def __init__(
        self,
        index: SharedIndex,
        ledger: Ledger,
        capacity_bytes: int,
        cipher: RecordCipher | None,
        *,
        keeps_pages: bool = True,
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._capacity_bytes = capacity_bytes
        self._cipher = cipher
        self._keeps_pages = keeps_pages
        self._write_file = write_cached if keeps_pages else DirectWriter().write
        self._paused_until = 0.0
        self._is_failing = False
        self._uses_saved_at = time.monotonic()
        # Written and not yet synced, oldest first, with their keys.
        self._unsynced: dict[str, bytes] = {}
        self._lock = threading.Lock()
        # Held while files are synced: `flush` answers for those under way as well.
        self._sync_lock = threading.Lock()

    def write(self, record: Record) -> None:
        """Store a record that may be stored already, or count why not.

        Raises:
            StoreError: If the record exceeds the whole budget.
        """
        header = replace(record.header, encrypted=self._cipher is not None)
        nbytes = file_len(header)
        check_fits(
            record, self._capacity_bytes - nbytes + record.record_bytes, "disk_bytes"
        )
        is_known = self._is_known(record.key)
        if is_known and (self._index.read_only or not record.side_data):
            return
        if time.monotonic() < self._paused_until or self._index.read_only:
            if not is_known:
                self._index.catalog.count("failed_writes")
            return
        try:
            if is_known:
                self._add_side_data(record)
            else:
                self._save(record, header, nbytes)
            if time.monotonic() > self._uses_saved_at + _USES_INTERVAL_S:
                self._ledger.save_uses()
                self._uses_saved_at = time.monotonic()
        except NoRoomError as error:
            self._index.catalog.count("failed_writes")
            self._paused_until = time.monotonic() + _NO_ROOM_PAUSE_S
            self._index.notices.warn(
                "no room",
                "saving to %s is paused (%s): unpin documents or raise disk_bytes",
                self._index.directory,
                error,
            )
        except (OSError, StoreError, *DATABASE_ERRORS) as error:
            self._index.catalog.count("failed_writes")
            self._pause(error)
        else:
            self._is_failing = False

    def resume(self) -> None:
        """Try again at the next write: something was freed."""
        self._paused_until = 0.0

    def flush(self) -> None:
        """Write uses to the index; return when all is safe, or told that it is not."""
        with self._sync_lock:
            with self._lock:
                names, self._unsynced = self._unsynced, {}
            try:
                self._sync_files(names)
                self._ledger.save_uses()
                self._index.sync()
                if not self._keeps_pages:
                    # Whoever found records of others here will call them safe as well.
                    sync_file_system(self._index.directory)
            except (OSError, *DATABASE_ERRORS) as error:
                if self._keeps_pages:
                    with self._lock:
                        self._unsynced = names | self._unsynced
                self._doubt(names, error)

    def _is_known(self, key: bytes) -> bool:
        if self._index.catalog.find(key) is None:
            return False  # Reserving its room asks the index.
        self._index.learn()  # Another process may have evicted it.
        filename = self._index.catalog.find(key)
        if filename is None or not self._index.is_current():
            return False
        return self._is_there(key, filename)

    def _is_there(self, key: bytes, filename: str) -> bool:
        """Whether a record that has a row has its file; it is condemned if not.

        Else what was computed now would not be written, and a reader would find out the
        next time. Of the file only the header is looked at.
        """
        try:
            header, _, _ = read_header(self._ledger.path(filename))
        except (FileNotFoundError, RecordError):
            header = None
        except OSError:
            return True  # The machine is at fault, and may be well again.
        if header is not None and header.segment_key == key:
            return True
        self._index.condemned.add(key, filename)
        self._index.catalog.discard(key)
        return False

    def _sync_files(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self._ledger.path(name)
            with suppress(FileNotFoundError):  # Evicted since.
                sync(path, keeps_pages=self._keeps_pages)
                # The root names the first-level folders and the index's journal.
                folders |= {path.parent, path.parent.parent, self._index.directory}
        for folder in folders:
            with suppress(FileNotFoundError):
                sync(folder)

    def _add_unsynced(self, filename: str, key: bytes) -> None:
        with self._lock:
            self._unsynced[filename] = key
            most = _MAX_UNSYNCED if self._keeps_pages else _MAX_UNSYNCED_UNKEPT
            if len(self._unsynced) <= most:
                return
        find = self._index.catalog.find
        with self._sync_lock:
            with self._lock:
                names = list(itertools.islice(self._unsynced, most // 2))
                oldest = {name: self._unsynced.pop(name) for name in names}
            try:
                self._sync_files(n for n, key in oldest.items() if find(key) == n)
            except OSError as error:
                # Not tried again: the kernel has dropped what it failed to write.
                self._doubt(oldest, error)

    def _doubt(self, names: Mapping[str, bytes], error: Exception) -> None:
        """Count files that a power cut may cost, and tell of them.

        They can be read until then; but whoever asks for records that last is better
        off without them, and makes them again.
        """
        self._index.catalog.count("failed_syncs", max(len(names), 1))
        self._index.notices.warn(
            "flush",
            "what was saved to %s may not survive a power cut (%s): check the disk",
            self._index.directory,
            error,
        )
        if not self._keeps_pages:
            with suppress(*DATABASE_ERRORS):
                for name, key in names.items():
                    self._ledger.remove([key], only=name)

    def _save(self, record: Record, header: RecordHeader, nbytes: int) -> None:
        for _ in range(2):
            reservation = self._reserve(record.key, nbytes)
            if reservation is None:
                return
            try:
                path = self._ledger.path(reservation.filename)
                write_record_file(
                    path, record, cipher=self._cipher, write=self._write_file
                )
                row = self._row(record, header, reservation)
                if self._ledger.publish(reservation, row):
                    self._index.catalog.count("written_bytes", nbytes)
                    self._add_unsynced(reservation.filename, record.key)
                    return
            except BaseException as error:
                self._ledger.abandon(reservation)
                # Else it was made anew, and took our file for a dead writer's.
                is_failure = isinstance(error, (OSError, *DATABASE_ERRORS))
                if not is_failure or self._index.is_current():
                    raise
        raise StoreError("the store's folder was replaced twice while it was written")

    def _add_side_data(self, record: Record) -> None:
        """Tell of a document that ends with a segment stored inside another one.

        In the row only: the file stays as it is.
        """
        with self._index.changing() as (database, change):
            row = database.find(record.key, [])
            if row is not None and not row.side_data:
                database.delete(record.key, change.number)
                side_data = self._sealed_side_data(record)
                database.insert(replace(row, side_data=side_data), change.number)

    def _reserve(self, key: bytes, nbytes: int) -> Reservation | None:
        deadline = time.monotonic() + _ROOM_TIMEOUT_S
        while True:
            try:
                return self._ledger.reserve(key, nbytes)
            except NoRoomError as error:
                if not error.is_passing or time.monotonic() > deadline:
                    raise
            time.sleep(_ROOM_POLL_S)

    def _row(
        self, record: Record, header: RecordHeader, reservation: Reservation
    ) -> SegmentRow:
        return SegmentRow(
            header.segment_key,
            header.parent_key,
            header.fingerprint,
            header.segment_index,
            header.num_tokens,
            reservation.nbytes,
            reservation.filename,
            time.time(),
            1,
            False,
            self._sealed_side_data(record),
        )

    def _sealed_side_data(self, record: Record) -> bytes:
        if self._cipher is None:
            return record.side_data
        return seal_side_data(record.key, record.side_data, self._cipher)

    def _pause(self, error: Exception) -> None:
        if isinstance(error, diskcache.Timeout):
            return  # Another process held the lock for long; nothing is wrong.
        if not self._is_failing:
            _logger.warning(
                "saving to %s is paused (%s): free space or make it writable; records "
                "stay in memory and stored ones stay readable",
                self._index.directory,
                error,
            )
        self._is_failing = True
        self._index.shrink_journal()
        self._paused_until = time.monotonic() + _PAUSE_S
