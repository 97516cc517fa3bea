"""What `store_bench` times, measure by measure."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from daric_rag.errors import StoreError
from daric_rag.storage import DiskTier, HostTier, Record, RecordCipher
from daric_rag.storage.base import Tier
from daric_rag.storage.format import (
    RecordHeader,
    SegmentIdentity,
    body_checksum,
    payload_len_of,
)
from daric_rag.storage.read_pool import ReadPool, num_usable_cores

__all__ = ["StoreMeasures", "StoreShape"]

_FINGERPRINT = b"\1" * 32
_MAX_READERS = 4  # as many as the disk tier starts by itself
_SEED = 1


@dataclass(frozen=True)
class StoreShape:
    """The records of one request; by default of SmolLM2-135M, 5.9 MB each.

    Attributes:
        num_records: Segments of all documents.
        num_tokens: Tokens per segment.
        num_layers: Layers of the model.
        num_kv_heads: Key-value heads per layer.
        head_dim: Elements per head.
        dtype: As stored.
    """

    num_records: int = 20
    num_tokens: int = 256
    num_layers: int = 30
    num_kv_heads: int = 3
    head_dim: int = 64
    dtype: str = "bfloat16"

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Of K: ``[num_layers, num_tokens, num_kv_heads, head_dim]``."""
        return (self.num_layers, self.num_tokens, self.num_kv_heads, self.head_dim)

    @property
    def payload_len(self) -> int:
        """Bytes of one record's payload."""
        return payload_len_of(self.kv_shape, self.dtype)


class StoreMeasures:
    """One request's records, tiers and plain files, and what is timed over them.

    Args:
        folder: Empty, or to be made.
        shape: Of the records.

    Raises:
        StoreError: If the folder cannot be used.
    """

    def __init__(self, folder: Path, shape: StoreShape) -> None:
        self._folder, self._shape = folder, shape
        self._num_threads = min(_MAX_READERS, num_usable_cores())
        self._threads = ReadPool(self._num_threads)
        rng = np.random.default_rng(_SEED)
        self._source = rng.integers(
            0, 256, (shape.num_records, shape.payload_len), dtype=np.uint8
        )
        self._wanted = np.zeros_like(self._source)
        self._buffers = np.zeros_like(self._source)
        self._records = [
            Record(self._header(number), self._source[number].data)
            for number in range(shape.num_records)
        ]
        self._keys = [one.key for one in self._records]
        budget = 3 * self._records[0].record_bytes * shape.num_records
        self._host, self._memory = HostTier(budget), HostTier(budget)
        self._tiers = [self._open("plain", budget, None)]
        plain = self._tiers[0]
        self._measures: dict[str, Callable[[], Callable[[], object]]] = {
            "copy": lambda: self._copy,
            "host_read": lambda: self._host_read,
            "host_write": self._host_write,
            "file_write": self._file_write,
            "disk_write": lambda: self._disk_write(plain),
            "readinto": self._readinto,
            "checksum": lambda: self._checksum,
            "disk_read": lambda: lambda: self._disk_read(plain),
        }
        if (cipher := _cipher()) is not None:
            sealed = self._open("encrypted", budget, cipher)
            self._tiers.append(sealed)
            self._measures |= {
                "encrypted_write": lambda: self._disk_write(sealed),
                "encrypted_read": lambda: lambda: self._disk_read(sealed),
            }
        for record in self._records:
            self._host.write(record)

    @property
    def total_bytes(self) -> int:
        """Bytes that each measure moves."""
        return int(self._source.nbytes)

    @property
    def names(self) -> list[str]:
        """The measures, in the order in which they make sense."""
        return list(self._measures)

    def run(self, name: str) -> float:
        """Prepare a measure, then time it, in seconds."""
        work = self._measures[name]()
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s

    def close(self) -> None:
        """End threads and tiers."""
        self._threads.close()
        for tier in self._tiers:
            tier.close()
        self._host.close()
        self._memory.close()

    def _header(self, number: int) -> RecordHeader:
        key = number.to_bytes(32, "big")
        identity = SegmentIdentity(key, _FINGERPRINT, _FINGERPRINT)
        return RecordHeader.for_shape(identity, self._shape.kv_shape, self._shape.dtype)

    def _open(self, name: str, budget: int, cipher: RecordCipher | None) -> DiskTier:
        return DiskTier(
            self._folder / name,
            budget,
            allocate=self._memory.allocate,
            num_readers=self._num_threads,
            cipher=cipher,
        )

    def _copy(self) -> None:
        np.copyto(self._wanted, self._source)

    def _host_read(self) -> None:
        records = self._host.read_many(self._keys, _FINGERPRINT)
        for row, record in zip(self._wanted, _all(records), strict=True):
            np.copyto(row, np.frombuffer(record.payload, np.uint8))

    def _host_write(self) -> Callable[[], None]:
        self._delete(self._memory)

        def write() -> None:
            for record in self._records:
                buffer = self._memory.allocate(record.payload.nbytes)
                buffer[:] = record.payload
                self._memory.write(Record(record.header, buffer))

        return write

    def _file_write(self) -> Callable[[], None]:
        folder = self._folder / "files"
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / key.hex() for key in self._keys]
        for path in paths:
            path.unlink(missing_ok=True)

        def write() -> None:
            for path, record in zip(paths, self._records, strict=True):
                path.write_bytes(record.payload)

        return write

    def _disk_write(self, tier: DiskTier) -> Callable[[], None]:
        self._delete(tier)

        def write() -> None:
            for record in self._records:
                tier.write(record)

        return write

    def _readinto(self) -> Callable[[], object]:
        folder = self._folder / "plain"
        paths = [folder / row.filename for row in self._tiers[0].segments()]
        files = list(zip(paths, self._buffers, strict=True))
        return lambda: self._threads.map(_read_file, files)

    def _disk_read(self, tier: DiskTier) -> None:
        _all(tier.read_many(self._keys, _FINGERPRINT))

    def _checksum(self) -> None:
        self._threads.map(body_checksum, [one.payload for one in self._records])

    def _delete(self, tier: Tier) -> None:
        for key in self._keys:
            tier.delete(key)


def _read_file(task: tuple[Path, NDArray[np.uint8]]) -> None:
    path, buffer = task
    with open(path, "rb", buffering=0) as file:
        # Behind the header, which is read on its own in the store as well.
        file.seek(-len(buffer), os.SEEK_END)
        view = buffer.data
        while view and (num_read := file.readinto(view)):
            view = view[num_read:]


def _all(records: Sequence[Record | None]) -> list[Record]:
    found = [record for record in records if record is not None]
    if len(found) < len(records):
        raise StoreError("the store lost what was just written: is the disk full?")
    return found


def _cipher() -> RecordCipher | None:
    try:
        return RecordCipher(os.urandom(32))
    except StoreError:  # its package is not installed
        return None
