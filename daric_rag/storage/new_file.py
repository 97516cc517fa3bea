"""Making a record's file: through the system's page cache, or past it.

Through the cache a record is copied into pages that the system has to find, clear and
give back: 1.3 to 3.4 ms of a core for 4.8 MB. Past it the disk fetches the bytes
itself, from a buffer that is used over and over, and 0.6 ms are left, hashing included.
A record that is read again soon is better kept in the cache.
"""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import xxhash

from daric_rag.storage.arena import plain_buffer
from daric_rag.storage.format import body_checksum

__all__ = ["Content", "DirectWriter", "WriteFile", "write_cached"]

# Places and lengths in memory and file are multiples of it: enough for any disk whose
# sectors are no longer, and others refuse.
_BLOCK_LEN: Final = 4096
# Shorter pieces wait for the disk more often (512 KiB: 0.8 ms for 4.8 MB), longer ones
# fall out of the core's cache and gain nothing.
_STAGING_LEN: Final = 2 << 20
_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
_REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class Content:
    """What a file is to hold.

    Attributes:
        head_len: Bytes of the head.
        head_of: Makes the head from the body's checksum, xxh3_64.
        body: Contiguous bytes that follow the head.
    """

    head_len: int
    head_of: Callable[[int], bytes]
    body: Sequence[memoryview]


WriteFile = Callable[[Path, Content], None]
"""Writes a new file, whose folder is made. After an error a part of it may be there.

Raises:
    OSError: It is there already, or cannot be written.
"""


def write_cached(path: Path, content: Content) -> None:
    """Write through the page cache; see `WriteFile`."""
    head = content.head_of(body_checksum(*content.body))
    with _create(path) as file:
        for part in (memoryview(head), *content.body):
            while part:
                part = part[file.write(part) :]


class DirectWriter:
    """Writes past the page cache, or through it where a file system has no other way.

    For any thread; one writes at a time.
    """

    def __init__(self) -> None:
        """Take no memory yet."""
        self._staging: memoryview | None = None
        self._is_refused = not _DIRECT
        self._lock = threading.Lock()

    def write(self, path: Path, content: Content) -> None:
        """See `WriteFile`."""
        with self._lock:
            if not self._is_refused:
                try:
                    self._write(path, content)
                    return
                except OSError as error:
                    if error.errno not in _REFUSALS:
                        raise
                # Whoever refuses to open it has made it nevertheless.
                with suppress(FileNotFoundError):
                    path.unlink()
                self._is_refused = True
        write_cached(path, content)

    def _write(self, path: Path, content: Content) -> None:
        if self._staging is None:
            self._staging = plain_buffer(_STAGING_LEN)
        with _create(path, _DIRECT) as file:
            staged = _Staged(file.fileno(), self._staging, content.head_len)
            for part in content.body:
                staged.add(part)
            staged.finish(content.head_of)


class _Staged:
    """A file that grows by whole buffers; its head, which tells of the rest, is last.

    Args:
        file: Opened for direct writing, empty.
        staging: Aligned.
        head_len: Bytes to leave room for, less than a block.
    """

    def __init__(self, file: int, staging: memoryview, head_len: int) -> None:
        self._file, self._staging, self._head_len = file, staging, head_len
        self._array = np.frombuffer(staging, np.uint8)
        self._hasher = xxhash.xxh3_64()
        self._start, self._used = 0, head_len
        self._first_block = b""
        # Until the head is written, nothing is to be taken for one.
        staging[:head_len] = bytes(head_len)

    def add(self, part: memoryview) -> None:
        """Append bytes."""
        source = np.frombuffer(part, np.uint8)
        while len(source):
            end = min(self._used + len(source), len(self._array))
            target = self._array[self._used : end]
            # NumPy lets other threads run meanwhile.
            target[:] = source[: len(target)]
            self._hasher.update(target.data)
            source, self._used = source[len(target) :], end
            if end == len(self._array):
                self._flush()

    def finish(self, head_of: Callable[[int], bytes]) -> None:
        """Write the head and what is left, and cut the file to its length."""
        length = self._start + self._used
        head = head_of(self._hasher.intdigest())
        if length == self._used:
            self._staging[: len(head)] = head
            self._flush()
        else:
            self._flush()
            self._staging[:_BLOCK_LEN] = head + self._first_block[len(head) :]
            self._write(_BLOCK_LEN, 0)
        os.ftruncate(self._file, length)

    def _flush(self) -> None:
        if not self._start:
            self._first_block = bytes(self._staging[:_BLOCK_LEN])
        padded = -(-self._used // _BLOCK_LEN) * _BLOCK_LEN
        # What another record left here must not come to the disk, cut off or not.
        self._staging[self._used : padded] = bytes(padded - self._used)
        self._write(padded, self._start)
        self._start, self._used = self._start + self._used, 0

    def _write(self, nbytes: int, place: int) -> None:
        """Write the buffer's first bytes to a place in the file."""
        done = 0
        while done < nbytes:
            taken = os.pwrite(self._file, self._staging[done:nbytes], place + done)
            # A disk that is almost full takes a part, and the next call says why.
            done += taken // _BLOCK_LEN * _BLOCK_LEN
            if taken < _BLOCK_LEN:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _create(path: Path, flags: int = 0) -> BinaryIO:
    # Whoever reclaims empty folders may delete ours between our two calls.
    for _ in range(10):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            return open(
                path,
                "xb",
                buffering=0,
                opener=lambda name, given: os.open(name, given | flags, 0o666),
            )
    raise FileNotFoundError(errno.ENOENT, "folder deleted while in use", str(path))
