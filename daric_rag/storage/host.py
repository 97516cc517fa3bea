"""The host tier: records in memory under a byte budget, and where buffers come from.

A read hands out the very buffer that was written: no copy, no checksum.
"""

import mmap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from daric_rag.errors import StoreError
from daric_rag.storage.base import Record, TierStats, check_fits

_HUGE_PAGE_BYTES: Final = 2 << 20
_DEFAULT_IDLE_BYTES: Final = 256 << 20


class BufferPool:
    """Page-aligned buffers whose memory is used again once nobody holds them.

    A buffer's first use is what costs: the kernel clears each page as it is touched.
    Reading 6 MB records into fresh 4 KiB pages ran at 2.3 GB/s, into fresh huge
    pages at 11 GB/s and into memory used before at 16 GB/s, so buffers ask for huge
    pages and return here. A buffer returns when the last view, array or tensor made
    from it is gone; until then nothing touches it.

    Args:
        max_idle_bytes: Memory kept for reuse while unused; the rest is unmapped.
    """

    def __init__(self, max_idle_bytes: int = _DEFAULT_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle_bytes = 0
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes mapped and waiting for reuse."""
        return self._idle_bytes

    def allocate(self, nbytes: int) -> memoryview:
        """Return a writable, page-aligned buffer with arbitrary content.

        Args:
            nbytes: Length of the view, at least 1.

        Raises:
            StoreError: If `nbytes` is not positive or memory is exhausted.
        """
        if nbytes < 1:
            raise StoreError(f"cannot allocate {nbytes} bytes: ask for 1 or more")
        capacity = _capacity_for(nbytes)
        with self._lock:
            same_size = self._idle.get(capacity)
            mapping = same_size.pop() if same_size else None
            if mapping is not None:
                self._idle_bytes -= capacity
        if mapping is None:
            mapping = _map_pages(capacity)
        # The array's life is the buffer's: every view of it holds the array, and an
        # mmap alone could not tell that its last view is gone.
        array = np.frombuffer(mapping, dtype=np.uint8)
        weakref.finalize(array, self._take_back, mapping, capacity).atexit = False
        return array.data[:nbytes]

    def _take_back(self, mapping: mmap.mmap, capacity: int) -> None:
        # A finalizer may run inside any allocation, this pool's own included, so it
        # must not wait: a busy pool lets the buffer go and the kernel unmaps it.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._idle_bytes + capacity <= self._max_idle_bytes:
                self._idle.setdefault(capacity, []).append(mapping)
                self._idle_bytes += capacity
        finally:
            self._lock.release()


def _capacity_for(nbytes: int) -> int:
    # Eight sizes per power of two: records of nearly equal length share buffers, at
    # most an eighth is lost, and a 256-token segment mostly fills whole huge pages.
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def _map_pages(capacity: int) -> mmap.mmap:
    try:
        # Private: Python's default is shared, whose pages took twice as long.
        mapping = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StoreError(
            f"no memory for a buffer of {capacity} bytes: lower host_bytes"
        ) from error
    if capacity >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages is slower on first use, nothing else.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class HostTier:
    """Records in host memory, least recently used evicted first.

    Args:
        capacity_bytes: Budget for records held. Buffers round up to whole pages,
            by an eighth at most, and idle buffers stay outside the budget.
        pool: Where `allocate` takes buffers from; a pool of its own if None.
    """

    def __init__(self, capacity_bytes: int, *, pool: BufferPool | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        if pool is None:
            pool = BufferPool(min(_DEFAULT_IDLE_BYTES, capacity_bytes // 4))
        self.pool: Final = pool
        self._records: OrderedDict[bytes, Record] = OrderedDict()
        self._lock = threading.Lock()
        self._nbytes = 0
        self._hits = self._misses = self._corrupt = self._evicted = 0

    @property
    def capacity_bytes(self) -> int:
        """The budget; `nbytes` never exceeds it."""
        return self._capacity_bytes

    @property
    def nbytes(self) -> int:
        """Bytes held, headers included."""
        return self._nbytes

    def allocate(self, nbytes: int) -> memoryview:
        """Return a writable buffer to gather a payload into, then to `write`.

        Args:
            nbytes: `payload_len` of the record to be.

        Raises:
            StoreError: If memory is exhausted.
        """
        return self.pool.allocate(nbytes)

    def contains(self, key: bytes) -> bool:
        """Whether the record is held; touches nothing."""
        with self._lock:
            return key in self._records

    def read(self, key: bytes, fingerprint: bytes) -> Record | None:
        """Return the record as written, without a copy; None is a miss."""
        with self._lock:
            record = self._records.get(key)
            if record is not None and record.header.fingerprint != fingerprint:
                self._remove(key)
                self._corrupt += 1
                record = None
            if record is None:
                self._misses += 1
                return None
            self._records.move_to_end(key)
            self._hits += 1
            return record

    def read_many(
        self, keys: Sequence[bytes], fingerprint: bytes
    ) -> list[Record | None]:
        """`read` for several keys; one result per key, in their order."""
        return [self.read(key, fingerprint) for key in keys]

    def write(self, record: Record) -> None:
        """Hold a record, sharing its buffer, which nobody may write to any more.

        Raises:
            StoreError: If the record exceeds the whole budget.
        """
        check_fits(record, self._capacity_bytes, "host_bytes")
        with self._lock:
            self._remove(record.key)
            while self._nbytes + record.record_bytes > self._capacity_bytes:
                self._remove(next(iter(self._records)))
                self._evicted += 1
            self._records[record.key] = record
            self._nbytes += record.record_bytes

    def delete(self, key: bytes) -> None:
        """Forget a record; a key that is absent is no error."""
        with self._lock:
            self._remove(key)

    def keys(self) -> list[bytes]:
        """A snapshot of the keys held, least recently used first."""
        with self._lock:
            return list(self._records)

    def stats(self) -> TierStats:
        """A consistent snapshot of the counters."""
        with self._lock:
            return TierStats(
                hits=self._hits,
                misses=self._misses,
                corrupt=self._corrupt,
                evicted=self._evicted,
                failed_writes=0,
                num_records=len(self._records),
                nbytes=self._nbytes,
                capacity_bytes=self._capacity_bytes,
            )

    def flush(self) -> None:
        """Nothing waits: a record is held as soon as `write` returns."""

    def close(self) -> None:
        """Drop every record; records handed out stay valid."""
        with self._lock:
            self._records.clear()
            self._nbytes = 0

    def _remove(self, key: bytes) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._nbytes -= record.record_bytes
