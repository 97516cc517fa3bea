"""The store's folder: claiming it and opening its index.

| File                                 | What it is                              |
|--------------------------------------|-----------------------------------------|
| DARIC_STORE_2                        | marks the folder as ours, names the key |
| cache.db, cache.db-wal, cache.db-shm | the index (SQLite), see `database`      |
| ab/cd/<28 hex digits>.val            | one record, see `record_file`           |
| ab/cd/<28 hex digits>.val.tmp        | one record that is being written        |
| writers/<32 hex digits>.lock         | one writing process, see `writer_lock`  |
"""

import errno
import fcntl
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import diskcache

from daric_rag.errors import StoreError
from daric_rag.storage.database import (
    DATABASE_NAME,
    ReadOnlyDatabase,
    RecordDatabase,
)
from daric_rag.storage.recovery import (
    discard_index,
    discard_records,
    has_records,
    rebuild,
    salvage_uses,
)

__all__ = ["MARKER", "check_folder", "open_database", "open_read_only"]

_logger = logging.getLogger(__name__)

_MARKER_PREFIX: Final = "DARIC_STORE_"
_VERSION: Final = 2
MARKER: Final = f"{_MARKER_PREFIX}{_VERSION}"
_MARKER_TEXT: Final = (
    "A store of daric_rag. All of it can be deleted while no program uses it;\n"
    "deleting it costs the time to compute the records again.\n"
    "key: {key_id}\n"
)
_MARKER_KEY: Final = re.compile(r"^key: (\S+)$", re.MULTILINE)
_NO_KEY: Final = "none"

_OUR_NAME: Final = re.compile(
    r"[0-9a-f]{2}|cache\.db(-wal|-shm)?|writers|DARIC_STORE_\d+(\.tmp)?"
)

_UNWRITABLE: Final = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}
)

Load = Callable[[RecordDatabase], None]


def open_database(
    directory: Path, key_id: str | None, load: Load, *, anew: bool = False
) -> RecordDatabase:
    """Claim a folder, open its index and load it; from the records if it is damaged.

    Args:
        directory: A folder of ours, an empty one, or one that can be made.
        key_id: Of the key that the records are sealed with; None for plain ones.
        load: Reads all rows. It is called again if they turn out to be damaged.
        anew: Whether the index was found to be damaged while in use.

    Raises:
        StoreError: If the folder belongs to something else, to a later version or to
            another key.
        OSError, ValueError, sqlite3.Error, diskcache.Timeout: If it cannot be made,
            read or written.
    """
    # Cached keys and values reveal the documents' text: nobody else may read them.
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(directory):
        _claim(directory, key_id)
        is_new = not _has_index(directory)
        if is_new:
            # SQLite would take the journal of an index that is gone for the new one's.
            discard_index(directory)
        try:
            database = _open(directory, load, thorough=anew)
        except sqlite3.DatabaseError as error:
            # The subclasses are about locks, permissions and space; this class alone
            # says that the file is damaged.
            if type(error) is not sqlite3.DatabaseError:
                raise
            _logger.warning(
                "the index in %s is damaged (%s): it is made anew from the records",
                directory,
                error,
            )
        else:
            if not is_new or not has_records(directory):
                return database
            database.close()
            _logger.warning(
                "the index in %s is gone: it is made anew from the records", directory
            )
        uses = salvage_uses(directory)
        discard_index(directory)
        database = RecordDatabase(directory)
        try:
            rebuild(database, directory, uses)
            load(database)
        except BaseException:
            database.close()
            raise
        return database


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
    if _is_about_writing(error):
        with suppress(OSError, sqlite3.Error):
            if _check_marker(directory, key_id):
                return ReadOnlyDatabase(directory)
    raise StoreError(
        f"cannot open the store in {directory} ({error}): choose a folder that "
        "can be created and written, or ':memory:' to keep records in memory only"
    ) from error


def check_folder(directory: Path) -> None:
    """Check that a store can be in a folder, making it if it is absent.

    Raises:
        StoreError: If not.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_names(directory)
    except (OSError, ValueError) as error:
        open_read_only(directory, None, error).close()


def _has_index(directory: Path) -> bool:
    try:
        return (directory / DATABASE_NAME).stat().st_size > 0
    except FileNotFoundError:
        return False


def _open(directory: Path, load: Load, *, thorough: bool) -> RecordDatabase:
    database = RecordDatabase(directory)
    try:
        database.check(thorough=thorough)
        load(database)
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let one process at a time claim and open the folder; others wait."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # Some network file systems lock no folders.
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _claim(directory: Path, key_id: str | None) -> None:
    if _check_marker(directory, key_id):
        return
    # An empty folder that somebody made beforehand may be open to all.
    directory.chmod(0o700)
    old = directory / f"{_MARKER_PREFIX}1"
    if old.exists():
        _logger.warning(
            "the records in %s are of an earlier version, which no present engine can "
            "use: they are deleted",
            directory,
        )
        discard_index(directory)
        discard_records(directory)
    temporary = directory / (MARKER + ".tmp")
    text = _MARKER_TEXT.format(key_id=key_id or _NO_KEY)
    temporary.write_text(text, encoding="ascii")
    temporary.rename(directory / MARKER)
    old.unlink(missing_ok=True)


def _check_marker(directory: Path, key_id: str | None) -> bool:
    """Whether the folder has our marker, which must name this key."""
    _check_names(directory)
    try:
        text = (directory / MARKER).read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return False
    found = _MARKER_KEY.search(text)
    stored = found[1] if found else _NO_KEY
    if stored == (key_id or _NO_KEY):
        return True
    if stored == _NO_KEY:
        raise StoreError(
            f"the store in {directory} is not encrypted: open it without a key, or "
            "choose a new folder for an encrypted one"
        )
    given = f"the key given is {key_id}" if key_id else "no key is given"
    raise StoreError(
        f"the store in {directory} is encrypted with the key {stored} and {given}: "
        "set DARIC_STORE_KEY or DARIC_STORE_KEY_FILE to that key, or choose another "
        "folder"
    )


def _check_names(directory: Path) -> None:
    names = [path.name for path in directory.iterdir()]
    versions = [
        int(name.removeprefix(_MARKER_PREFIX))
        for name in names
        if re.fullmatch(_MARKER_PREFIX + r"\d{1,9}", name)
    ]
    if max(versions, default=0) > _VERSION:
        raise StoreError(
            f"the store in {directory} was made by a later version of daric_rag: "
            "upgrade daric_rag, or choose another folder"
        )
    # A folder that was emptied under a running process holds our files and no marker.
    if not versions and not all(map(_OUR_NAME.fullmatch, names)):
        raise StoreError(
            f"{directory} is not empty and no store of daric_rag: choose an empty or "
            "a new folder"
        )


def _is_about_writing(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _UNWRITABLE
    if isinstance(error, diskcache.Timeout):
        return False
    words = ("readonly", "unable to open", "disk is full")
    return isinstance(error, sqlite3.OperationalError) and any(
        word in str(error) for word in words
    )
