"""What an operator does to a store while engines use it."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from daric_rag.errors import StoreError
from daric_rag.storage.cipher import RecordCipher
from daric_rag.storage.database import SegmentRow
from daric_rag.storage.disk import NO_LIMIT, DiskTier
from daric_rag.storage.documents import Document, DocumentTree
from daric_rag.storage.folder import MARKER
from daric_rag.storage.format import RecordError
from daric_rag.storage.index_faults import has_room

__all__ = [
    "NO_LIMIT",
    "Eviction",
    "VerifyReport",
    "carry_out",
    "open_existing",
    "plan_eviction",
    "store_facts",
    "verify_segments",
]

_ANY_MARKER: Final = "DARIC_STORE_"


@dataclass(frozen=True, slots=True)
class Eviction:
    """What evicting some documents would take away.

    Attributes:
        documents: Those that go.
        pinned: Those that stay because they are pinned.
        segments: To be deleted, children first; what other documents need is not
            among them.
    """

    documents: list[Document]
    pinned: list[Document]
    segments: list[SegmentRow]

    @property
    def nbytes(self) -> int:
        """Bytes that it frees."""
        return sum(row.nbytes for row in self.segments)


@dataclass(slots=True)
class VerifyReport:
    """What reading every record found.

    Attributes:
        num_records: Records that are whole.
        nbytes: Their bytes.
        damaged: Key and reason of records that will never be read again.
        unreadable: Key and reason of records that the machine could not read now.
        num_gone: Records evicted or replaced meanwhile.
        num_deleted: Damaged records deleted.
    """

    num_records: int = 0
    nbytes: int = 0
    damaged: list[tuple[bytes, str]] = field(default_factory=list)
    unreadable: list[tuple[bytes, str]] = field(default_factory=list)
    num_gone: int = 0
    num_deleted: int = 0


def open_existing(
    path: str | os.PathLike[str],
    *,
    capacity_bytes: int = NO_LIMIT,
    cipher: RecordCipher | None = None,
    writes: bool = False,
    creates: bool = False,
) -> DiskTier:
    """Open a store that is there; makes one only if told to.

    Args:
        path: Its folder.
        capacity_bytes: Budget for what will be written.
        cipher: If it is encrypted.
        writes: Whether a store that can only be read is of no use. One on a full
            disk is: evicting makes it writable.
        creates: Whether to make one where nothing is.

    Raises:
        StoreError: If there is none, or it cannot be opened as wanted.
    """
    directory = Path(path).expanduser().absolute()
    try:
        names = [entry.name for entry in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        raise StoreError(
            f"cannot look into {directory} ({error.strerror}): run as its owner"
        ) from error
    markers = sorted(name for name in names if name.startswith(_ANY_MARKER))
    if MARKER not in markers and (names or not creates):
        if markers:
            raise StoreError(
                f"the store in {directory} is of another version ({markers[-1]}, this "
                f"is {MARKER}): use the daric_rag that wrote it"
            )
        raise StoreError(
            f"no store in {directory}: engines make one there; name another folder "
            "with --store or DARIC_STORE"
        )
    disk = DiskTier(directory, capacity_bytes, cipher=cipher)
    if writes and disk.read_only and has_room(directory):
        disk.close()
        raise StoreError(
            f"the store in {directory} can only be read: make folder and file system "
            "writable for this user"
        )
    return disk


def plan_eviction(tree: DocumentTree, documents: Iterable[Document]) -> Eviction:
    """Say what goes if these documents are evicted; pinned ones stay."""
    pinned: list[Document] = []
    going: list[Document] = []
    for document in documents:
        (pinned if document.pinned else going).append(document)
    segments = [row for row in tree.only_of(going) if not row.pinned]
    return Eviction(going, pinned, segments)


def carry_out(disk: DiskTier, eviction: Eviction) -> int:
    """Evict what was planned; returns bytes freed.

    Raises:
        StoreError: If the store did not let go of it.
    """
    keys = [row.key for row in eviction.segments]
    freed = disk.evict(keys)
    if freed < eviction.nbytes:
        # Others may have evicted some of it meanwhile, which is as well.
        left = {row.key for row in disk.segments()} & set(keys)
        if left:
            raise StoreError(
                f"{len(left)} of {len(keys)} records could not be deleted from "
                f"{disk.directory}: see that it can be written, and try again"
            )
    return freed


def verify_segments(
    disk: DiskTier,
    segments: Sequence[SegmentRow],
    *,
    repair: bool = False,
    on_record: Callable[[], None] = lambda: None,
) -> VerifyReport:
    """Read records and check every byte of them.

    Args:
        disk: The store.
        segments: Some of `disk.segments()`.
        repair: Whether damaged records are deleted; they are computed again when
            needed.
        on_record: Called before every record.
    """
    report = VerifyReport()
    gone: list[SegmentRow] = []
    for row in segments:
        on_record()
        error = disk.verify(row.key)
        if error is None:
            report.num_records += 1
            report.nbytes += row.nbytes
        elif isinstance(error, RecordError):
            report.damaged.append((row.key, str(error)))
        elif isinstance(error, FileNotFoundError):
            gone.append(row)
        else:
            report.unreadable.append((row.key, str(error)))
    if gone:
        # Without its row a record was evicted; with it, its file is lost.
        files = {(row.key, row.filename) for row in disk.segments()}
        lost = [row for row in gone if (row.key, row.filename) in files]
        report.damaged += [(row.key, "missing: no such file") for row in lost]
        report.num_gone = len(gone) - len(lost)
    if repair:
        for key, _ in report.damaged:
            disk.delete(key)
        report.num_deleted = len(report.damaged)
    return report


def store_facts(disk: DiskTier, tree: DocumentTree) -> dict[str, Any]:
    """Return what a store holds, as JSON values; sizes in bytes."""
    documents = tree.documents
    used = [row.last_used for row in tree.rows]
    pinned = [d for d in documents if d.pinned]
    return {
        "store": str(disk.directory),
        "read_only": disk.read_only,
        "num_documents": len(documents),
        "num_incomplete": sum(not d.complete for d in documents),
        "num_pinned": len(pinned),
        "num_segments": len(tree.rows),
        "num_tokens": sum(row.num_tokens for row in tree.rows),
        "nbytes": sum(row.nbytes for row in tree.rows),
        "pinned_bytes": sum(row.nbytes for row in tree.segments_of(pinned)),
        "free_bytes": shutil.disk_usage(disk.directory).free,
        "oldest_use": min(used, default=None),
        "latest_use": max(used, default=None),
        "models": _models(tree),
        "namespaces": _namespaces(tree),
    }


def _models(tree: DocumentTree) -> list[dict[str, Any]]:
    nbytes: dict[bytes, int] = {}
    for row in tree.rows:
        nbytes[row.fingerprint] = nbytes.get(row.fingerprint, 0) + row.nbytes
    counts = Counter(d.fingerprint for d in tree.documents)
    return [
        {"model": model.hex(), "num_documents": counts[model], "nbytes": size}
        for model, size in sorted(nbytes.items(), key=lambda item: -item[1])
    ]


def _namespaces(tree: DocumentTree) -> list[dict[str, Any]]:
    counts = Counter(d.namespace for d in tree.documents)
    nbytes = tree.nbytes_by_namespace()
    return [
        {"namespace": name, "num_documents": counts[name], "nbytes": size}
        for name, size in sorted(nbytes.items(), key=lambda item: -item[1])
    ]
