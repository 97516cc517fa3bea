"""Host over disk: promotion, writing behind, and giving up rather than waiting."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import (
    DiskTier,
    HostTier,
    TieredStore,
    default_store_path,
    open_store,
)
from tests.storage.records import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    PAYLOAD_LEN,
    RECORD_BYTES,
    REPOSITORY,
    header,
    key,
    payload,
    record,
)


class SlowDisk(DiskTier):
    """A disk that writes only while its gate is open."""

    gate: threading.Event

    def write(self, record):
        assert self.gate.wait(30)
        super().write(record)


@pytest.fixture
def gate():
    return threading.Event()


@pytest.fixture
def slow_store(tmp_path, gate):
    disk = SlowDisk(tmp_path / "store", 100 * RECORD_BYTES)
    disk.gate = gate
    store = TieredStore(
        HostTier(2 * RECORD_BYTES),
        disk,
        max_pending_bytes=3 * RECORD_BYTES,
        submit_timeout_s=0.01,
    )
    yield store
    gate.set()
    store.close()


@pytest.fixture
def store(tmp_path):
    with open_store(
        tmp_path / "store", host_bytes=4 * RECORD_BYTES, disk_bytes=100 * RECORD_BYTES
    ) as opened:
        yield opened


def write(store, number):
    store.write(header(number), memoryview(payload(number)))


def read(store, number):
    found = store.read(key(number), FINGERPRINT)
    return None if found is None else bytes(found.payload)


def test_a_host_hit_is_the_very_buffer_that_was_written(store):
    buffer = store.allocate(PAYLOAD_LEN)
    buffer[:] = payload(1)
    store.write(header(1), buffer)

    found = store.read(key(1), FINGERPRINT)

    ours, theirs = (np.frombuffer(view, np.uint8) for view in (buffer, found.payload))
    assert ours.ctypes.data == theirs.ctypes.data


def test_a_disk_hit_is_promoted(store):
    write(store, 1)
    store.flush()
    store.clear_host()
    assert store.host.keys() == []

    assert read(store, 1) == payload(1)

    assert store.host.contains(key(1))
    assert store.stats().promoted == 1
    assert read(store, 1) == payload(1)
    assert store.stats().disk.hits == 1


def test_read_many_mixes_tiers_and_may_exceed_the_host(store):
    for number in range(8):
        write(store, number)
    store.flush()
    wanted = [7, 3, 99, 0, 3, 1, 2, 6, 5, 4]

    found = store.read_many([key(number) for number in wanted], FINGERPRINT)

    contents = [None if one is None else bytes(one.payload) for one in found]
    assert contents == [None if n == 99 else payload(n) for n in wanted]
    assert store.host.nbytes == 4 * RECORD_BYTES


def test_host_hits_keep_a_record_young_on_disk(tmp_path):
    budget = 3 * RECORD_BYTES
    with open_store(tmp_path / "s", host_bytes=budget, disk_bytes=budget) as store:
        for number in (1, 2, 3):
            write(store, number)
        store.flush()
        assert read(store, 1) == payload(1)
        write(store, 4)
        store.flush()
        assert sorted(store.disk.keys()) == [key(1), key(3), key(4)]


def test_a_queued_record_is_found_after_the_host_evicted_it(slow_store, gate):
    for number in (1, 2, 3):
        write(slow_store, number)
    assert not slow_store.host.contains(key(1))

    assert slow_store.contains(key(1))
    assert read(slow_store, 1) == payload(1)
    assert slow_store.read(key(1), OTHER_FINGERPRINT) is None

    gate.set()
    slow_store.flush()
    assert sorted(slow_store.disk.keys()) == [key(1), key(2), key(3)]
    assert slow_store.stats().queued_records == slow_store.stats().queued_bytes == 0


def test_a_full_queue_gives_up_the_disk_copy(slow_store, gate):
    for number in range(5):
        write(slow_store, number)

    stats = slow_store.stats()
    assert stats.dropped_writes == 2
    assert stats.queued_bytes == 3 * RECORD_BYTES
    assert read(slow_store, 4) == payload(4)  # In host memory all the same.

    gate.set()
    slow_store.flush()
    assert sorted(slow_store.disk.keys()) == [key(0), key(1), key(2)]


def test_clear_host_keeps_what_is_nowhere_else(slow_store):
    write(slow_store, 1)
    slow_store.clear_host()
    assert slow_store.host.contains(key(1))


def test_deleting_reaches_the_queue(slow_store, gate):
    write(slow_store, 1)
    write(slow_store, 2)
    threading.Timer(0.1, gate.set).start()

    slow_store.delete(key(1))  # Being written: waits for it, then deletes it.
    slow_store.delete(key(2))
    slow_store.flush()

    for number in (1, 2):
        assert not slow_store.contains(key(number))
        assert read(slow_store, number) is None
    assert slow_store.keys() == []


def test_writing_what_the_disk_has_writes_no_file(store):
    write(store, 1)
    store.flush()
    before = sorted(store.disk.directory.glob("??/??/*.val"))
    write(store, 1)
    store.flush()
    assert sorted(store.disk.directory.glob("??/??/*.val")) == before


def test_records_too_large_for_one_tier_go_to_the_other(tmp_path):
    with open_store(
        tmp_path / "s", host_bytes=RECORD_BYTES, disk_bytes=2 * RECORD_BYTES
    ) as store:
        large = record(1, num_tokens=5)
        store.write(large.header, large.payload)
        store.flush()
        assert store.read(key(1), FINGERPRINT).payload == large.payload
        assert store.host.keys() == []
    with open_store(
        tmp_path / "t", host_bytes=2 * RECORD_BYTES, disk_bytes=RECORD_BYTES
    ) as store:
        store.write(large.header, large.payload)
        store.flush()
        assert store.read(key(1), FINGERPRINT).payload == large.payload
        assert store.disk.keys() == []
        assert store.stats().dropped_writes == 1


def test_a_record_too_large_for_both_is_refused(store):
    large = record(1, num_tokens=1000)
    with pytest.raises(StoreError, match="host_bytes"):
        store.write(large.header, large.payload)


def test_a_failing_disk_stops_neither_thread_nor_store(tmp_path, caplog):
    class BrokenDisk(DiskTier):
        def write(self, record):
            raise RuntimeError("a defect")

    with TieredStore(HostTier(10_000), BrokenDisk(tmp_path / "s", 10_000)) as store:
        for number in (1, 2):
            write(store, number)
        store.flush()
        assert read(store, 1) == payload(1)
        assert store.stats().dropped_writes == 2
    assert len(caplog.records) == 2


def test_closing_flushes_and_reopening_finds(tmp_path):
    store = open_store(tmp_path / "s", host_bytes=10_000, disk_bytes=10_000)
    for number in range(5):
        write(store, number)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        write(store, 6)

    with open_store(tmp_path / "s", host_bytes=10_000, disk_bytes=10_000) as store:
        assert [read(store, n) for n in range(5)] == [payload(n) for n in range(5)]


def test_a_program_that_never_closes_still_saves(tmp_path):
    code = (
        "from daric_rag.storage import open_store\n"
        "from tests.storage.records import *\n"
        f"store = open_store({str(tmp_path / 's')!r}, host_bytes=10**6,"
        " disk_bytes=10**6)\n"
        "for n in range(20): store.write(header(n), memoryview(payload(n)))\n"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, cwd=REPOSITORY
    )
    with open_store(tmp_path / "s", host_bytes=10**6, disk_bytes=10**6) as store:
        assert all(read(store, n) == payload(n) for n in range(20))


def test_memory_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_store(":memory:", host_bytes=10_000, disk_bytes=10_000) as store:
        write(store, 1)
        store.flush()
        store.clear_host()
        assert read(store, 1) == payload(1)
        assert store.read_many([key(2)], FINGERPRINT) == [None]
        assert store.stats().disk is None
        store.delete(key(1))
        assert store.keys() == []
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_store(host_bytes=10_000, disk_bytes=10_000) as store:
        assert store.disk.directory == tmp_path / "daric_rag" / "store"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_store_path().is_relative_to(tmp_path / "home")
