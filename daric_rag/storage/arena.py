"""One block of memory for all records in host memory, and how it is cut.

A buffer's first use is what costs: the kernel clears each page as it is touched.
Reading 6 MB records into fresh 4 KiB pages ran at 2.3 GB/s, into fresh huge pages at
11 GB/s and into memory used before at 16 GB/s. So the memory is mapped once, asks for
huge pages, and stays.
"""

import bisect
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import numpy as np

from daric_rag.errors import StoreError

__all__ = ["Arena", "plain_buffer"]

_ALIGNMENT: Final = 64  # a cache line, and more than any dtype needs
_HUGE_PAGE_BYTES: Final = 2 << 20


class Arena:
    """A mapping cut into regions, each of which returns when nobody sees it.

    A region's life is that of its buffer: it is free again once the last view, array
    or tensor made from the buffer is gone, and not before.

    The smallest hole that is large enough is cut, the lowest one of equals. With
    records evicted in any order, 96 % of the memory held records (95 % where all
    lengths are equally likely); the first hole of sufficient length gave 93 and 92 %
    and leaves longer lists to search.

    Args:
        capacity_bytes: Length. Pages are taken from the system as they are first
            used, and are kept.

    Raises:
        StoreError: If so much cannot be mapped.
    """

    def __init__(self, capacity_bytes: int) -> None:
        total_bytes = _round_up(capacity_bytes)
        self._capacity_bytes = capacity_bytes
        self._mapping = _map_pages(max(total_bytes, 1), "the host tier")
        self._address = _address_of(memoryview(self._mapping))
        self._holes = _Holes(total_bytes)
        # What finalizers give back, as `(start, nbytes)`. They may run in any thread
        # inside any allocation, also of one that holds the lock, so they only append.
        self._returned: deque[tuple[int, int]] = deque()
        self._keeps_pages = False
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Length of the arena."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the regions that somebody sees, each rounded up to 64."""
        with self._lock:
            self._take_back()
            return self._holes.total_bytes - self._holes.nbytes

    @property
    def buffer(self) -> memoryview:
        """The whole mapping, regions in use included; for registering it as pinned."""
        return memoryview(self._mapping)

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return a writable buffer with arbitrary content, or None: no hole is as long.

        Args:
            nbytes: Length of the view, at least 1. It starts at a multiple of 64.

        Raises:
            StoreError: If `nbytes` is not positive.
        """
        _check_positive(nbytes)
        region_bytes = _round_up(nbytes)
        with self._lock:
            self._take_back()
            start = self._holes.cut(region_bytes)
        if start is None:
            return None
        # The array's life is the region's: every view of it holds the array, and the
        # mapping alone could not tell that one region's last view is gone.
        array = np.frombuffer(self._mapping, np.uint8, count=nbytes, offset=start)
        give_back = self._returned.append
        weakref.finalize(array, give_back, (start, region_bytes)).atexit = False
        return array.data

    def owns(self, view: memoryview) -> bool:
        """Whether a view of at least one byte lies in the arena."""
        return 0 <= _address_of(view) - self._address < len(self._mapping)

    def keep_pages(self) -> None:
        """Leave the pages where they are from now on: a device has them mapped."""
        self._keeps_pages = True

    def trim(self) -> None:
        """Give unused pages back to the system; they come back, cleared, when used.

        For when the arena goes out of use. Does nothing after `keep_pages`.
        """
        if self._keeps_pages or not hasattr(mmap, "MADV_DONTNEED"):
            return
        page = mmap.PAGESIZE
        with self._lock:
            self._take_back()
            for start, nbytes in self._holes:
                first = -(-start // page) * page
                length = (start + nbytes) // page * page - first
                if length > 0:
                    self._mapping.madvise(mmap.MADV_DONTNEED, first, length)

    def _take_back(self) -> None:
        while self._returned:
            self._holes.put(*self._returned.popleft())


class _Holes:
    """Free ranges `[start, start + nbytes)`, no two of which touch.

    Args:
        total_bytes: The first hole: everything.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.nbytes = 0
        self._nbytes_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        # `(nbytes, start)`, ascending. Inserting moves the rest, which for the few
        # thousand holes of a large arena takes less than a balanced tree's steps.
        self._by_size: list[tuple[int, int]] = []
        if total_bytes:
            self._add(0, total_bytes)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._nbytes_at.items())

    def cut(self, nbytes: int) -> int | None:
        """Take a range from the smallest hole that has room, or return None."""
        index = bisect.bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        length, start = self._by_size[index]
        self._remove(start)
        if length > nbytes:
            self._add(start + nbytes, length - nbytes)
        return start

    def put(self, start: int, nbytes: int) -> None:
        """Return a range, joining it with the holes beside it."""
        end = start + nbytes
        if (before := self._start_of_end.get(start)) is not None:
            self._remove(before)
            start = before
        if (length := self._nbytes_at.get(end)) is not None:
            self._remove(end)
            end += length
        self._add(start, end - start)

    def _add(self, start: int, nbytes: int) -> None:
        self._nbytes_at[start] = nbytes
        self._start_of_end[start + nbytes] = start
        bisect.insort(self._by_size, (nbytes, start))
        self.nbytes += nbytes

    def _remove(self, start: int) -> None:
        nbytes = self._nbytes_at.pop(start)
        del self._start_of_end[start + nbytes]
        del self._by_size[bisect.bisect_left(self._by_size, (nbytes, start))]
        self.nbytes -= nbytes


def plain_buffer(nbytes: int) -> memoryview:
    """Return a writable, page-aligned buffer in a mapping of its own.

    Args:
        nbytes: Length of the view, at least 1.

    Raises:
        StoreError: If `nbytes` is not positive or memory is exhausted.
    """
    _check_positive(nbytes)
    return memoryview(_map_pages(nbytes, "a buffer"))[:nbytes]


def _map_pages(nbytes: int, purpose: str) -> mmap.mmap:
    # Private: Python's default is shared, whose pages took twice as long. Unreserved,
    # where Python knows the flag: a budget is not yet a demand.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        mapping = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError) as error:
        raise StoreError(
            f"no memory for {purpose} of {nbytes} bytes: lower host_bytes"
        ) from error
    if nbytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages is slower on first use, nothing else.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _check_positive(nbytes: int) -> None:
    if nbytes < 1:
        raise StoreError(f"cannot allocate {nbytes} bytes: ask for 1 or more")


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _address_of(view: memoryview) -> int:
    address: int = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return address
