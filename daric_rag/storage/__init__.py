"""Where computed keys and values are kept: host memory over disk.

No torch, no vLLM: a record is a header and bytes.
"""

import logging
import os
import sys
from pathlib import Path
from uuid import uuid4

from daric_rag.config import EvictionName
from daric_rag.storage.base import Record, Tier, TierStats
from daric_rag.storage.cipher import RecordCipher, load_cipher
from daric_rag.storage.disk import DiskTier
from daric_rag.storage.format import RecordError, RecordHeader
from daric_rag.storage.host import HostTier
from daric_rag.storage.probe import StoreProbe
from daric_rag.storage.tiered import StoreStats, TieredStore

__all__ = [
    "MEMORY",
    "DiskTier",
    "HostTier",
    "Record",
    "RecordCipher",
    "RecordError",
    "RecordHeader",
    "StoreProbe",
    "StoreStats",
    "Tier",
    "TierStats",
    "TieredStore",
    "default_store_path",
    "load_cipher",
    "open_probe",
    "open_store",
    "store_name",
]

_logger = logging.getLogger(__name__)

MEMORY = ":memory:"


def open_store(
    path: str | os.PathLike[str] | None = None,
    *,
    host_bytes: int,
    disk_bytes: int,
    eviction: EvictionName = "frequency",
    cipher: RecordCipher | None = None,
    require_disk: bool = False,
) -> TieredStore:
    """Open a store, with the records that its folder already holds.

    Args:
        path: The folder, made if absent; None for `default_store_path()`;
            ":memory:" for no disk tier. `disk_bytes=0` also means none.
        host_bytes: Budget in host memory.
        disk_bytes: Budget on disk.
        eviction: What goes first when a budget is used up, see `daric_rag.eviction`.
        cipher: Encrypts the records on disk; None leaves them plain.
        require_disk: Whether memory keeps nothing that the disk does not take.

    Raises:
        StoreError: If the folder cannot be used; the text names the mend.
    """
    host = HostTier(host_bytes, policy=eviction)
    if path == MEMORY or disk_bytes == 0:
        return TieredStore(host)
    directory = default_store_path() if path is None else path
    disk = DiskTier(
        directory,
        disk_bytes,
        allocate=host.allocate,
        policy=eviction,
        cipher=cipher,
        # Who requires the disk fills it and seldom reads: pages used over and over are
        # faster than new ones, and others' files stay in the system's cache.
        keeps_pages=not require_disk,
    )
    if disk.nbytes > disk_bytes:
        _logger.warning(
            "the store in %s holds %d bytes and disk_bytes is %d: whatever is saved "
            "evicts down to that; raise disk_bytes to keep what is there",
            disk.directory,
            disk.nbytes,
            disk_bytes,
        )
    return TieredStore(host, disk, require_disk=require_disk)


def open_probe(
    path: str | os.PathLike[str] | None = None, *, disk_bytes: int
) -> StoreProbe:
    """Open a probe on a store; `path` and `disk_bytes` are as in `open_store`."""
    if path == MEMORY or disk_bytes == 0:
        return StoreProbe(None)
    return StoreProbe(default_store_path() if path is None else path)


def store_name(path: str | os.PathLike[str] | None = None) -> str:
    """Name a store to tell it from others: its folder, absolute.

    One in memory is like no other, and has a new name each time this is called.
    """
    if path == MEMORY:
        return f"{MEMORY}{uuid4().hex}"
    folder = default_store_path() if path is None else Path(path)
    return str(folder.expanduser().absolute())


def default_store_path() -> Path:
    """The user's cache folder for the store; `XDG_CACHE_HOME` decides if it is set."""
    if configured := os.environ.get("XDG_CACHE_HOME"):
        return Path(configured) / "daric_rag" / "store"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "daric_rag" / "store"
    return Path.home() / ".cache" / "daric_rag" / "store"
