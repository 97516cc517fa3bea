"""What the writing thread does with a record of the queue."""

from collections import deque

from daric_rag.storage.base import Record
from daric_rag.storage.disk import DiskTier
from daric_rag.storage.host import HostTier

__all__ = ["save"]


def save(
    host: HostTier, disk: DiskTier | None, lost: deque[bytes], record: Record
) -> None:
    """Write a record to disk; if that fails and the host has not got it, it is lost."""
    assert disk is not None  # or nothing is queued
    try:
        disk.write(record)
    finally:
        if not (disk.contains(record.key) or host.contains(record.key)):
            lost.append(record.key)
