"""One block of memory: no region is seen twice, and none is lost."""

import mmap
import random
import threading
from itertools import pairwise

import numpy as np
import pytest

from daric_rag.errors import StoreError
from daric_rag.storage.arena import Arena, plain_buffer

_MIB = 1 << 20


def address(view):
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


def offset(arena, view):
    return address(view) - address(arena.buffer)


def test_buffers_are_writable_aligned_and_of_the_asked_length():
    arena = Arena(_MIB)
    for nbytes in (1, 63, 64, 65, 4097):
        buffer = arena.allocate(nbytes)
        assert buffer.nbytes == nbytes
        assert buffer.format == "B"
        assert address(buffer) % 64 == 0
        buffer[nbytes - 1] = 7


def test_buffers_lie_in_the_one_mapping():
    arena = Arena(1000)
    buffer = arena.allocate(100)
    start = offset(arena, buffer)

    buffer[:] = bytes(range(100))

    assert arena.buffer[start : start + 100] == bytes(range(100))
    assert arena.owns(buffer)
    assert arena.owns(buffer[99:].toreadonly())
    assert not arena.owns(memoryview(bytes(100)))
    assert not arena.owns(Arena(1000).allocate(100))


def test_the_whole_arena_can_be_used():
    arena = Arena(1000)  # 15 regions of 64 bytes, and 40 bytes more
    buffers = [arena.allocate(64) for _ in range(15)]
    buffers.append(arena.allocate(40))
    buffers[-1][39] = 1
    assert None not in buffers
    assert arena.allocate(1) is None
    assert arena.used_bytes == 1024


def test_too_much_is_none_and_takes_nothing():
    arena = Arena(1024)
    assert arena.allocate(1025) is None
    held = arena.allocate(512)
    assert arena.allocate(513) is None
    assert arena.used_bytes == held.nbytes


def test_neighbours_join_whatever_the_order():
    arena = Arena(4 * 64)
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3), (1, 3, 0, 2)):
        buffers = [arena.allocate(64) for _ in range(4)]
        for number in order:
            buffers[number] = None
        whole = arena.allocate(4 * 64)
        assert whole is not None
        del whole


def test_the_smallest_sufficient_hole_is_cut():
    arena = Arena(10 * 64)
    first, wall, second, _end = (arena.allocate(64 * n) for n in (3, 1, 2, 4))
    place = offset(arena, second)
    del first, second

    assert offset(arena, arena.allocate(100)) == place
    assert wall is not None


@pytest.mark.parametrize(
    "derive",
    [
        lambda view: view[10:20],
        lambda view: view.toreadonly(),
        lambda view: memoryview(view),
        lambda view: np.frombuffer(view, dtype=np.uint16)[3:],
        lambda view: np.frombuffer(view, dtype=np.uint8).reshape(10, 10).T,
    ],
)
def test_a_region_stays_while_anything_made_from_it_is_held(derive):
    arena = Arena(128)
    held = derive(arena.allocate(100))
    assert arena.allocate(1) is None

    del held

    assert arena.used_bytes == 0
    assert arena.allocate(128) is not None


def test_buffers_outlive_the_arena():
    arena = Arena(_MIB)
    buffer = arena.allocate(100)
    buffer[:] = b"x" * 100
    arena.trim()
    del arena
    assert buffer == b"x" * 100


def test_trimming_clears_unused_pages_only():
    arena = Arena(6 * _MIB)
    below, dropped, above = (arena.allocate(2 * _MIB - 64) for _ in range(3))
    for buffer in (below, dropped, above):
        buffer[:] = b"k" * buffer.nbytes
    del buffer, dropped

    arena.trim()

    assert below == above == b"k" * (2 * _MIB - 64)
    # Its first and its last page are shared with its neighbours.
    middle = arena.allocate(2 * _MIB - 64)[mmap.PAGESIZE : -mmap.PAGESIZE]
    assert not any(middle)


def test_no_region_is_seen_twice_and_none_is_lost():
    arena, rng = Arena(64 * 1024), random.Random(1)
    held = {}
    refused = 0
    for step in range(20_000):
        nbytes = rng.choice((1, 64, 100, 700, 3000))
        buffer = arena.allocate(nbytes)
        if buffer is None:
            refused += 1
        else:
            buffer[:] = step.to_bytes(4, "big")[-1:] * nbytes
            held[step] = buffer
        while len(held) > rng.randrange(100):
            number = rng.choice(list(held))
            content = held.pop(number)
            assert content == (number % 256).to_bytes() * len(content)
            del content
    del buffer
    regions = sorted(
        (offset(arena, view), -(-view.nbytes // 64) * 64) for view in held.values()
    )
    assert all(start + size <= after for (start, size), (after, _) in pairwise(regions))
    assert arena.used_bytes == sum(size for _, size in regions)
    assert 0 < refused < 20_000
    held.clear()
    assert arena.allocate(64 * 1024) is not None


def test_threads_share_an_arena():
    arena = Arena(64 * 1024)
    damaged = threading.Event()

    def work(number):
        rng = random.Random(number)
        held = []
        for _ in range(3000):
            buffer = arena.allocate(rng.randrange(1, 2000))
            if buffer is not None:
                buffer[:] = bytes([number]) * buffer.nbytes
                held.append(buffer)
            if buffer is None or len(held) > 20:
                dropped = held.pop(rng.randrange(len(held))) if held else b""
                if any(byte != number for byte in dropped):
                    damaged.set()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not damaged.is_set()
    assert arena.used_bytes == 0


def test_plain_buffers_are_page_aligned():
    buffer = plain_buffer(5000)
    assert buffer.nbytes == 5000
    assert address(buffer) % mmap.PAGESIZE == 0
    buffer[4999] = 1


@pytest.mark.parametrize("nbytes", [0, -1])
def test_lengths_below_one_are_misuse(nbytes):
    for allocate in (Arena(1000).allocate, plain_buffer):
        with pytest.raises(StoreError, match="ask for 1"):
            allocate(nbytes)


def test_exhaustion_names_the_field():
    for allocate in (Arena, plain_buffer):
        with pytest.raises(StoreError, match="host_bytes"):
            allocate(1 << 60)
