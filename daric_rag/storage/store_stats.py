"""What a store of several tiers reports of itself."""

from dataclasses import dataclass

from daric_rag.storage.base import TierStats

__all__ = ["StoreStats"]


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
        overflow_bytes: Bytes of buffers for which `host_bytes` had no room, because
            all that it holds was in use.
        read_only: Whether the disk tier takes no records.
    """

    host: TierStats
    disk: TierStats | None
    queued_records: int
    queued_bytes: int
    dropped_writes: int
    promoted: int
    overflow_bytes: int
    read_only: bool
