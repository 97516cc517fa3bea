"""Documents in one file, from one store to another: reading it.

Import only from whom you trust: checksums tell damage and not forgery, and whoever
wrote the file may have put false keys and values under any document's key, which steer
the answers about it. No more than that: records that the store has are not replaced,
and nothing in the file is extracted to a path. Its records are read one at a time, each
verified like one of the store's own files and no larger in memory than it is in the
file; a damaged one costs itself alone, for behind it the next member's header is looked
for.
"""

import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from daric_rag.config import shown
from daric_rag.errors import StoreError
from daric_rag.storage.archive import FORMAT_NAME, MANIFEST, VERSION, Failures
from daric_rag.storage.base import Record
from daric_rag.storage.cipher import OVERHEAD, RecordCipher
from daric_rag.storage.disk import DiskTier
from daric_rag.storage.format import (
    HEADER_LEN,
    RecordError,
    RecordHeader,
    body_checksum,
    check_identity,
    decode_header,
)
from daric_rag.storage.record_file import file_len, payload_aad, side_data_aad

__all__ = ["ImportReport", "import_records"]

_BLOCK: Final = tarfile.BLOCKSIZE
_MAGIC: Final = b"ustar"
_MAGIC_AT: Final = 257
_RECORD_NAME: Final = re.compile(r"records/([0-9a-f]{64})\.record")
# A million documents with long titles.
_MAX_MANIFEST_LEN: Final = 512 << 20


@dataclass(slots=True)
class ImportReport:
    """What an import did.

    Attributes:
        num_records: Records added.
        nbytes: Their bytes.
        num_present: Records that the store had already.
        num_missing: Records that the manifest counts and that were not found.
        num_pinned: Documents pinned, as they were where they come from.
        failures: Members that were refused.
        stopped: Why the import ended early, "" if it did not.
    """

    num_records: int = 0
    nbytes: int = 0
    num_present: int = 0
    num_missing: int = 0
    num_pinned: int = 0
    failures: Failures = field(default_factory=Failures)
    stopped: str = ""


def import_records(
    disk: DiskTier,
    path: Path,
    *,
    cipher: RecordCipher | None = None,
    may_evict: bool = False,
    expect: Callable[[int], None] = lambda _: None,
    on_record: Callable[[], None] = lambda: None,
) -> ImportReport:
    """Add an archive's records to a store; those that it has already are skipped.

    Args:
        disk: A store that can be written; its budget holds.
        path: What `export_documents` wrote.
        cipher: Opens the archive's records if they are sealed. In the store they are
            as its own records are.
        may_evict: Whether what the store holds may make room. If not, the import
            stops before the first record that would need it.
        expect: Told how many records there should be, if the manifest is readable.
        on_record: Called after every member.

    Raises:
        StoreError: If the file cannot be read, holds no record, is of a later
            version, or is sealed with a key that `cipher` does not have.
    """
    task = _Import(disk, path, cipher, may_evict, expect)
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            for member in _members(file, length):
                task.take(file, member, length)
                if task.report.stopped:
                    break
                on_record()
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot read {path} ({error}): give a file that `daric store export` wrote"
        ) from error
    return task.finish()


class _Import:
    """One import under way: takes member by member into the report."""

    def __init__(
        self,
        disk: DiskTier,
        path: Path,
        cipher: RecordCipher | None,
        may_evict: bool,
        expect: Callable[[int], None],
    ) -> None:
        self.report = ImportReport()
        self._disk = disk
        self._path = path
        self._cipher = cipher
        self._may_evict = may_evict
        self._num_expected: int | None = None
        self._expect = expect
        self._pinned: set[bytes] = set()
        self._to_pin: list[bytes] = []

    def take(self, file: BinaryIO, member: tarfile.TarInfo, length: int) -> None:
        """Take a member whose content begins at the file's position.

        Args:
            file: The archive.
            member: Its header.
            length: Bytes of the archive.

        Raises:
            StoreError: If the manifest says that the archive cannot be imported.
        """
        name = member.name.removeprefix("./")
        try:
            if file.tell() + member.size > length:
                raise RecordError("short", "the archive ends within it")
            if name == MANIFEST and member.isreg():
                self._take_manifest(file, member.size)
                return
            named = _RECORD_NAME.fullmatch(name)
            if named is None or not member.isreg():
                raise RecordError("magic", "no record")
            key = bytes.fromhex(named[1])
            self._take_record(file, member.size, key)
            if key in self._pinned and not self.report.stopped:
                self._to_pin.append(key)
        except RecordError as error:
            self.report.failures.add(ascii(name[:80]), error.kind, str(error))

    def finish(self) -> ImportReport:
        """Pin what was pinned, and return the report.

        Raises:
            StoreError: If no member was one of an archive.
        """
        report = self.report
        num_taken = report.num_records + report.num_present
        if self._num_expected is None and not (num_taken or report.stopped):
            raise StoreError(
                f"{self._path} holds no records: give a file that `daric store export` "
                "wrote"
            )
        if self._num_expected is not None and not report.stopped:
            missing = self._num_expected - num_taken - report.failures.total
            report.num_missing = max(0, missing)
        # Only what came with the archive: it has no say over other documents.
        report.num_pinned = self._disk.pin(self._to_pin)
        return report

    def _take_manifest(self, file: BinaryIO, size: int) -> None:
        if size > _MAX_MANIFEST_LEN:
            raise RecordError("length", f"a manifest of {size} bytes")
        try:
            fields = json.loads(file.read(size))
            if (
                fields["format"] != FORMAT_NAME
                or type(fields["num_records"]) is not int
            ):
                raise ValueError("not the fields of ours")
            self._check_manifest(fields)
            documents = fields["documents"]
            pinned = {bytes.fromhex(d["key"]) for d in documents if d["pinned"]}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RecordError("magic", "no manifest, or a damaged one") from error
        self._num_expected = fields["num_records"]
        self._pinned = pinned
        self._expect(fields["num_records"])

    def _check_manifest(self, fields: dict[str, Any]) -> None:
        if fields["version"] > VERSION:
            raise StoreError(
                f"{self._path} is an archive of version {fields['version']}, this is "
                f"{VERSION}: import it with a later daric_rag"
            )
        key_id = fields["key_id"]
        if key_id is None or (self._cipher and self._cipher.key_id == key_id):
            return
        raise StoreError(
            f"{self._path} is sealed with the key {shown(key_id)}: pass that key's "
            "file as --archive-key-file"
        )

    def _take_record(self, file: BinaryIO, size: int, key: bytes) -> None:
        if self._disk.contains(key):
            self.report.num_present += 1
            return
        header, checksum = decode_header(file.read(HEADER_LEN))
        check_identity(header, key, header.fingerprint)
        if file_len(header) != size:
            raise RecordError("length", f"{size} bytes, not {file_len(header)}")
        # What it takes in the store, where it may be sealed.
        nbytes = file_len(replace(header, encrypted=True))
        if nbytes > self._disk.capacity_bytes:
            raise RecordError("length", f"{nbytes} bytes exceed the whole budget")
        used, capacity = self._disk.nbytes, self._disk.capacity_bytes
        if used + nbytes > capacity and not self._may_evict:
            self.report.stopped = (
                f"the store holds {used:,} of {capacity:,} bytes: raise --disk-bytes, "
                "or pass --evict"
            )
            return
        record = _read_body(file, header, checksum, self._cipher)
        num_failed = self._disk.stats().failed_writes
        self._disk.write(record)
        if self._disk.stats().failed_writes > num_failed:
            self.report.stopped = (
                "a record was not saved: make room on the disk, see that the store "
                "can be written, or unpin documents"
            )
            return
        self.report.num_records += 1
        self.report.nbytes += size


def _read_body(
    file: BinaryIO, header: RecordHeader, checksum: int, cipher: RecordCipher | None
) -> Record:
    """Read and verify what follows a header, from a file known to be long enough."""
    body = memoryview(bytearray(file_len(header) - HEADER_LEN))
    if file.readinto(body) != len(body):  # type: ignore[attr-defined]
        raise RecordError("short", "the archive ends within it")
    if body_checksum(body) != checksum:
        raise RecordError("checksum", "the body is damaged")
    plain = replace(header, encrypted=False)
    if not header.encrypted:
        side_data = bytes(body[header.payload_len :])
        return Record(plain, body[: header.payload_len], side_data)
    if cipher is None:
        raise RecordError("identity", "sealed, and no key is given")
    payload = memoryview(bytearray(header.payload_len))
    side = memoryview(bytearray(header.side_data_len))
    sealed_len = len(payload) + OVERHEAD
    cipher.open_into(payload_aad(header), body[:sealed_len], payload)
    if side:
        cipher.open_into(side_data_aad(header.segment_key), body[sealed_len:], side)
    return Record(plain, payload, bytes(side))


def _members(file: BinaryIO, length: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar, with the file at each one's content.

    Not by TarFile: it ends silently at a damaged header, and reads into memory
    whatever length an extended header claims.
    """
    offset = 0
    while offset + _BLOCK <= length:
        file.seek(offset)
        member = _member_of(file.read(_BLOCK))
        offset += _BLOCK
        if member is not None:
            yield member
            if offset + member.size <= length:
                offset += -(-member.size // _BLOCK) * _BLOCK


def _member_of(block: bytes) -> tarfile.TarInfo | None:
    if block[_MAGIC_AT : _MAGIC_AT + len(_MAGIC)] != _MAGIC:
        return None
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return member if member.size >= 0 else None
