"""Copying what a read found on disk to host memory, unless it was deleted meanwhile."""

import threading
from collections.abc import Iterable
from contextlib import suppress

from daric_rag.errors import StoreError
from daric_rag.storage.base import Record
from daric_rag.storage.host import HostTier


class Promotion:
    """Keeps deleted records from coming back through a read that had begun before.

    Args:
        host: Where records are promoted to.
    """

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._num_deletions = self._num_promoted = 0

    @property
    def num_promoted(self) -> int:
        """Records promoted so far."""
        return self._num_promoted

    def begin(self) -> int:
        """Return what `promote` must be told of the time at which a read begins."""
        return self._num_deletions

    def promote(self, records: Iterable[Record], begun: int) -> None:
        """Copy records that fit, unless anything was deleted since `begin`."""
        for record in records:
            if record.record_bytes > self._host.capacity_bytes:
                continue
            with self._lock, suppress(StoreError):
                if self._num_deletions == begun:
                    self._host.write(record)
                    self._num_promoted += self._host.contains(record.key)

    def delete(self, key: bytes) -> None:
        """Delete a record from the host; reads that have begun promote nothing."""
        with self._lock:
            self._num_deletions += 1
            self._host.delete(key)
