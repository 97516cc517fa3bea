"""Giving back what dead writers, lost rows and stray files take up."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from daric_rag.storage.index_faults import has_room
from daric_rag.storage.ledger import Ledger
from daric_rag.storage.record_file import TEMPORARY_SUFFIX
from daric_rag.storage.recovery import list_files, list_folders
from daric_rag.storage.shared_index import SharedIndex

__all__ = ["Reclaimed", "reclaim"]


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What was given back, or would be.

    Attributes:
        reservations: Records that a writer had begun when it died.
        orphans: Record files that no row names.
        temporary: Unfinished files that nobody is writing.
        rows: Rows without a file.
        nbytes: Bytes of all these.
    """

    reservations: int = 0
    orphans: int = 0
    temporary: int = 0
    rows: int = 0
    nbytes: int = 0


def reclaim(index: SharedIndex, ledger: Ledger, *, dry_run: bool = False) -> Reclaimed:
    """Look through the whole folder; other processes may go on meanwhile.

    Args:
        index: The store's index.
        ledger: Changes it.
        dry_run: Only count.

    Raises:
        OSError: If the store was opened for reading only.
        sqlite3.Error, diskcache.Timeout: If the index cannot be read or written.
    """
    if index.read_only and not dry_run:
        if not has_room(index.directory):
            raise OSError("the disk is full: free space or evict documents first")
        raise PermissionError("it was opened for reading only")
    dead = ledger.reclaim_dead(dry_run=dry_run)
    before = {row.filename: row for row in index.rows()}
    files = _sizes(index.directory)
    # In this order: a file that was there has a reservation here or a row below,
    # unless nobody wants it.
    reserved = {one.filename for one in index.reservations()}
    after = {row.filename for row in index.rows()}
    lost = [row for name, row in before.items() if name in after and name not in files]
    temporary = {
        name
        for name in files
        if name.endswith(TEMPORARY_SUFFIX)
        and name.removesuffix(TEMPORARY_SUFFIX) not in reserved
    }
    orphans = {
        name
        for name in files.keys() - after - reserved
        if not name.endswith(TEMPORARY_SUFFIX)
    }
    if not dry_run:
        for name in temporary | orphans:
            with suppress(OSError):
                ledger.path(name).unlink()
        for row in lost:
            ledger.remove([row.key], only=row.filename)
        _remove_empty_folders(index.directory)
    return Reclaimed(
        len(dead),
        len(orphans),
        len(temporary),
        len(lost),
        sum(one.nbytes for one in dead)
        + sum(files[name] for name in temporary | orphans)
        + sum(row.nbytes for row in lost),
    )


def _sizes(directory: Path) -> dict[str, int]:
    sizes = {}
    for name, path in list_files(directory):
        with suppress(OSError):
            sizes[name] = path.lstat().st_size
    return sizes


def _remove_empty_folders(directory: Path) -> None:
    for path in list_folders(directory):
        # Refused where there is something in it; a writer makes it again.
        with suppress(OSError):
            path.rmdir()
            path.parent.rmdir()
