"""What the writing thread does with a record of the queue."""

from collections import deque

from daric_rag.storage.base import Record
from daric_rag.storage.disk import DiskTier
from daric_rag.storage.host import HostTier

__all__ = ["save"]


def save(
    host: HostTier,
    disk: DiskTier | None,
    lost: deque[bytes],
    record: Record,
    *,
    require_disk: bool,
) -> None:
    """Write a record to disk; if that fails and the host has not got it, it is lost.

    Args:
        host: The upper tier.
        disk: The lower tier.
        lost: Takes the keys of what is lost.
        record: To be written.
        require_disk: Whether the host has to give up what the disk did not take.
    """
    assert disk is not None  # or nothing is queued
    try:
        disk.write(record)
    finally:
        if not disk.contains(record.key):
            if require_disk:
                host.delete(record.key)
            if not host.contains(record.key):
                lost.append(record.key)
