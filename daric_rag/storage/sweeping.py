"""Deleting record files that no row names, while a store is opened.

Where an earlier index was put back, or a folder was copied while in use, they would
be outside the budget: it counts rows.
"""

import logging
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from daric_rag.storage.database import RecordDatabase
from daric_rag.storage.names import is_record_name
from daric_rag.storage.record_file import TEMPORARY_SUFFIX
from daric_rag.storage.writer_lock import has_living_writer

__all__ = ["sweep"]

_logger = logging.getLogger(__name__)

_FOLDER_NAME: Final = re.compile(r"[0-9a-f]{2}")
# Others wait meanwhile. A hundred thousand records take a second, but on a slow disk
# that was not read for long, much more: what is left is for the next time.
_TIMEOUT_S: Final = 5.0


def sweep(directory: Path, database: RecordDatabase) -> int:
    """Delete what no row names, unless somebody is writing.

    Args:
        directory: The store's folder, locked.
        database: Its index.

    Returns:
        How many files were deleted.

    Raises:
        sqlite3.Error: If the index cannot be read.
    """
    if has_living_writer(directory):
        return 0
    found = list(_list_names(directory, time.monotonic() + _TIMEOUT_S))
    if not found:
        return 0
    # In this order: a writer that began meanwhile made its lock before its row, and
    # its row before its file.
    known = database.filenames()
    orphans = [n for n in found if n.removesuffix(TEMPORARY_SUFFIX) not in known]
    if not orphans or has_living_writer(directory):
        return 0
    _logger.warning(
        "%d files in %s belong to no record of its index: they are deleted",
        len(orphans),
        directory,
    )
    num_deleted = 0
    for name in orphans:
        with suppress(OSError):
            (directory / name).unlink()
            num_deleted += 1
    return num_deleted


def _list_names(directory: Path, deadline: float) -> Iterator[str]:
    """Iterate over names of record files, temporary ones included; looks at no file."""
    uppers = _folders(str(directory))
    # So that in the end all are looked at, however often time runs out.
    random.shuffle(uppers)
    for upper in uppers:
        for lower in _folders(f"{directory}/{upper}"):
            if time.monotonic() > deadline:
                return
            for file in _entries(f"{directory}/{upper}/{lower}"):
                name = f"{upper}/{lower}/{file}"
                if is_record_name(name.removesuffix(TEMPORARY_SUFFIX)):
                    yield name


def _folders(path: str) -> list[str]:
    return [name for name in _entries(path) if _FOLDER_NAME.fullmatch(name)]


def _entries(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries]
    except OSError:
        return []
