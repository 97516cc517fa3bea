"""Host over disk: writing behind, and giving up rather than waiting."""

import threading
from functools import partial

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import (
    DiskTier,
    HostTier,
    TieredStore,
    saver,
    tiered,
)
from daric_rag.storage.io_pool import WriteBehind
from tests.storage.records import (
    OTHER_FINGERPRINT,
    RECORD_BYTES,
    key,
    keys,
    payload,
    put,
    read,
)


class SlowDisk(DiskTier):
    """A disk that writes, and reads, only while a gate is open."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.write_gate, self.read_gate = threading.Event(), threading.Event()
        self.is_writing, self.is_reading = threading.Event(), threading.Event()
        self.read_gate.set()

    def write(self, record):
        self.is_writing.set()
        assert self.write_gate.wait(30)
        super().write(record)

    def read_many(self, keys, fingerprint):
        found = super().read_many(keys, fingerprint)
        self.is_reading.set()
        assert self.read_gate.wait(30)
        return found


@pytest.fixture
def open_slow(tmp_path):
    opened = []

    def open_one(host_records, **options):
        disk = SlowDisk(tmp_path / "store", 100 * RECORD_BYTES)
        host = HostTier(host_records * RECORD_BYTES)
        opened.append(TieredStore(host, disk, submit_timeout_s=0.01, **options))
        return opened[-1]

    yield open_one
    for store in opened:
        store.disk.write_gate.set()
        store.disk.read_gate.set()
        store.close()


def test_a_queued_record_is_found_without_the_host(open_slow):
    store = open_slow(2, max_pending_bytes=3 * RECORD_BYTES)
    for number in (1, 2, 3):
        put(store, number)
    # What waits for the disk would free nothing, so it is not evicted.
    assert sorted(store.host.keys()) == keys(1, 2)

    assert store.contains(key(3))
    assert read(store, 3) == payload(3)
    assert store.read(key(3), OTHER_FINGERPRINT) is None

    store.disk.write_gate.set()
    store.flush()
    assert sorted(store.disk.keys()) == keys(1, 2, 3)
    assert store.stats().queued_records == store.stats().queued_bytes == 0
    for number in (4, 5):
        put(store, number)
    store.flush()
    assert sorted(store.host.keys()) == keys(4, 5)


def test_a_full_queue_gives_up_the_disk_copy(open_slow):
    store = open_slow(6, max_pending_bytes=3 * RECORD_BYTES)
    for number in range(5):
        put(store, number)

    stats = store.stats()
    assert stats.dropped_writes == 2
    assert stats.queued_bytes == 3 * RECORD_BYTES
    assert read(store, 4) == payload(4)  # In host memory all the same.

    store.disk.write_gate.set()
    store.flush()
    assert sorted(store.disk.keys()) == keys(0, 1, 2)


def test_clear_host_keeps_what_is_nowhere_else(open_slow):
    store = open_slow(2)
    put(store, 1)
    store.clear_host()
    assert store.host.contains(key(1))


def test_deleting_reaches_the_queue(open_slow):
    store = open_slow(4)
    put(store, 1)
    put(store, 2)
    threading.Timer(0.1, store.disk.write_gate.set).start()

    store.delete(key(1))  # Being written: waits for it, then deletes it.
    store.delete(key(2))
    store.flush()

    for number in (1, 2):
        assert not store.contains(key(number))
        assert read(store, number) is None
    assert store.keys() == []


def test_a_required_disk_is_waited_for(open_slow):
    store = open_slow(2, require_disk=True, max_pending_bytes=2 * RECORD_BYTES)
    threading.Timer(0.1, store.disk.write_gate.set).start()
    for number in range(6):  # More than queue and host hold.
        put(store, number)
    store.flush()
    assert sorted(store.disk.keys()) == keys(*range(6))
    assert store.stats().dropped_writes == 0


def test_memory_gives_up_what_a_required_disk_does_not_take(tmp_path, monkeypatch):
    disk = DiskTier(tmp_path / "s", 10_000)
    host = HostTier(10_000)
    with TieredStore(host, disk, require_disk=True) as store:
        put(store, 1)
        store.flush()
        with monkeypatch.context() as patch:
            patch.setattr(saver, "write_record_file", _full)
            patch.setattr(saver, "_PAUSE_S", 0.0)
            put(store, 2)
            store.flush()
        assert store.take_evicted() == [key(2)]
        assert sorted(store.keys()) == keys(1)
        assert store.stats().disk.failed_writes == 1
        put(store, 2)
        store.flush()
        assert sorted(disk.keys()) == keys(1, 2)


def test_what_is_lost_is_told_once_its_writing_is_over(tmp_path):
    class BrokenDisk(DiskTier):
        def write(self, record):
            raise OSError(28, "No space left on device")

    disk = BrokenDisk(tmp_path / "s", 10_000)
    # The host cannot hold it, so that the queue is all there is.
    with TieredStore(HostTier(RECORD_BYTES // 2), disk) as store:
        told = []
        drop = store._writer._drop

        def dropped(key):
            told.append(store.take_evicted())
            drop(key)

        store._writer._drop = dropped
        put(store, 1)
        store.flush()
        assert told == [[]]
        assert store.take_evicted() == [key(1)]


def test_a_required_disk_refuses_what_it_never_has_room_for(tmp_path):
    disk = DiskTier(tmp_path / "s", RECORD_BYTES // 2)
    with (
        TieredStore(HostTier(10_000), disk, require_disk=True) as store,
        pytest.raises(StoreError, match="disk_bytes"),
    ):
        put(store, 1)


def _full(*args, **options):
    raise OSError(28, "No space left on device")


def test_saves_wait_for_loads(open_slow, monkeypatch):
    patient = partial(WriteBehind, max_yield_s=3600)
    monkeypatch.setattr(tiered, "WriteBehind", patient)
    store = open_slow(20)
    store.disk.write_gate.set()
    put(store, 1)
    store.flush()
    store.clear_host()
    store.disk.is_writing.clear()
    store.disk.read_gate.clear()
    reader = threading.Thread(target=read, args=(store, 1))
    reader.start()
    assert store.disk.is_reading.wait(30)

    put(store, 2)
    assert not store.disk.is_writing.wait(0.03)

    store.disk.read_gate.set()
    assert store.disk.is_writing.wait(30)
    reader.join()


def test_what_is_deleted_while_it_is_read_does_not_come_back(open_slow):
    store = open_slow(20)
    store.disk.write_gate.set()
    put(store, 1)
    store.flush()
    store.clear_host()
    store.disk.read_gate.clear()
    reader = threading.Thread(target=read, args=(store, 1))
    reader.start()
    assert store.disk.is_reading.wait(30)

    store.delete(key(1))
    store.disk.read_gate.set()
    reader.join()

    assert not store.contains(key(1))


def test_a_failing_disk_stops_neither_thread_nor_store(tmp_path, caplog):
    class BrokenDisk(DiskTier):
        def write(self, record):
            raise RuntimeError("a defect")

    with TieredStore(HostTier(10_000), BrokenDisk(tmp_path / "s", 10_000)) as store:
        for number in (1, 2):
            put(store, number)
        store.flush()
        assert read(store, 1) == payload(1)
        assert store.stats().dropped_writes == 2
    assert len(caplog.records) == 2
