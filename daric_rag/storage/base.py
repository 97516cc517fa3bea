"""The tier contract: what a record is in memory, and what every tier promises.

Payloads are `memoryview`s, so this package needs no array library and no tensor of
any engine ever crosses it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from daric_rag.errors import StoreError
from daric_rag.storage.format import RecordHeader


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One segment's keys and values in memory.

    Attributes:
        header: Shape, dtype and identity.
        payload: Read-only bytes, `header.payload_len` of them: K then V, each
            C-contiguous `[num_layers, num_tokens, num_kv_heads, head_dim]`. Valid
            and unchanged for as long as this record, the view or anything made from
            the view (an array, a tensor) is held, whatever the tiers do meanwhile.
        side_data: `header.side_data_len` bytes, see `documents`.

    Raises:
        StoreError: At construction, if the payload is not what the header says.
    """

    header: RecordHeader
    payload: memoryview
    side_data: bytes = b""

    def __post_init__(self) -> None:
        if not self.payload.c_contiguous or self.payload.format != "B":
            raise StoreError("a payload must be contiguous bytes: use .cast('B')")
        if self.payload.nbytes != self.header.payload_len:
            raise StoreError(
                f"the payload has {self.payload.nbytes} bytes and its header says "
                f"{self.header.payload_len}: allocate header.payload_len bytes"
            )
        if len(self.side_data) != self.header.side_data_len:
            raise StoreError(
                f"there are {len(self.side_data)} bytes of side data and the header "
                f"says {self.header.side_data_len}: pass both from one identity"
            )
        object.__setattr__(self, "payload", self.payload.toreadonly())

    @property
    def key(self) -> bytes:
        """The record's `SegmentKey`."""
        return self.header.segment_key

    @property
    def record_bytes(self) -> int:
        """Bytes that the record counts for in a tier's budget."""
        return self.header.record_bytes


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier did since it was opened, and what it holds now.

    Attributes:
        hits: Reads that returned a record.
        misses: Reads that returned None, `corrupt` ones included.
        corrupt: Records found damaged or foreign, each deleted.
        evicted: Records removed to make room.
        failed_writes: Records that were not stored for want of disk space,
            permission or a lock.
        num_records: Records held.
        nbytes: Bytes held, headers included.
        capacity_bytes: The budget.
        failed_syncs: Records that were stored and may not survive a power cut, as
            their disk could not be synced.
        written_bytes: Of the records that were stored.
    """

    hits: int
    misses: int
    corrupt: int
    evicted: int
    failed_writes: int
    num_records: int
    nbytes: int
    capacity_bytes: int
    failed_syncs: int = 0
    written_bytes: int = 0


class Tier(Protocol):
    """One level of the store. Every method may be called from any thread.

    A miss is a value: `read` returns None for what is absent, damaged or foreign. No
    stored byte, whatever became of it, makes a method raise.
    """

    @property
    def capacity_bytes(self) -> int:
        """The budget; `nbytes` never exceeds it."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held, headers included."""
        ...

    def contains(self, key: bytes) -> bool:
        """Whether `read` would probably hit; reads no payload, touches nothing."""
        ...

    def read(self, key: bytes, fingerprint: bytes) -> Record | None:
        """Return a verified record and make it the most recently used.

        A record that is damaged, or is not of this key and model, is deleted,
        counted and returned as None.
        """
        ...

    def read_many(
        self, keys: Sequence[bytes], fingerprint: bytes
    ) -> list[Record | None]:
        """`read` for several keys at once; one result per key, in their order."""
        ...

    def write(self, record: Record) -> None:
        """Store a record, evicting by the tier's policy to make room.

        Whole documents go, each from its end. Where all that is held is pinned or in
        use the record is not stored, and is counted in `failed_writes`.

        Raises:
            StoreError: If the record exceeds the whole budget.
        """
        ...

    def delete(self, key: bytes) -> None:
        """Forget a record; a key that is absent is no error."""
        ...

    def keys(self) -> Iterable[bytes]:
        """A snapshot of the keys held."""
        ...

    def stats(self) -> TierStats:
        """A consistent snapshot of the counters."""
        ...

    def flush(self) -> None:
        """Return when all that was written is where it belongs."""
        ...

    def close(self) -> None:
        """Release what the tier holds; calling it again is harmless."""
        ...


def check_fits(record: Record, capacity_bytes: int, field: str) -> None:
    """Refuse a record that no eviction can make room for.

    Args:
        record: To be written.
        capacity_bytes: The tier's budget.
        field: The configuration field that sets it, for the message.

    Raises:
        StoreError: If the record exceeds the whole budget.
    """
    if record.record_bytes > capacity_bytes:
        raise StoreError(
            f"a record of {record.record_bytes} bytes exceeds {field}="
            f"{capacity_bytes}: raise {field} or lower max_segment_len"
        )
