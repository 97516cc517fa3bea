"""The store's folder: claiming it, its diskcache index, and its leftovers.

| File                                 | What it is                  |
|--------------------------------------|-----------------------------|
| DARIC_STORE_1                        | marks the folder as ours    |
| cache.db, cache.db-wal, cache.db-shm | diskcache's index (SQLite)  |
| ab/cd/<28 hex digits>.val            | one record                  |
"""

import logging
import re
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import diskcache
from diskcache.core import MODE_BINARY

from daric_rag.errors import StoreError
from daric_rag.storage.base import Record
from daric_rag.storage.catalog import Entry
from daric_rag.storage.format import KEY_LEN
from daric_rag.storage.record_file import write_record_file

_logger = logging.getLogger(__name__)

MARKER: Final = "DARIC_STORE_1"
_MARKER_TEXT: Final = (
    "A store of daric_rag. All of it can be deleted while no program uses it;\n"
    "deleting it costs the time to compute the records again.\n"
)
_RECORD_NAME: Final = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val")

_OUR_NAME: Final = re.compile(r"[0-9a-f]{2}|cache\.db(-wal|-shm)?")

# A record's file exists before its row does. Only one this old can have lost its
# writer, whatever another process is doing now.
_ORPHAN_AGE_S: Final = 3600.0
_LOCK_TIMEOUT_S: Final = 10.0


class NewRecord:
    """A record on its way into the index, and the name that its file was given."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.filename = ""


class RecordDisk(diskcache.Disk):  # type: ignore[misc]
    """diskcache's serialisation reduced to record files; nothing is ever pickled.

    The default class unpickles what it finds (advisory GHSA-w8v5-vhqr-4h9v), leaves
    a partly written file behind when the disk is full, and follows any path that a
    row names. What this class does not know it reports as "" instead of reading it.
    """

    def put(self, key: object) -> tuple[object, bool]:
        """Accept segment keys only."""
        if type(key) is not bytes or len(key) != KEY_LEN:
            raise StoreError(f"a key must be {KEY_LEN} bytes: pass a SegmentKey")
        return sqlite3.Binary(key), True

    def get(self, key: object, raw: object) -> bytes:
        """Return a row's key, b"" if it is none of ours."""
        if raw and isinstance(key, bytes) and len(key) == KEY_LEN:
            return key
        return b""

    def store(
        self, value: object, read: bool, key: object = None
    ) -> tuple[int, int, str, None]:
        """Write a `NewRecord` to its file: (size, mode, file name, no inline value)."""
        if not isinstance(value, NewRecord):
            raise StoreError("only records are stored: use DiskTier.write")
        filename, full_path = self.filename()
        write_record_file(Path(full_path), value.record)
        value.filename = filename
        return value.record.record_bytes, MODE_BINARY, filename, None

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> str:
        """Return the name of a row's file and leave reading it to the caller."""
        if mode == MODE_BINARY and is_record_name(filename):
            return str(filename)
        return ""

    def remove(self, file_path: object) -> None:
        """Delete a record's file; any other path is left alone."""
        if is_record_name(file_path):
            super().remove(file_path)


def is_record_name(filename: object) -> bool:
    """Whether a name found in a row is one that diskcache gives to a value."""
    return isinstance(filename, str) and bool(_RECORD_NAME.fullmatch(filename))


def open_cache(directory: Path) -> Any:
    """Claim a folder and open its index, anew if the index is damaged.

    Args:
        directory: A folder of ours, an empty one, or one that can be made.

    Returns:
        A `diskcache.Cache` that evicts, inlines and pickles nothing.

    Raises:
        StoreError: If the folder cannot be made, read or written, or belongs to
            something else.
    """
    try:
        _claim(directory)
        try:
            return _open(directory)
        except sqlite3.DatabaseError as error:
            # The subclasses are about locks, permissions and space; this class alone
            # says that the file is damaged.
            if type(error) is not sqlite3.DatabaseError:
                raise
            _logger.warning("the index in %s is damaged (%s): anew", directory, error)
            _discard(directory)
            return _open(directory)
    except StoreError:
        raise
    except (OSError, ValueError, sqlite3.Error, diskcache.Timeout) as error:
        raise StoreError(
            f"cannot open the store in {directory} ({error}): choose a folder that "
            "can be created and written, or ':memory:' to keep records in memory only"
        ) from error


def remove_orphans(directory: Path, known: set[str]) -> int:
    """Delete old record files that no row names; returns how many.

    Args:
        directory: The store's folder.
        known: File names that rows name, read after the last row was committed
            whose file is older than an hour.
    """
    oldest = time.time() - _ORPHAN_AGE_S
    num_removed = 0
    for path in directory.glob("??/??/*.val"):
        name = path.relative_to(directory).as_posix()
        if name in known or not is_record_name(name):
            continue
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
                num_removed += 1
    return num_removed


def scan(
    cache: Any, directory: Path
) -> tuple[list[tuple[bytes, Entry]], list[tuple[bytes, str]]]:
    """List what the index names and what of it exists.

    Returns:
        The records that have a file, and (key, file name) of the rows that have
        none; the name is "" where a row is none of ours.

    Raises:
        StoreError: If the index cannot be read.
    """
    entries: list[tuple[bytes, Entry]] = []
    broken: list[tuple[bytes, str]] = []
    try:
        keys = [key for key in cache if key]
        names = [(key, cache.get(key, read=True)) for key in keys]
    except sqlite3.Error as error:
        raise StoreError(
            f"the index in {directory} cannot be read ({error}): delete the folder; "
            "its records are computed again when needed"
        ) from error
    for key, filename in names:
        if filename is None:
            continue  # Deleted by another process since.
        if not filename:
            broken.append((key, ""))
            continue
        try:
            status = (directory / filename).stat()
        except FileNotFoundError:
            broken.append((key, filename))
        except OSError:
            continue
        else:
            entry = Entry(filename, status.st_size, status.st_mtime_ns)
            entries.append((key, entry))
    return entries, broken


def _claim(directory: Path) -> None:
    # Cached keys and values reveal the documents' text: nobody else may read them.
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    marker = directory / MARKER
    names = [path.name for path in directory.iterdir()]
    # A folder that was emptied under a running process holds our files and no marker.
    if not marker.exists() and not all(map(_OUR_NAME.fullmatch, names)):
        raise StoreError(
            f"{directory} is not empty and no store of daric_rag: choose an empty or "
            "a new folder"
        )
    if not marker.exists():
        # An empty folder that somebody made beforehand may be open to all.
        directory.chmod(0o700)
        marker.write_text(_MARKER_TEXT, encoding="ascii")


def _open(directory: Path) -> Any:
    return diskcache.Cache(
        str(directory),
        timeout=_LOCK_TIMEOUT_S,
        disk=RecordDisk,
        # We evict, byte by byte. Above its limit diskcache would drop values.
        eviction_policy="none",
        cull_limit=0,
        size_limit=1 << 62,
        statistics=0,
        tag_index=0,
        disk_min_file_size=0,
        # A mapped index that somebody truncates would end the process by SIGBUS.
        sqlite_mmap_size=0,
    )


def _discard(directory: Path) -> None:
    for name in ("cache.db", "cache.db-wal", "cache.db-shm"):
        (directory / name).unlink(missing_ok=True)
    for path in directory.glob("??/??/*.val"):
        with suppress(OSError):
            path.unlink()
