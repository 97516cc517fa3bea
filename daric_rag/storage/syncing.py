"""What survives a power cut: files, folders, and all of a file system at once."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["sync", "sync_file_system"]


def sync(path: Path, *, keeps_pages: bool = True) -> None:
    """Return when a file's content, or a folder's names, survive a power cut.

    Args:
        path: Of the file or folder.
        keeps_pages: Whether the file may stay in the system's page cache.

    Raises:
        OSError: It cannot be synced, or is not there.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fdatasync(file)
        if not keeps_pages and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def sync_file_system(folder: Path) -> None:
    """Return when what anybody wrote to a folder's file system survives a power cut.

    Raises:
        OSError: It cannot be synced, or something there could not be written.
    """
    call = _syncfs()
    if call is None:
        os.sync()
        return
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Lets other threads run meanwhile, as all of ctypes' calls do.
        if call(file) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(file)


@cache
def _syncfs() -> Any:
    """Return Linux's call, which Python has no name for; None elsewhere."""
    try:
        return ctypes.CDLL(None, use_errno=True).syncfs
    except (AttributeError, OSError, TypeError):
        return None
