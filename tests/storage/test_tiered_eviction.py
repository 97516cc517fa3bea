"""Host over disk: what is kept, what goes, and who is told."""

import threading

from daric_rag.storage import (
    DiskTier,
    HostTier,
    TieredStore,
    open_store,
)
from tests.storage.records import (
    FINGERPRINT,
    RECORD_BYTES,
    document,
    key,
    keys,
    payload,
    put,
    read,
    record,
)


def test_host_hits_keep_a_record_young_on_disk(tmp_path):
    budget = 3 * RECORD_BYTES
    with open_store(tmp_path / "s", host_bytes=budget, disk_bytes=budget) as store:
        for number in (1, 2, 3):
            put(store, number)
        store.flush()
        assert read(store, 1) == payload(1)
        put(store, 4)
        store.flush()
        assert sorted(store.disk.keys()) == [key(1), key(3), key(4)]


def test_a_read_does_not_drive_out_what_it_found(tmp_path):
    # One document, in host memory for its first half and on disk for its second.
    num_tokens = 1000
    records = [record(number, num_tokens=num_tokens) for number in range(8)]
    budget = 4 * records[0].record_bytes
    with open_store(tmp_path / "s", host_bytes=budget, disk_bytes=10**9) as store:
        for one in reversed(records):
            store.write(one.header, one.payload)
            store.flush()
        assert sorted(store.host.keys()) == keys(0, 1, 2, 3)

        found = store.read_many(keys(*range(8)), FINGERPRINT)

        assert [one.payload for one in found] == [one.payload for one in records]
        assert sorted(store.host.keys()) == keys(0, 1, 2, 3)
        assert store.stats().overflow_bytes > 0
        del found
        assert store.read(key(7), FINGERPRINT) is not None
        assert store.host.contains(key(7))  # Nothing is held any more.


def test_what_is_protected_stays_in_both_tiers(tmp_path):
    budget = 4 * RECORD_BYTES
    with open_store(tmp_path / "s", host_bytes=budget, disk_bytes=budget) as store:
        for number in (1, 2):
            put(store, number)
        store.protect(keys(1, 2))
        for number in range(10, 20):
            put(store, number)
            store.flush()
        for tier in (store.host, store.disk):
            assert {key(1), key(2)} <= set(tier.keys())

        store.release(keys(1, 2))
        for number in range(20, 30):
            put(store, number)
            store.flush()
        for tier in (store.host, store.disk):
            assert not {key(1), key(2)} & set(tier.keys())


def test_pins_reach_what_is_on_its_way_to_disk_and_last(tmp_path):
    budget = 4 * RECORD_BYTES
    with open_store(tmp_path / "s", host_bytes=budget, disk_bytes=budget) as store:
        for one in document([1, 2, 3]):
            store.write(one.header, one.payload, one.side_data)
        assert store.pin(keys(3)) == 1
        for number in range(10, 20):
            put(store, number)
        store.flush()
        assert set(keys(1, 2, 3)) <= set(store.host.keys())
    with open_store(tmp_path / "s", host_bytes=budget, disk_bytes=budget) as store:
        for number in range(20, 30):
            put(store, number)
        store.flush()
        assert set(keys(1, 2, 3)) <= set(store.disk.keys())

        assert store.unpin(keys(3)) == 1
        for number in range(30, 40):
            put(store, number)
        store.flush()
        assert not {key(3)} & set(store.disk.keys())


def test_what_every_tier_lost_is_told_once():
    with open_store(":memory:", host_bytes=3 * RECORD_BYTES, disk_bytes=0) as store:
        for number in range(5):
            put(store, number)
        put(store, 0)  # Back again.
        assert store.take_evicted() == keys(1, 2)
        assert store.take_evicted() == []


def test_what_the_disk_still_has_is_not_lost(tmp_path):
    with open_store(
        tmp_path / "s", host_bytes=2 * RECORD_BYTES, disk_bytes=4 * RECORD_BYTES
    ) as store:
        for number in range(4):
            put(store, number)
            store.flush()
        assert not store.host.contains(key(0))
        assert store.take_evicted() == []

        for number in range(4, 6):
            put(store, number)
            store.flush()

        assert sorted(store.take_evicted()) == keys(0, 1)


def test_a_record_that_found_no_tier_is_lost(tmp_path):
    class FullDisk(DiskTier):
        gate = threading.Event()

        def write(self, record):
            assert self.gate.wait(30)
            raise OSError("no space left")

    disk = FullDisk(tmp_path / "s", 10_000)
    with TieredStore(HostTier(RECORD_BYTES), disk) as store:
        store.protect(keys(1))
        # Each may exceed the queue, but not both together.
        put(store, 1)
        disk.gate.set()
        store.flush()
        disk.gate.clear()
        put(store, 2)
        assert store.host.keys() == keys(1)
        assert store.take_evicted() == []  # It is on its way to disk.

        disk.gate.set()
        store.flush()

        assert store.take_evicted() == keys(2)


def test_what_has_left_memory_is_told_once(tmp_path):
    with open_store(
        tmp_path / "s", host_bytes=2 * RECORD_BYTES, disk_bytes=9 * RECORD_BYTES
    ) as store:
        for number in range(4):
            put(store, number)
            store.flush()
        assert store.take_demoted() == []  # Nobody has looked yet.
        store.take_evicted()
        assert sorted(store.take_demoted()) == keys(0, 1)
        assert store.take_demoted() == []
        assert [store.in_memory(one) for one in keys(0, 1, 2, 3, 4)] == [
            False,
            False,
            True,
            True,
            False,
        ]
        store.clear_host()
        assert sorted(store.take_demoted()) == keys(2, 3)
        # What has come back meanwhile has not left.
        store.clear_host()
        read(store, 0)
        read(store, 1)
        read(store, 2)
        store.take_evicted()
        left = store.take_demoted()
        assert left
        assert not any(store.in_memory(one) for one in left)
