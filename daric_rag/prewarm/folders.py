"""The files of a corpus: which they are, in a fixed order, whatever lies there."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from daric_rag.prewarm.manifest import is_manifest
from daric_rag.prewarm.readers import SUFFIXES

__all__ = ["Folder", "blocks", "files_of", "folders_of", "linked_in", "size_of"]


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of a corpus.

    Attributes:
        path: As it was come upon.
        names: Of its files, sorted.
        is_empty: Whether there is nothing at all in it.
    """

    path: Path
    names: list[str]
    is_empty: bool


def files_of(
    path: str,
    on_error: Callable[[OSError], None] = lambda _: None,
    on_empty: Callable[[Path], None] = lambda _: None,
    on_other: Callable[[Path], None] = lambda _: None,
) -> Iterator[Path]:
    """Yield a file itself, or a folder's files.

    Args:
        path: Of the file or folder.
        on_error: Called where something cannot be looked into.
        on_empty: Called with folders that have nothing in them.
        on_other: Called with files whose suffix is none of `SUFFIXES`.
    """
    root = Path(path)
    if (failure := _failure(root)) is not None:
        on_error(failure)
        return
    if not root.is_dir():
        yield root
        return
    for folder in folders_of(root, on_error):
        if folder.is_empty:
            on_empty(folder.path)
        for name in folder.names:
            file = folder.path / name
            if file.is_symlink():
                # A whole folder may be behind it, on a mount that is not there.
                failure = _failure(file)
                if failure is not None:
                    on_error(failure)
                    continue
            if file.suffix.lower() not in SUFFIXES:
                on_other(file)
                continue
            # A job's own record may lie beside the documents.
            if blocks(file) or not is_manifest(file):
                yield file


def folders_of(
    root: Path, on_error: Callable[[OSError], None] = lambda _: None
) -> Iterator[Folder]:
    """Yield each folder once, links followed, hidden ones and files left out."""
    visited: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, onerror=on_error, followlinks=True):
        if not _is_new(folder, visited):
            # A link to a folder above would have no end.
            folders.clear()
            continue
        is_empty = not folders and not names
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        shown = sorted(name for name in names if not name.startswith("."))
        yield Folder(Path(folder), shown, is_empty)


def linked_in(root: Path) -> Iterator[Path]:
    """Yield the folders that links in a folder lead to, links followed."""
    for folder in folders_of(root):
        if folder.path.is_symlink():
            yield Path(os.path.realpath(folder.path))


def _failure(path: Path) -> OSError | None:
    """Return why nothing can be said of what is there; None if something can."""
    try:
        path.stat()
    except OSError as error:
        return error
    return None


def _is_new(folder: str, visited: set[tuple[int, int]]) -> bool:
    try:
        status = Path(folder).stat()
    except OSError:
        return True
    place = status.st_dev, status.st_ino
    is_new = place not in visited
    visited.add(place)
    return is_new


def blocks(file: Path) -> bool:
    """Whether reading may wait for ever: pipes, sockets, devices."""
    try:
        return not stat.S_ISREG(file.stat().st_mode)
    except OSError:
        return False


def size_of(file: Path) -> int:
    """Return a file's bytes; 0 if it cannot be looked at."""
    try:
        return file.stat().st_size
    except OSError:
        return 0
