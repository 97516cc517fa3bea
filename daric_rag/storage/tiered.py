"""The store that the runtime sees: host memory first, then disk, behind one face.

| Call         | host             | queue          | disk                        |
|--------------|------------------|----------------|-----------------------------|
| `write`      | at once          | then           | behind, in one thread       |
| `read`       | first            | then           | last; a hit is promoted     |
| `contains`   | first            | then           | last                        |
| `clear_host` | drops the copies | -              | of what is here             |
"""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from daric_rag.errors import StoreError
from daric_rag.storage.base import Record, TierStats, check_fits
from daric_rag.storage.disk import DiskTier
from daric_rag.storage.format import RecordHeader
from daric_rag.storage.host import HostTier
from daric_rag.storage.io_pool import WriteBehind

_MAX_PENDING_BYTES: Final = 256 << 20
_SUBMIT_TIMEOUT_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What the store did since it was opened.

    Attributes:
        host: Counters of the host tier.
        disk: Counters of the disk tier, None without one.
        queued_records: Records on their way to disk.
        queued_bytes: Their bytes.
        dropped_writes: Records that went to host memory only, because the disk
            could not keep up or was too small for them.
        promoted: Records copied from disk to host memory by a read.
    """

    host: TierStats
    disk: TierStats | None
    queued_records: int
    queued_bytes: int
    dropped_writes: int
    promoted: int


class TieredStore:
    """Records in host memory and, where there is one, on disk.

    Every method may be called from any thread. Losing any record at any moment costs
    its reader a recomputation and nothing else, so no method waits for the disk
    longer than `submit_timeout_s`, `flush`, `close` and a missed read apart.

    Args:
        host: The upper tier; owned and closed by the store.
        disk: The lower tier, or None to keep records in memory only.
        max_pending_bytes: Bytes that may wait for the disk. They are mostly the
            host tier's own buffers, and extra memory only once evicted there.
        submit_timeout_s: Seconds that `write` waits for room in that queue before
            it gives up the disk copy.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None = None,
        *,
        max_pending_bytes: int = _MAX_PENDING_BYTES,
        submit_timeout_s: float = _SUBMIT_TIMEOUT_S,
    ) -> None:
        self.host: Final = host
        self.disk: Final = disk
        self._submit_timeout_s = submit_timeout_s
        self._lock = threading.Lock()
        self._dropped_writes = self._promoted = 0
        self._closed = False
        self._writer: WriteBehind | None = None
        if disk is not None:
            self._writer = WriteBehind(
                disk.write,
                max_pending_bytes=max_pending_bytes,
                on_exit=disk.close_thread,
            )
            # A program that ends without close() still saves what it computed.
            weakref.finalize(self, self._writer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allocate(self, nbytes: int) -> memoryview:
        """Return a writable page-aligned buffer to gather a payload into.

        Hand it to `write` and do not write to it afterwards: it is stored as it is.

        Raises:
            StoreError: If memory is exhausted.
        """
        return self.host.allocate(nbytes)

    def contains(self, key: bytes) -> bool:
        """Whether `read` would probably hit; reads no payload, touches nothing."""
        if self.host.contains(key):
            return True
        if self._writer is not None and self._writer.find(key) is not None:
            return True
        return self.disk is not None and self.disk.contains(key)

    def read(self, key: bytes, fingerprint: bytes) -> Record | None:
        """Return a verified record from the nearest tier; None is a miss.

        Args:
            key: `SegmentKey`, 32 bytes.
            fingerprint: `ModelFingerprint`, 32 bytes; a record of another model is
                a miss.
        """
        return self.read_many([key], fingerprint)[0]

    def read_many(
        self, keys: Sequence[bytes], fingerprint: bytes
    ) -> list[Record | None]:
        """Read what a whole request needs; files are read side by side.

        Args:
            keys: `SegmentKey`s, in any order; a key may occur twice.
            fingerprint: `ModelFingerprint`, 32 bytes.

        Returns:
            One record or None per key, in the order of `keys`. All stay valid while
            held, even if together they exceed the host tier.
        """
        found: dict[bytes, Record] = {}
        absent: list[bytes] = []
        for key in dict.fromkeys(keys):
            record = self._read_memory(key, fingerprint)
            if record is None:
                absent.append(key)
            else:
                found[key] = record
        if self.disk is not None and found:
            # Or the disk would take the records in constant use for the oldest.
            self.disk.touch(found)
        if self.disk is not None and absent:
            for record in self.disk.read_many(absent, fingerprint):
                if record is not None:
                    found[record.key] = record
                    self._promote(record)
        return [found.get(key) for key in keys]

    def write(self, header: RecordHeader, payload: memoryview) -> None:
        """Store a record: readable when this returns, on disk soon after.

        Args:
            header: Shape, dtype and identity.
            payload: `header.payload_len` contiguous bytes, shared and not copied;
                best a buffer of `allocate`.

        Raises:
            StoreError: If payload and header disagree, if the record fits no tier,
                or after `close`.
        """
        if self._closed:
            raise StoreError("the store is closed: open it again to write")
        record = Record(header, payload)
        fits_host = record.record_bytes <= self.host.capacity_bytes
        disk_bytes = 0 if self.disk is None else self.disk.capacity_bytes
        if not fits_host and record.record_bytes > disk_bytes:
            check_fits(record, self.host.capacity_bytes, "host_bytes")
        if fits_host:
            self.host.write(record)
        if self._writer is None or self.disk is None or self.disk.contains(record.key):
            return
        if record.record_bytes > disk_bytes or not self._writer.submit(
            record, timeout_s=self._submit_timeout_s
        ):
            with self._lock:
                self._dropped_writes += 1

    def delete(self, key: bytes) -> None:
        """Forget a record in every tier; a key that is absent is no error."""
        self.host.delete(key)
        if self._writer is not None:
            self._writer.cancel(key)
        if self.disk is not None:
            self.disk.delete(key)

    def keys(self) -> list[bytes]:
        """A snapshot of the keys held in any tier, each once."""
        keys = dict.fromkeys(self.disk.keys() if self.disk is not None else ())
        keys.update(dict.fromkeys(self.host.keys()))
        return list(keys)

    def clear_host(self) -> None:
        """Drop the host copies of records that are on disk, to measure the disk."""
        if self.disk is None:
            return
        held = self.host.keys()
        for key in held:
            if self.disk.contains(key):
                self.host.delete(key)

    def stats(self) -> StoreStats:
        """A snapshot of all counters."""
        queued_records = queued_bytes = 0
        dropped_writes = self._dropped_writes
        if self._writer is not None:
            queued_records, queued_bytes = self._writer.queued()
            dropped_writes += self._writer.failures
        return StoreStats(
            host=self.host.stats(),
            disk=self.disk.stats() if self.disk is not None else None,
            queued_records=queued_records,
            queued_bytes=queued_bytes,
            dropped_writes=dropped_writes,
            promoted=self._promoted,
        )

    def flush(self) -> None:
        """Return when every record written so far is on disk, or was given up."""
        if self._writer is not None:
            self._writer.flush()
        if self.disk is not None:
            self.disk.flush()

    def close(self) -> None:
        """Flush, then release threads, files and memory. Harmless when repeated."""
        self._closed = True
        if self._writer is not None:
            self._writer.close()
        if self.disk is not None:
            self.disk.close()
        self.host.close()

    def _read_memory(self, key: bytes, fingerprint: bytes) -> Record | None:
        record = self.host.read(key, fingerprint)
        if record is None and self._writer is not None:
            record = self._writer.find(key)
            if record is not None and record.header.fingerprint != fingerprint:
                return None
        return record

    def _promote(self, record: Record) -> None:
        if record.record_bytes <= self.host.capacity_bytes:
            self.host.write(record)
            with self._lock:
                self._promoted += 1
