"""Telling which writers of a store are alive: a locked file for each of them.

| File                       | What it is                                      |
|----------------------------|-------------------------------------------------|
| writers/<32 digits>.lock   | locked (flock) for as long as its writer lives  |

The kernel drops the lock however the process ends. Numbers of processes were
rejected: they are used again, and mean nothing in another container.
"""

import fcntl
import os
import uuid
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["WRITERS", "WriterLock", "bury_dead", "has_living_writer", "is_dead"]

WRITERS: Final = "writers"
_SUFFIX: Final = ".lock"

_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class WriterLock:
    """A living writer. In a forked child it is neither alive nor the child's.

    Args:
        directory: The store's folder.

    Raises:
        OSError: If the file cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        folder = directory / WRITERS
        while True:
            folder.mkdir(mode=0o700, exist_ok=True)
            self.writer_id = uuid.uuid4().bytes
            self._path = _path(directory, self.writer_id)
            try:
                self._file = os.open(self._path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
            except FileNotFoundError:
                continue
            # Somebody may take it for dead before it is locked.
            with suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.is_current():
                    break
            os.close(self._file)
        _locks.add(self)

    def is_current(self) -> bool:
        """Whether others still see this writer."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file))
        except OSError:
            return False

    def close(self) -> None:
        """End as a writer; what it reserved must be gone."""
        if self._file < 0:
            return
        if self.is_current():
            with suppress(OSError):
                self._path.unlink()
        self.abandon()

    def abandon(self) -> None:
        """Close the file and touch nothing else, as in a forked child.

        The child shares the lock with its parent: only by closing it does the lock
        end with the parent.
        """
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)


_locks: "weakref.WeakSet[WriterLock]" = weakref.WeakSet()


def _abandon_all() -> None:
    for lock in list(_locks):
        lock.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def is_dead(directory: Path, writer_id: bytes, *, bury: bool = True) -> bool:
    """Whether a writer has ended; if so, its file is deleted, unless told not to."""
    path = _path(directory, writer_id)
    try:
        file = os.open(path, _FLAGS)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        if bury:
            with suppress(OSError):
                path.unlink()
        return True
    finally:
        os.close(file)


def bury_dead(directory: Path) -> int:
    """Delete the files of writers that have ended; returns how many."""
    num_dead = 0
    with suppress(OSError):
        for path in (directory / WRITERS).glob("*" + _SUFFIX):
            with suppress(ValueError):
                num_dead += is_dead(directory, uuid.UUID(path.stem).bytes)
    return num_dead


def has_living_writer(directory: Path) -> bool:
    """Whether somebody writes to the store, or may be doing so."""
    for path in (directory / WRITERS).glob("*" + _SUFFIX):
        with suppress(ValueError):
            if not is_dead(directory, uuid.UUID(path.stem).bytes, bury=False):
                return True
    return False


def _path(directory: Path, writer_id: bytes) -> Path:
    return directory / WRITERS / (writer_id.hex() + _SUFFIX)
