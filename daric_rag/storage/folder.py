"""The store's folder: claiming it and opening its index.

| File                                 | What it is                              |
|--------------------------------------|-----------------------------------------|
| DARIC_STORE_2                        | marks the folder as ours, names the key |
| cache.db, cache.db-wal, cache.db-shm | the index (SQLite), see `database`      |
| cache.db.old and the same            | a lost index while it is made anew      |
| ab/cd/<28 hex digits>.val            | one record, see `record_file`           |
| ab/cd/<28 hex digits>.val.tmp        | one record that is being written        |
| writers/<32 hex digits>.lock         | one writing process, see `writer_lock`  |
"""

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from daric_rag.errors import StoreError
from daric_rag.storage.claim import MARKER, check_marker, check_names, claim
from daric_rag.storage.database import (
    DATABASE_NAME,
    ReadOnlyDatabase,
    RecordDatabase,
)
from daric_rag.storage.index_faults import (
    is_about_writing,
    is_damage,
    reason_of,
)
from daric_rag.storage.recovery import (
    discard_index,
    discard_old_index,
    has_records,
    rebuild,
    salvage_uses,
    set_index_aside,
)
from daric_rag.storage.sweeping import sweep

__all__ = ["MARKER", "check_folder", "open_database", "open_read_only"]

_logger = logging.getLogger(__name__)

# Twice what whoever holds the lock may wait for SQLite's, and more.
_LOCK_TIMEOUT_S: Final = 30.0
_LOCK_POLL_S: Final = 0.01

# A failing disk may damage what is being made, too.
_MAX_REBUILDS: Final = 3

Load = Callable[[RecordDatabase], None]


def open_database(
    directory: Path,
    key_id: str | None,
    load: Load,
    *,
    anew: bool = False,
    sweeps: bool = True,
) -> RecordDatabase:
    """Claim a folder, open its index and load it; from the records if it is damaged.

    Args:
        directory: A folder of ours, an empty one, or one that can be made.
        key_id: Of the key that the records are sealed with; None for plain ones.
        load: Reads all rows. It is called again if they turn out to be damaged.
        anew: Whether the index was found to be damaged while in use.
        sweeps: Whether files that no row names go; who only looks deletes nothing.

    Raises:
        StoreError: If the folder belongs to something else, to a later version or to
            another key; or another process, opening it, does not go on.
        OSError, ValueError, sqlite3.Error, diskcache.Timeout: If it cannot be made,
            read or written.
    """
    # Cached keys and values reveal the documents' text: nobody else may read them.
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(directory):
        claim(directory, key_id)
        database = _open_index(directory, load, thorough=anew, sweeps=sweeps)
        for _ in range(_MAX_REBUILDS):
            if database is None:
                database = _make_anew(directory, load)
        if database is None:
            raise StoreError(
                f"the index in {directory} is damaged again and again while it is made "
                "anew: something else writes to the folder, or the disk fails; check "
                "the disk, or choose another folder"
            )
        discard_old_index(directory)
        return database


def _open_index(
    directory: Path, load: Load, *, thorough: bool, sweeps: bool
) -> RecordDatabase | None:
    """Open the index that is there; None if it is to be made anew from records."""
    is_new = not _has_index(directory)
    if is_new and has_records(directory):
        _logger.warning(
            "the index in %s is gone: it is made anew from the records", directory
        )
        return None
    if is_new:
        # SQLite would take the journal of an index that is gone for the new one's.
        discard_index(directory)
    try:
        database = RecordDatabase(directory)
        try:
            database.check(thorough=thorough)
            if thorough:
                database.try_changes()
            if not is_new and not database.is_finished() and has_records(directory):
                raise sqlite3.DatabaseError("who was making it ended before its end")
            load(database)
            if sweeps and not is_new:
                sweep(directory, database)
            database.finish()
        except BaseException:
            database.close()
            raise
    except Exception as error:
        _check_damage(error, directory)
        return None
    return database


def _make_anew(directory: Path, load: Load) -> RecordDatabase | None:
    """Make the index anew from the records; None if it is damaged meanwhile.

    A kill at any moment costs no record. Until it is finished, it is not taken for an
    index, and the old one stays.
    """
    set_index_aside(directory)
    uses = salvage_uses(directory)
    try:
        database = RecordDatabase(directory)
        try:
            rebuild(database, directory, uses)
            load(database)
            database.finish()
            database.sync()
        except BaseException:
            database.close()
            raise
    except Exception as error:
        _check_damage(error, directory)
        return None
    return database


def _check_damage(error: Exception, directory: Path) -> None:
    """Say that an index is damaged; raise an error that says something else."""
    if not is_damage(error):
        raise error
    _logger.warning(
        "the index in %s is damaged (%s): it is made anew from the records",
        directory,
        error,
    )


def open_read_only(
    directory: Path, key_id: str | None, error: Exception
) -> ReadOnlyDatabase:
    """Open a store that cannot be written.

    Args:
        directory: The folder.
        key_id: As in `open_database`.
        error: Why it cannot be written.

    Raises:
        StoreError: If it cannot be read either, or was refused for another reason.
    """
    if isinstance(error, StoreError):
        raise error
    if is_about_writing(error, directory):
        with suppress(OSError, sqlite3.Error):
            if check_marker(directory, key_id) or has_records(directory):
                return ReadOnlyDatabase(directory)
    raise StoreError(
        f"cannot open the store in {directory} ({reason_of(error)}): choose a "
        "folder that can be created and written, or ':memory:' to keep records in "
        "memory only"
    ) from error


def check_folder(directory: Path) -> None:
    """Check that a store can be in a folder, making it if it is absent.

    Raises:
        StoreError: If not.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_names(directory)
    except (OSError, ValueError) as error:
        open_read_only(directory, None, error).close()


def _has_index(directory: Path) -> bool:
    try:
        return (directory / DATABASE_NAME).stat().st_size > 0
    except FileNotFoundError:
        return False


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let one process at a time claim and open the folder; others wait."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _wait_for_lock(file, directory)
        yield
    finally:
        os.close(file)


def _wait_for_lock(file: int, directory: Path) -> None:
    deadline, changed_at = 0.0, -1
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError:
            return  # Some network file systems lock no folders.
        else:
            return
        now = time.monotonic()
        # Who makes a large index anew touches the folder from time to time.
        if (found := os.fstat(file).st_mtime_ns) != changed_at:
            deadline, changed_at = now + _LOCK_TIMEOUT_S, found
        if now > deadline:
            raise StoreError(
                f"another process began to open the store in {directory} and does not "
                "go on: let it go on or end it (`fuser -v` with the folder names it), "
                "and try again"
            )
        time.sleep(_LOCK_POLL_S)
