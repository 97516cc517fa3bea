"""The store that the runtime sees: host memory first, then disk, behind one face.

| Call         | host             | queue          | disk                        |
|--------------|------------------|----------------|-----------------------------|
| `write`      | at once          | then           | behind, in one thread       |
| `read`       | first            | then           | last; a hit is promoted     |
| `contains`   | first            | then           | last                        |
| `clear_host` | drops the copies | -              | of what is here             |

A record in the queue is not evicted from host memory: it would free nothing there.
"""

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, Self

from daric_rag.errors import StoreError
from daric_rag.storage.base import Record, check_fits
from daric_rag.storage.disk import DiskTier
from daric_rag.storage.format import RecordHeader
from daric_rag.storage.host import HostTier
from daric_rag.storage.io_pool import WriteBehind
from daric_rag.storage.promotion import Promotion
from daric_rag.storage.saving import save
from daric_rag.storage.store_stats import StoreStats

__all__ = ["StoreStats", "TieredStore"]

# Half of the host tier at most waits for the disk and cannot be evicted; but one
# request's documents must find room in the queue however small the tier is.
_MIN_PENDING_BYTES: Final = 64 << 20
_MAX_PENDING_BYTES: Final = 256 << 20
_SUBMIT_TIMEOUT_S: Final = 0.05
_MAX_LOST: Final = 1 << 16  # keys


class TieredStore:
    """Records in host memory and, where there is one, on disk.

    Every method may be called from any thread. Losing any record at any moment costs
    its reader a recomputation and nothing else. So what a request waits for does not
    wait for a busy index or a slow disk: `write` does for `submit_timeout_s` at most,
    `contains` and `take_evicted` for milliseconds, and a read only for its files.
    `flush`, `close`, `pin`, `unpin` and `delete` return when it is done.

    Args:
        host: The upper tier; owned and closed by the store.
        disk: The lower tier, or None to keep records in memory only. Its `allocate`
            is best the host's, or promoting a record copies it.
        max_pending_bytes: Bytes that may wait for the disk; half the host tier's by
            default, but 64 to 256 MiB.
        submit_timeout_s: Seconds that `write` waits for room in that queue before
            it gives up the disk copy.
        require_disk: Whether memory keeps nothing that the disk does not take:
            `write` waits for room as long as it takes, and a record that could not
            be written is lost. Nothing changes where there is no disk tier.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None = None,
        *,
        max_pending_bytes: int | None = None,
        submit_timeout_s: float = _SUBMIT_TIMEOUT_S,
        require_disk: bool = False,
    ) -> None:
        self.host: Final = host
        self.disk: Final = disk
        self._require_disk = require_disk
        self._submit_timeout_s = None if require_disk else submit_timeout_s
        self._lock = threading.Lock()
        self._dropped_writes, self._closed = 0, False
        self._promotion = Promotion(host)
        self._lost: deque[bytes] = deque(maxlen=_MAX_LOST)
        self._demoted: deque[bytes] = deque(maxlen=_MAX_LOST)
        if max_pending_bytes is None:
            half = max(_MIN_PENDING_BYTES, host.capacity_bytes // 2)
            max_pending_bytes = min(_MAX_PENDING_BYTES, half)
        # Nothing of the writer may refer to the store, or it would never end.
        self._writer = WriteBehind(
            partial(save, host, disk, self._lost, require_disk=require_disk),
            max_pending_bytes=max_pending_bytes,
            on_exit=disk.close_thread if disk is not None else lambda: None,
            on_idle=disk.save_uses if disk is not None else lambda: None,
            hold=host.hold,
            release=host.release,
        )
        # A program that ends without close() still saves what it computed.
        weakref.finalize(self, self._writer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allocate(self, nbytes: int, *, parent: bytes | None = None) -> memoryview:
        """Return a writable 64-byte-aligned buffer to gather a payload into.

        Hand it to `write` and do not write to it afterwards: it is stored as it is.

        Args:
            nbytes: `payload_len` of the record to be.
            parent: Key of the segment before it, which is not evicted for it: a
                document that is new might else displace itself.

        Raises:
            StoreError: If memory is exhausted.
        """
        return self.host.allocate(nbytes, parent=parent)

    def contains(self, key: bytes) -> bool:
        """Whether `read` would probably hit; reads no payload, touches nothing."""
        return self._knows(key) or (self.disk is not None and self.disk.contains(key))

    def in_memory(self, key: bytes) -> bool:
        """Whether `read` would need no disk; touches nothing."""
        return self.host.contains(key) or self._writer.find(key) is not None

    def read(self, key: bytes, fingerprint: bytes) -> Record | None:
        """Return a verified record from the nearest tier; None is a miss."""
        return self.read_many([key], fingerprint)[0]

    def read_many(
        self, keys: Sequence[bytes], fingerprint: bytes
    ) -> list[Record | None]:
        """Read what a whole request needs; files are read side by side.

        Args:
            keys: `SegmentKey`s, in any order; a key may occur twice.
            fingerprint: `ModelFingerprint`; a record of another model is a miss.

        Returns:
            One record or None per key, in the order of `keys`. All stay valid while
            held, even if together they exceed the host tier.
        """
        distinct = list(dict.fromkeys(keys))
        # Or what disk reads would drive out what the host has of the same request.
        self.host.hold(distinct)
        try:
            found = self._read_memory(distinct, fingerprint)
            if self.disk is not None:
                # Or the disk would take the records in constant use for the oldest.
                self.disk.touch(found)
                self._writer.start()  # It tells the uses.
                absent = [key for key in distinct if key not in found]
                found |= self._read_disk(self.disk, absent, fingerprint)
        finally:
            self.host.release(distinct)
        return [found.get(key) for key in keys]

    def write(
        self, header: RecordHeader, payload: memoryview, side_data: bytes = b""
    ) -> None:
        """Store a record: readable when this returns, on disk soon after.

        Args:
            header: Shape, dtype and identity.
            payload: `header.payload_len` contiguous bytes; shared and not copied if
                they are a buffer of `allocate`.
            side_data: `header.side_data_len` bytes.

        Raises:
            StoreError: If payload or side data and header disagree, if the record
                fits no tier, or after `close`.
        """
        if self._closed:
            raise StoreError("the store is closed: open it again to write")
        record = Record(header, payload, side_data)
        fits_host = record.record_bytes <= self.host.capacity_bytes
        disk_bytes = 0 if self.disk is None else self.disk.capacity_bytes
        fits_disk = record.record_bytes <= disk_bytes
        if self.disk is not None and self._require_disk and not fits_disk:
            check_fits(record, disk_bytes, "disk_bytes")
        if not fits_host and not fits_disk:
            check_fits(record, self.host.capacity_bytes, "host_bytes")
        if fits_host:
            self.host.write(record)
        if self.disk is None:
            return
        if not fits_disk or not self._writer.submit(
            record, timeout_s=self._submit_timeout_s
        ):
            with self._lock:
                self._dropped_writes += 1

    def delete(self, key: bytes) -> None:
        """Forget a record in every tier; a key that is absent is no error."""
        self._promotion.delete(key)
        self._writer.cancel(key)
        if self.disk is not None:
            self.disk.delete(key)

    def protect(self, keys: Sequence[bytes]) -> None:
        """Keep records from eviction by this process while they are in use."""
        self.host.hold(keys)
        if self.disk is not None:
            self.disk.protect(keys)

    def release(self, keys: Sequence[bytes]) -> None:
        """Undo one `protect` of the same keys."""
        self.host.release(keys)
        if self.disk is not None:
            self.disk.release(keys)

    def pin(self, keys: Sequence[bytes]) -> int:
        """Keep records from eviction until `unpin`.

        With a disk tier it is durable and every process sees it. Those that come to
        host memory stay there as well, so let them be fewer than it holds.

        Returns:
            Number of records that were not pinned before; on disk, if there is one.
        """
        for key in keys:
            self._writer.wait_for(key)
        num_pinned = self.host.pin(keys)
        return num_pinned if self.disk is None else self.disk.pin(keys)

    def unpin(self, keys: Sequence[bytes]) -> int:
        """Undo `pin`; returns the number of records that were pinned, as `pin` does."""
        num_unpinned = self.host.unpin(keys)
        return num_unpinned if self.disk is None else self.disk.unpin(keys)

    def take_evicted(self) -> list[bytes]:
        """Keys that every tier has lost since last asked; bounded, oldest forgotten."""
        evicted = [] if self.disk is None else self.disk.take_evicted()
        if self._require_disk:
            for key in evicted:
                self.host.delete(key)
        from_host = self.host.take_evicted()
        self._demoted.extend(from_host)
        lost = [self._lost.popleft() for _ in range(len(self._lost))]
        gone = dict.fromkeys([*from_host, *evicted, *lost])
        # The thread that failed to write one is still at it: to be told next time.
        self._lost.extend(key for key in lost if self._writer.find(key) is not None)
        return [key for key in gone if not self._knows(key)]

    def take_demoted(self) -> list[bytes]:
        """Keys that left memory before `take_evicted` was last asked, gone or not.

        Bounded, oldest forgotten; each is told once.
        """
        demoted: dict[bytes, None] = {}
        while self._demoted:
            demoted[self._demoted.popleft()] = None
        return [key for key in demoted if not self.in_memory(key)]

    def keys(self) -> list[bytes]:
        """A snapshot of the keys held in any tier, each once."""
        on_disk = self.disk.keys() if self.disk is not None else []
        return list(dict.fromkeys([*on_disk, *self.host.keys()]))

    def clear_host(self) -> None:
        """Drop the host copies of records that are on disk, to measure the disk."""
        if self.disk is not None:
            for key in filter(self.disk.contains, self.host.keys()):
                self.host.delete(key)
                self._demoted.append(key)

    def stats(self) -> StoreStats:
        """A snapshot of all counters."""
        queued_records, queued_bytes = self._writer.queued()
        return StoreStats(
            host=self.host.stats(),
            disk=self.disk.stats() if self.disk is not None else None,
            queued_records=queued_records,
            queued_bytes=queued_bytes,
            dropped_writes=self._dropped_writes + self._writer.failures,
            promoted=self._promotion.num_promoted,
            overflow_bytes=self.host.overflow_bytes,
            read_only=self.disk is not None and self.disk.read_only,
        )

    def flush(self) -> None:
        """Return when every record written so far is on disk, or was given up."""
        self._writer.flush()
        if self.disk is not None:
            self.disk.flush()

    def close_thread(self) -> None:
        """Release what reading holds in the calling thread; it may read again."""
        if self.disk is not None:
            self.disk.close_thread()

    def close(self) -> None:
        """Flush, then release threads, files and memory. Harmless when repeated."""
        self._closed = True
        self._writer.close()
        if self.disk is not None:
            self.disk.close()
        self.host.close()

    def _knows(self, key: bytes) -> bool:
        on_disk = self.disk is not None and self.disk.knows(key)
        return on_disk or self.in_memory(key)

    def _read_memory(
        self, keys: Sequence[bytes], fingerprint: bytes
    ) -> dict[bytes, Record]:
        found = {}
        held = self.host.read_many(keys, fingerprint)
        for key, record in zip(keys, held, strict=True):
            record = record or self._writer.find(key)
            if record is not None and record.header.fingerprint == fingerprint:
                found[key] = record
        return found

    def _read_disk(
        self, disk: DiskTier, keys: Sequence[bytes], fingerprint: bytes
    ) -> dict[bytes, Record]:
        if not keys:
            return {}
        begun = self._promotion.begin()
        with self._writer.reading():
            records = disk.read_many(keys, fingerprint)
        found = {record.key: record for record in records if record is not None}
        self._promotion.promote(found.values(), begun)
        return found
