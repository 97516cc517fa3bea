"""The files of a corpus: which they are, in a fixed order, whatever lies there."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from daric_rag.prewarm.manifest import is_manifest
from daric_rag.prewarm.readers import SUFFIXES

__all__ = ["Findings", "blocks", "files_of", "real", "size_of"]


@dataclass(slots=True)
class Findings:
    """What a walk comes upon beside documents.

    Attributes:
        unread: Why files and folders cannot be looked into.
        empty: Folders with nothing at all in them, links followed.
        linked: Folders that links lead to, links followed.
        num_others: Files whose suffix is none of `SUFFIXES`, by suffix.
    """

    unread: list[OSError] = field(default_factory=list)
    empty: set[Path] = field(default_factory=set)
    linked: set[Path] = field(default_factory=set)
    num_others: Counter[str] = field(default_factory=Counter)


def files_of(path: str, found: Findings) -> Iterator[Path]:
    """Yield a file itself, or what a folder holds, but for hidden files; in order.

    Args:
        path: Of the file or folder.
        found: Mutated: takes what else there is.
    """
    root = Path(path)
    if (failure := _failure(root)) is not None:
        found.unread.append(failure)
        return
    if not root.is_dir():
        yield root
        return
    for folder, names in _folders_of(root, found):
        for name in names:
            file = folder / name
            if file.is_symlink():
                # A whole folder may be behind it, on a mount that is not there.
                failure = _failure(file)
                if failure is not None:
                    found.unread.append(failure)
                    continue
            suffix = file.suffix.lower()
            if suffix not in SUFFIXES:
                found.num_others[suffix] += 1
                continue
            # A job's own record may lie beside the documents.
            if blocks(file) or not is_manifest(file):
                yield file


def _folders_of(root: Path, found: Findings) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder once, with the names of its files, sorted."""
    visited: set[tuple[int, int]] = set()
    walk = os.walk(root, onerror=found.unread.append, followlinks=True)
    for folder, folders, names in walk:
        if not _is_new(folder, visited):
            # A link to a folder above would have no end.
            folders.clear()
            continue
        path = Path(folder)
        if path.is_symlink():
            found.linked.add(real(path))
        if not folders and not names:
            found.empty.add(real(path))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield path, sorted(name for name in names if not name.startswith("."))


def real(path: Path) -> Path:
    """Return where a path leads, links followed; loops are no error."""
    return Path(os.path.realpath(path))


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
