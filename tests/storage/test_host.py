"""Host memory: no copies, and buffers that return only when nobody holds them."""

import mmap

import numpy as np
import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import BufferPool, HostTier, Record
from tests.storage.records import FINGERPRINT, PAYLOAD_LEN, header, key, payload

_MIB = 1 << 20


def address(view):
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


def test_a_read_returns_the_written_buffer():
    tier = HostTier(_MIB)
    buffer = tier.allocate(PAYLOAD_LEN)
    buffer[:] = payload(1)
    tier.write(Record(header(1), buffer))

    found = tier.read(key(1), FINGERPRINT)

    assert address(found.payload) == address(buffer)


def test_buffers_are_writable_page_aligned_and_of_the_asked_length():
    pool = BufferPool(64 * _MIB)
    for nbytes in (1, 4095, 4097, 3 * _MIB + 5):
        buffer = pool.allocate(nbytes)
        assert buffer.nbytes == nbytes
        assert address(buffer) % mmap.PAGESIZE == 0
        buffer[nbytes - 1] = 7


def test_rounding_loses_an_eighth_at_most():
    pool = BufferPool(64 * _MIB)
    for nbytes in (33_000, 1_000_000, 5_898_240, 9_000_001):
        buffer = pool.allocate(nbytes)
        del buffer
        assert nbytes <= pool.idle_bytes <= nbytes * 9 / 8
        pool = BufferPool(64 * _MIB)


def test_a_released_buffer_is_used_again():
    pool = BufferPool(64 * _MIB)
    buffer = pool.allocate(5_898_240)
    first = address(buffer)
    del buffer
    assert pool.idle_bytes == 6 * _MIB

    buffer = pool.allocate(5_800_000)

    assert address(buffer) == first
    assert pool.idle_bytes == 0


@pytest.mark.parametrize(
    "derive",
    [
        lambda view: view[10:20],
        lambda view: view.toreadonly(),
        lambda view: np.frombuffer(view, dtype=np.uint16)[3:],
    ],
)
def test_a_buffer_stays_while_anything_made_from_it_is_held(derive):
    pool = BufferPool(64 * _MIB)
    buffer = pool.allocate(100)
    held = derive(buffer)
    first = address(buffer)
    del buffer

    other = pool.allocate(100)

    assert address(other) != first
    del held
    assert pool.idle_bytes == mmap.PAGESIZE


def test_idle_memory_is_bounded():
    pool = BufferPool(2 * mmap.PAGESIZE)
    buffers = [pool.allocate(10) for _ in range(5)]
    del buffers
    assert pool.idle_bytes == 2 * mmap.PAGESIZE


def test_evicted_buffers_serve_new_records():
    tier = HostTier(3 * _MIB, pool=BufferPool(8 * _MIB))
    addresses = set()
    for number in range(10):
        head = header(number, num_tokens=30_000)  # 960,000 bytes
        buffer = tier.allocate(head.payload_len)
        addresses.add(address(buffer))
        tier.write(Record(head, buffer))
        del buffer
    assert len(addresses) == 4  # Three are held, and one is being filled.


def test_misuse_and_exhaustion_are_store_errors():
    pool = BufferPool()
    with pytest.raises(StoreError, match="ask for 1"):
        pool.allocate(0)
    with pytest.raises(StoreError, match="host_bytes"):
        pool.allocate(1 << 60)
