"""The host tier: records in memory under a byte budget.

A read hands out the very buffer that was written: no copy, no checksum.

What the budget means. Records held, headers included, never exceed it, and their
payloads lie in one arena of that length. Buffers that are being filled, and those that
somebody still sees after their record was evicted, take their room in the arena too,
so there is then less for records. What finds no room there at all gets a mapping of
its own, which lives as long as it is seen. Resident memory is therefore at most the
budget and what readers and writers hold beside it.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from daric_rag.config import EvictionName
from daric_rag.errors import StoreError
from daric_rag.eviction import policy_of
from daric_rag.index import SegmentIndex
from daric_rag.keys import ModelFingerprint, SegmentKey
from daric_rag.storage.arena import Arena, plain_buffer
from daric_rag.storage.base import Record, TierStats, check_fits

# Keys of evicted records that wait for `take_evicted`; older ones are forgotten, and
# whoever still believes in them finds a miss.
_MAX_EVICTED: Final = 1 << 16


class HostTier:
    """Records in host memory, evicted by documents, last segment first.

    Args:
        capacity_bytes: The budget, see above; at least 1.
        policy: Which documents are evicted first, see `daric_rag.eviction`.

    Raises:
        StoreError: If so much memory cannot be mapped.
    """

    def __init__(
        self, capacity_bytes: int, *, policy: EvictionName = "frequency"
    ) -> None:
        self._index = SegmentIndex(policy=policy_of(policy, capacity_bytes))
        self._capacity_bytes = capacity_bytes
        self.arena: Final = Arena(capacity_bytes)
        self._records: dict[bytes, Record] = {}
        self._pinned: set[bytes] = set()
        self._evicted_keys: deque[bytes] = deque(maxlen=_MAX_EVICTED)
        self._lock = threading.Lock()
        self._hits = self._misses = self._corrupt = self._evicted = 0
        self._failed_writes = self._overflow_bytes = self._written_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """The budget; `nbytes` never exceeds it."""
        return self._capacity_bytes

    @property
    def nbytes(self) -> int:
        """Bytes held, headers included."""
        return self._index.nbytes

    @property
    def overflow_bytes(self) -> int:
        """Bytes that `allocate` ever took from outside the arena."""
        return self._overflow_bytes

    def allocate(self, nbytes: int, *, parent: bytes | None = None) -> memoryview:
        """Return a writable buffer to gather a payload into, then to `write`.

        Makes room in the arena by evicting records.

        Args:
            nbytes: `payload_len` of the record to be.
            parent: Key of the segment before it, which is not evicted for it: a
                document that is new might else displace itself.

        Raises:
            StoreError: If memory is exhausted.
        """
        with self._lock, self._protected([] if parent is None else [parent]):
            buffer = self._cut(nbytes)
            if buffer is not None:
                return buffer
            self._overflow_bytes += nbytes
        return plain_buffer(nbytes)

    def contains(self, key: bytes) -> bool:
        """Whether the record is held; touches nothing."""
        return key in self._records

    def read(self, key: bytes, fingerprint: bytes) -> Record | None:
        """Return the record as written, without a copy; None is a miss."""
        return self.read_many([key], fingerprint)[0]

    def read_many(
        self, keys: Sequence[bytes], fingerprint: bytes
    ) -> list[Record | None]:
        """`read` for several keys; one result per key, in their order."""
        with self._lock:
            return [self._read(key, fingerprint) for key in keys]

    def write(self, record: Record) -> None:
        """Hold a record, sharing its buffer, which nobody may write to any more.

        A payload that is not from `allocate` is copied. Where all other records are
        in use or pinned the record is not held, which counts as a failed write.

        Raises:
            StoreError: If the record exceeds the whole budget, or names another
                parent than it did before.
        """
        check_fits(record, self._capacity_bytes, "host_bytes")
        with self._lock:
            if self._hold_record(record):
                self._written_bytes += record.record_bytes
            else:
                self._failed_writes += 1
                self._evicted_keys.append(record.key)

    def delete(self, key: bytes) -> None:
        """Forget a record; a key that is absent is no error."""
        with self._lock:
            self._remove(key)

    def hold(self, keys: Iterable[bytes]) -> None:
        """Protect records in use from eviction; absent ones from when they come."""
        with self._lock:
            self._index.hold(map(SegmentKey, keys))

    def release(self, keys: Iterable[bytes]) -> None:
        """Undo one `hold` of the same keys."""
        with self._lock:
            self._index.release([SegmentKey(key) for key in keys])

    def pin(self, keys: Iterable[bytes]) -> int:
        """Protect records from eviction until `unpin`, also those yet to come.

        Returns:
            Number of keys that were not pinned before.
        """
        with self._lock:
            new = set(keys) - self._pinned
            self._pinned |= new
            self._index.pin(map(SegmentKey, new))
            return len(new)

    def unpin(self, keys: Iterable[bytes]) -> int:
        """Undo `pin`; returns the number of keys that were pinned."""
        with self._lock:
            old = self._pinned.intersection(keys)
            self._pinned -= old
            self._index.unpin([SegmentKey(key) for key in old])
            return len(old)

    def take_evicted(self) -> list[bytes]:
        """Keys that were evicted, or not held for want of room, since last asked."""
        with self._lock:
            keys = list(dict.fromkeys(self._evicted_keys))
            self._evicted_keys.clear()
            return keys

    def keys(self) -> list[bytes]:
        """A snapshot of the keys held, those that would be evicted first in front."""
        with self._lock:
            return sorted(self._records, key=self._priority_of)

    def stats(self) -> TierStats:
        """A consistent snapshot of the counters."""
        with self._lock:
            return TierStats(
                hits=self._hits,
                misses=self._misses,
                corrupt=self._corrupt,
                evicted=self._evicted,
                failed_writes=self._failed_writes,
                num_records=len(self._records),
                nbytes=self.nbytes,
                capacity_bytes=self._capacity_bytes,
                written_bytes=self._written_bytes,
            )

    def flush(self) -> None:
        """Nothing waits: a record is held as soon as `write` returns."""

    def close(self) -> None:
        """Drop every record and unused memory; records handed out stay valid."""
        with self._lock:
            for key in list(self._records):
                self._remove(key)
        self.arena.trim()

    def _read(self, key: bytes, fingerprint: bytes) -> Record | None:
        record = self._records.get(key)
        if record is not None and record.header.fingerprint != fingerprint:
            self._remove(key)
            self._corrupt += 1
            record = None
        if record is None:
            self._misses += 1
            return None
        self._index.use(SegmentKey(key))
        self._hits += 1
        return record

    def _hold_record(self, record: Record) -> bool:
        header, key = record.header, SegmentKey(record.key)
        # Its old version makes room first; its row keeps the record of its uses.
        old = self._records.pop(key, None)
        growth = record.record_bytes - (0 if old is None else old.record_bytes)
        del old
        parent = ModelFingerprint(header.parent_key)
        with self._protected([key, parent]):
            held = self._placed(record) if self._make_room(growth) else None
        if held is None:
            self._index.discard(key)
            return False
        try:
            self._index.add(key, parent, header.num_tokens, record.record_bytes)
        except ValueError as error:
            self._index.discard(key)
            raise StoreError(f"the record's parent_key is wrong: {error}") from error
        self._records[key] = held
        return True

    def _placed(self, record: Record) -> Record | None:
        """Return the record with its payload in the arena; None if there is no room."""
        if self.arena.owns(record.payload):
            return record
        buffer = self._cut(record.payload.nbytes)
        if buffer is None:
            return None
        buffer[:] = record.payload
        return Record(record.header, buffer, record.side_data)

    @contextmanager
    def _protected(self, keys: Sequence[bytes]) -> Iterator[None]:
        held = [SegmentKey(key) for key in keys]
        self._index.hold(held)
        try:
            yield
        finally:
            self._index.release(held)

    def _make_room(self, nbytes: int) -> bool:
        excess = self.nbytes + nbytes - self._capacity_bytes
        if excess > 0:
            self._evict(excess)
        return self.nbytes + nbytes <= self._capacity_bytes

    def _cut(self, nbytes: int) -> memoryview | None:
        """Take a buffer from the arena, evicting records until one is free."""
        while (buffer := self.arena.allocate(nbytes)) is None:
            if nbytes > self._capacity_bytes or not self._evict(1):
                return None
        return buffer

    def _evict(self, nbytes: int) -> int:
        """Evict at least so many bytes if possible; returns how many records."""
        keys = self._index.evict(nbytes)
        for key in keys:
            del self._records[key]
        self._evicted += len(keys)
        self._evicted_keys.extend(keys)
        return len(keys)

    def _remove(self, key: bytes) -> None:
        if self._records.pop(key, None) is not None:
            self._index.discard(SegmentKey(key))

    def _priority_of(self, key: bytes) -> int:
        info = self._index.info(SegmentKey(key))
        assert info is not None  # one row per record
        return info.priority
