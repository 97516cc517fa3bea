"""Documents in one file, to carry them from one store to another: writing it.

The file is an uncompressed tar (keys and values do not compress):

| member               | what it is                                                 |
|----------------------|------------------------------------------------------------|
| manifest.json        | which documents, which of them are pinned; titles, tenants |
|                      | and models only if the records are not sealed              |
| records/<key>.record | a record as it is in the store's folder, sealed if it is   |

The records stand document by document, each from its beginning, so that of a file cut
short the first documents can still be used. `archive_import` reads it.
"""

import json
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from daric_rag.errors import StoreError
from daric_rag.storage.documents import Document, DocumentTree
from daric_rag.storage.format import (
    HEADER_LEN,
    RecordError,
    body_checksum,
    decode_header,
)

if TYPE_CHECKING:
    from daric_rag.storage.database import SegmentRow

__all__ = [
    "FORMAT_NAME",
    "MANIFEST",
    "MAX_EXAMPLES",
    "VERSION",
    "ExportReport",
    "Failures",
    "export_documents",
    "member_name",
]

FORMAT_NAME: Final = "daric_rag archive"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
MAX_EXAMPLES: Final = 20


@dataclass(slots=True)
class Failures:
    """What could not be carried over, counted by reason.

    Attributes:
        counts: Records per reason.
        examples: What the first ones said.
    """

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Records over all reasons."""
        return sum(self.counts.values())

    def add(self, name: str, reason: str, message: str) -> None:
        """Count one record; `name` says which."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{name}: {message}")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        num_documents: Documents chosen.
        num_records: Records written.
        nbytes: Their bytes.
        failures: Chosen records that could not be read, and are not in the file.
    """

    num_documents: int
    num_records: int
    nbytes: int
    failures: Failures


def export_documents(
    directory: Path,
    tree: DocumentTree,
    documents: Sequence[Document],
    path: Path,
    *,
    key_id: str | None = None,
    overwrite: bool = False,
    on_record: Callable[[], None] = lambda: None,
) -> ExportReport:
    """Write documents' records to one file, each verified by its checksum.

    The file appears whole or not at all, and only its owner may read it: keys and
    values reveal the text that they were computed from. Records are copied as they
    are; those of an encrypted store stay sealed.

    Args:
        directory: The store's folder.
        tree: Of the store's segments.
        documents: Some of the tree's.
        path: The file.
        key_id: Of the key that the store is sealed with.
        overwrite: Whether a file of that name may be replaced.
        on_record: Called after every record.

    Raises:
        StoreError: If there is such a file, or anything else of that name, or it
            cannot be written.
    """
    # Not what a link leads to: the link itself, or a device, is what would go.
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise StoreError(f"{path} is there and no regular file: choose another name")
    if path.exists() and not overwrite:
        raise StoreError(f"{path} exists: choose another name, or pass --overwrite")
    rows = tree.segments_of(documents)
    failures = Failures()
    num_records = nbytes = 0
    try:
        with _whole_file(path) as file:
            _add(file, MANIFEST, _manifest(documents, rows, key_id))
            for row in rows:
                try:
                    content = _read_verified(directory / row.filename, row)
                except RecordError as error:
                    failures.add(row.key.hex(), error.kind, str(error))
                except FileNotFoundError:
                    # Evicted since the tree was made.
                    failures.add(row.key.hex(), "gone", "no longer in the store")
                else:
                    _add(file, member_name(row.key), content)
                    num_records += 1
                    nbytes += len(content)
                on_record()
    except OSError as error:
        raise StoreError(
            f"the export to {path} failed ({error}): choose a folder that can be "
            "written and has room; nothing was left there"
        ) from error
    return ExportReport(len(documents), num_records, nbytes, failures)


def member_name(key: bytes) -> str:
    """Return what a record is called in the file."""
    return f"records/{key.hex()}.record"


def _manifest(
    documents: Sequence[Document], rows: "Sequence[SegmentRow]", key_id: str | None
) -> bytes:
    fields = {
        "format": FORMAT_NAME,
        "version": VERSION,
        "key_id": key_id,
        "num_records": len(rows),
        "nbytes": sum(row.nbytes for row in rows),
        "documents": [_described(d, is_sealed=key_id is not None) for d in documents],
    }
    return json.dumps(fields, separators=(",", ":")).encode("ascii")


def _described(document: Document, *, is_sealed: bool) -> dict[str, object]:
    needed = {
        "key": document.key.hex(),
        "num_tokens": document.num_tokens,
        "pinned": document.pinned,
    }
    if is_sealed:
        return needed  # The titles are in the records, where only the key opens them.
    return needed | {
        "title": document.title,
        "namespace": document.namespace,
        "model": document.fingerprint.hex(),
    }


def _read_verified(path: Path, row: "SegmentRow") -> bytes:
    """Return a record's file as it is.

    Raises:
        FileNotFoundError: If it is gone.
        RecordError: If it is damaged or another's.
    """
    try:
        # Neither a link nor a pipe in a record's place may lead us elsewhere.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise RecordError("identity", f"{path.name} is no file")
            # Before memory is taken: the row may say anything.
            if status.st_size != row.nbytes:
                raise RecordError("length", f"{path.name} is not {row.nbytes} bytes")
            content = file.read(row.nbytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RecordError("short", f"{path.name} cannot be read: {error}") from error
    header, checksum = decode_header(content)
    if header.segment_key != row.key:
        raise RecordError("identity", "the record belongs to another segment")
    if len(content) != row.nbytes:
        raise RecordError("short", f"{path.name} was cut while it was read")
    if body_checksum(memoryview(content)[HEADER_LEN:]) != checksum:
        raise RecordError("checksum", f"the body of {path.name} is damaged")
    return content


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that gets its name at the end; after an error nothing is left."""
    descriptor, name = tempfile.mkstemp(
        prefix=f".{path.name[:40]}.", suffix=".tmp", dir=path.parent
    )
    try:
        with open(descriptor, "wb") as file:
            yield file
            # A tar ends with two blocks of zeros.
            file.write(bytes(2 * tarfile.BLOCKSIZE))
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _add(file: BinaryIO, name: str, content: bytes) -> None:
    # Not by TarFile.addfile: it keeps an object for every member it ever wrote.
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o600
    file.write(member.tobuf(tarfile.GNU_FORMAT, "ascii", "strict"))
    file.write(content)
    file.write(bytes(-len(content) % tarfile.BLOCKSIZE))
