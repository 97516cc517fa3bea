"""What an error of the index means: damage, an unwritable folder, or less."""

import errno
import sqlite3
from typing import Final

import diskcache

__all__ = ["is_about_writing", "is_damage", "reason_of"]

_UNWRITABLE: Final = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}
)
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


def is_about_writing(error: Exception) -> bool:
    """Whether an error says that a folder cannot be written."""
    if isinstance(error, OSError):
        return error.errno in _UNWRITABLE
    words = ("readonly", "unable to open", "disk is full")
    return isinstance(error, sqlite3.OperationalError) and any(
        word in str(error) for word in words
    )


def reason_of(error: BaseException) -> str:
    """Say why the index could not be used; a timeout itself says nothing."""
    if isinstance(error, diskcache.Timeout):
        return "another process is busy changing it: try again"
    return str(error)
