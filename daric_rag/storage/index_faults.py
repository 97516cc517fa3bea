"""What an error of the index means: damage, an unwritable folder, or less."""

import errno
import os
import sqlite3
from pathlib import Path
from typing import Final

import diskcache

__all__ = ["has_room", "is_about_writing", "is_damage", "reason_of"]

_UNWRITABLE: Final = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}
)
# What an index takes besides its file, several times over.
_ROOM_BYTES: Final = 1 << 20
# SQLite's words where the machine, another process or the folder is at fault.
_NOT_THE_INDEX: Final = (
    "locked",
    "busy",
    "readonly",
    "unable to open",
    "disk is full",
    "disk I/O error",
    "interrupted",
    "out of memory",
    "locking protocol",
    "access permission",
    "large file support",
)


def is_damage(error: BaseException) -> bool:
    """Whether an error while using an index says that the index is damaged.

    A table, column or trigger whose name lost a bit shows as an `OperationalError`,
    like a full disk; a value of the wrong type may show as any error of Python's.
    """
    if isinstance(error, sqlite3.OperationalError):
        return not any(word in str(error) for word in _NOT_THE_INDEX)
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.NotSupportedError)):
        return False
    values = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
    return isinstance(error, (sqlite3.DatabaseError, *values))


def is_about_writing(error: Exception, directory: Path) -> bool:
    """Whether an error says that a folder cannot be written."""
    if isinstance(error, OSError):
        return error.errno in _UNWRITABLE
    words = ["readonly", "unable to open", "disk is full"]
    if not has_room(directory):
        # Where SQLite cannot make its -shm file longer, it says no more than that.
        words.append("disk I/O error")
    return isinstance(error, sqlite3.OperationalError) and any(
        word in str(error) for word in words
    )


def has_room(directory: Path) -> bool:
    """Whether the disk has room for the index to be opened and changed."""
    try:
        found = os.statvfs(directory)
    except (OSError, ValueError):
        return True
    has_files = not found.f_files or found.f_favail > 0
    return has_files and found.f_bavail * found.f_frsize >= _ROOM_BYTES


def reason_of(error: BaseException) -> str:
    """Say why the index could not be used; a timeout itself says nothing."""
    if isinstance(error, diskcache.Timeout):
        return "another process is busy changing it: try again"
    return str(error)
