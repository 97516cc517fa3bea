"""Making a lost index anew from the records themselves, and deleting leftovers."""

import logging
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from daric_rag.storage.database import (
    DATABASE_NAME,
    RecordDatabase,
    SegmentRow,
)
from daric_rag.storage.format import RecordError
from daric_rag.storage.names import is_record_name
from daric_rag.storage.record_file import TEMPORARY_SUFFIX, file_len, read_header
from daric_rag.storage.rows import valid_time, valid_uses

__all__ = [
    "discard_index",
    "discard_old_index",
    "discard_records",
    "has_records",
    "list_files",
    "list_folders",
    "rebuild",
    "salvage_uses",
    "set_index_aside",
]

_logger = logging.getLogger(__name__)

_OLD_NAME: Final = DATABASE_NAME + ".old"
_FOLDER_NAME: Final = re.compile(r"[0-9a-f]{2}")
_ROWS_PER_TRANSACTION: Final = 1000
_PROGRESS_INTERVAL_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Use:
    last_used: float
    uses: int
    pinned: bool


def list_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Iterate over record files, temporary ones included: (relative name, path).

    Folders may come and go meanwhile; files that are there all the time are found.
    """
    for folder in list_folders(directory):
        for path in _entries(folder):
            name = path.relative_to(directory).as_posix()
            if is_record_name(name.removesuffix(TEMPORARY_SUFFIX)):
                yield name, path


def list_folders(directory: Path) -> Iterator[Path]:
    """Iterate over the folders that hold records, `ab/cd`."""
    for upper in _entries(directory):
        if _FOLDER_NAME.fullmatch(upper.name):
            for lower in _entries(upper):
                if _FOLDER_NAME.fullmatch(lower.name):
                    yield lower


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def has_records(directory: Path) -> bool:
    """Whether there is a record file at all."""
    return next(list_files(directory), None) is not None


def discard_index(directory: Path) -> None:
    """Delete the index; other processes notice at their next write."""
    # The journal first: SQLite would replay it into whatever index comes next.
    for suffix in ("-wal", "-shm", ""):
        (directory / (DATABASE_NAME + suffix)).unlink(missing_ok=True)


def set_index_aside(directory: Path) -> None:
    """Keep a lost index for `salvage_uses`, and begin without any.

    If one was set aside before, the present one is what was begun after that.
    """
    current, old = directory / DATABASE_NAME, directory / _OLD_NAME
    if not old.exists():
        discard_old_index(directory)
        with suppress(FileNotFoundError):
            current.rename(old)
    # Its journal holds its latest rows. It alone is here after a kill in between.
    if old.exists() and not current.exists():
        with suppress(FileNotFoundError):
            Path(f"{current}-wal").rename(f"{old}-wal")
    discard_index(directory)


def discard_old_index(directory: Path) -> None:
    """Delete what `set_index_aside` kept."""
    for suffix in ("", "-wal", "-shm"):
        (directory / (_OLD_NAME + suffix)).unlink(missing_ok=True)


def discard_records(directory: Path) -> None:
    """Delete all record files."""
    for _, path in list_files(directory):
        with suppress(OSError):
            path.unlink()


def salvage_uses(directory: Path) -> dict[bytes, _Use]:
    """Read pins and uses from the index set aside, as far as that is possible."""
    found: dict[bytes, _Use] = {}
    # Where a name in it is damaged, even an error's text may not be decodable.
    with suppress(sqlite3.Error, OSError, ValueError):
        uri = f"{(directory / _OLD_NAME).as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            for key, last_used, uses, pins in connection.execute(
                "SELECT key, access_time, access_count, daric_pins FROM Cache"
            ):
                with suppress(TypeError, ValueError, OverflowError):
                    found[bytes(key)] = _Use(
                        valid_time(last_used), valid_uses(uses), bool(pins)
                    )
    return found


def rebuild(
    database: RecordDatabase, directory: Path, known: dict[bytes, _Use]
) -> None:
    """Fill an empty index from the records' headers; what is no record is deleted.

    Payloads are verified when they are read, as always. The order of use is that of
    the last known use, else of writing.

    Args:
        database: Empty.
        directory: The store's folder.
        known: From `salvage_uses`.

    Raises:
        OSError, sqlite3.Error, diskcache.Timeout: If the index cannot be written.
    """
    reported = time.monotonic()
    rows: dict[bytes, SegmentRow] = {}
    num_deleted = 0
    for name, path in list_files(directory):
        try:
            row = _row_from_file(name, path)
        except OSError:
            continue  # The machine's fault, perhaps, and not the record's.
        if row is None or row.key in rows:
            num_deleted += 1
            with suppress(OSError):
                path.unlink()
            continue
        use = known.get(row.key)
        if use is not None:
            row = replace(
                row, last_used=use.last_used, uses=use.uses, pinned=use.pinned
            )
        rows[row.key] = row
        if time.monotonic() > reported + _PROGRESS_INTERVAL_S:
            reported = time.monotonic()
            with suppress(OSError):
                os.utime(directory)  # Who waits to open it sees that this goes on.
            _logger.warning("%d records found in %s so far", len(rows), directory)
    ordered = sorted(rows.values(), key=lambda row: row.last_used)
    for start in range(0, len(ordered), _ROWS_PER_TRANSACTION):
        with database.changing() as change:
            for row in ordered[start : start + _ROWS_PER_TRANSACTION]:
                change.clock += row.nbytes + 1
                database.insert(replace(row, priority=change.clock), change.number)
    _logger.warning(
        "the index in %s is made anew: %d records kept, %d unusable files deleted",
        directory,
        len(ordered),
        num_deleted,
    )


def _row_from_file(name: str, path: Path) -> SegmentRow | None:
    if name.endswith(TEMPORARY_SUFFIX):
        return None
    try:
        header, side_data, written_at = read_header(path)
    except RecordError:
        return None
    return SegmentRow(
        header.segment_key,
        header.parent_key,
        header.fingerprint,
        header.segment_index,
        header.num_tokens,
        file_len(header),
        name,
        written_at,
        1,
        False,
        side_data,
    )
