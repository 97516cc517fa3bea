"""What every tier promises, held against each of them and against both together."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import DiskTier, HostTier, RecordCipher, TieredStore
from daric_rag.storage.cipher import OVERHEAD
from tests.storage.records import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    RECORD_BYTES,
    document,
    header,
    key,
    payload,
    read,
    record,
)


class TieredAsTier(TieredStore):
    """The store under the tier's signature, its disk settled after each write."""

    def write(self, one):
        super().write(one.header, one.payload, one.side_data)
        self.flush()

    @property
    def capacity_bytes(self):
        return self.disk.capacity_bytes

    @property
    def nbytes(self):
        return max(self.host.nbytes, self.disk.nbytes)

    def stats(self):
        return super().stats().disk


def open_host(folder, capacity_bytes, **options):
    return HostTier(capacity_bytes, **options)


def open_encrypted(folder, capacity_bytes):
    cipher = RecordCipher(b"k" * 32)
    # The budget is in bytes on disk, and sealing takes some.
    return DiskTier(folder, capacity_bytes // RECORD_BYTES * FILE_BYTES, cipher=cipher)


def open_tiered(folder, capacity_bytes, policy="frequency"):
    host = HostTier(capacity_bytes, policy=policy)
    disk = DiskTier(folder, capacity_bytes, allocate=host.allocate, policy=policy)
    return TieredAsTier(host, disk, submit_timeout_s=60)


FILE_BYTES = RECORD_BYTES + OVERHEAD

OPENERS = {
    "host": open_host,
    "host, lru": partial(open_host, policy="lru"),
    "disk": DiskTier,
    "disk, lru": partial(DiskTier, policy="lru"),
    "disk, encrypted": open_encrypted,
    "tiered": open_tiered,
    "tiered, lru": partial(open_tiered, policy="lru"),
}


@pytest.fixture(params=OPENERS)
def name(request):
    return request.param


@pytest.fixture
def open_tier(name, tmp_path):
    opened = []

    def open_one(num_records):
        opened.append(OPENERS[name](tmp_path / "store", num_records * RECORD_BYTES))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()
        tier.close()


@pytest.fixture
def record_bytes(name):
    return FILE_BYTES if name == "disk, encrypted" else RECORD_BYTES


def test_a_written_record_is_read_back(open_tier, record_bytes):
    tier = open_tier(4)
    tier.write(record(1))

    found = tier.read(key(1), FINGERPRINT)

    assert replace(found.header, encrypted=False) == header(1)
    assert found.payload == payload(1)
    assert found.payload.readonly
    assert tier.contains(key(1))
    assert list(tier.keys()) == [key(1)]
    assert tier.nbytes == record_bytes


def test_what_a_document_says_of_itself_is_read_back(open_tier):
    tier = open_tier(6)
    for one in document([1, 2], side_data=b"a title"):
        tier.write(one)

    first, last = tier.read_many([key(1), key(2)], FINGERPRINT)

    assert (first.side_data, last.side_data) == (b"", b"a title")
    assert last.header.parent_key == key(1)
    assert last.header.segment_index == 1


def test_an_absent_record_is_none(open_tier):
    tier = open_tier(4)
    assert tier.read(key(1), FINGERPRINT) is None
    assert not tier.contains(key(1))
    assert tier.stats().misses == 1


def test_a_record_of_another_model_is_a_miss_and_is_deleted(open_tier):
    tier = open_tier(4)
    tier.write(record(1))

    assert tier.read(key(1), OTHER_FINGERPRINT) is None
    assert tier.read(key(1), FINGERPRINT) is None
    assert not tier.contains(key(1))
    assert tier.nbytes == 0
    assert tier.stats().corrupt == 1


def test_read_many_answers_in_order(open_tier):
    tier = open_tier(4)
    tier.write(record(1))
    tier.write(record(2))

    found = tier.read_many([key(2), key(9), key(1), key(2)], FINGERPRINT)

    contents = [None if one is None else bytes(one.payload) for one in found]
    assert contents == [payload(2), None, payload(1), payload(2)]
    assert tier.read_many([], FINGERPRINT) == []


def test_delete_forgets_and_may_be_repeated(open_tier):
    tier = open_tier(4)
    tier.write(record(1))
    tier.delete(key(1))
    tier.delete(key(1))

    assert read(tier, 1) is None
    assert tier.nbytes == 0


def test_writing_again_takes_no_room(open_tier, record_bytes):
    tier = open_tier(1)
    tier.write(record(1))
    tier.write(record(1))

    assert read(tier, 1) == payload(1)
    assert tier.nbytes == record_bytes
    assert tier.stats().evicted == 0


def test_the_least_recently_used_is_evicted(open_tier):
    tier = open_tier(2)
    tier.write(record(1))
    tier.write(record(2))
    assert read(tier, 1) == payload(1)

    tier.write(record(3))

    assert not tier.contains(key(2))
    assert read(tier, 1) == payload(1)
    assert read(tier, 3) == payload(3)
    assert tier.stats().evicted == 1


def test_a_document_goes_from_its_end(open_tier):
    tier = open_tier(4)
    for one in document([1, 2, 3]):
        tier.write(one)
    for number in (7, 8, 9):
        tier.write(record(number))
    assert sorted(tier.keys()) == [key(1), key(7), key(8), key(9)]


def test_eviction_is_byte_accurate(open_tier, record_bytes):
    tier = open_tier(3)
    for number in range(3):
        tier.write(record(number))
    assert tier.nbytes == 3 * record_bytes  # An exact fit evicts nothing.

    tier.write(record(7, num_tokens=4))  # 32 bytes more than one record.

    assert sorted(tier.keys()) == [key(2), key(7)]
    assert tier.nbytes == 2 * record_bytes + 32


def test_a_record_over_the_whole_budget_is_refused(open_tier):
    tier = open_tier(1)
    tier.write(record(1))

    with pytest.raises(StoreError, match="max_segment_len"):
        tier.write(record(2, num_tokens=4))

    assert read(tier, 1) == payload(1)
    assert read(tier, 2) is None


def test_a_payload_outlives_its_record(open_tier):
    tier = open_tier(1)
    tier.write(record(1))
    held = tier.read(key(1), FINGERPRINT).payload
    for number in range(2, 8):
        tier.write(record(number))
        tier.read(key(number), FINGERPRINT)
    tier.close()

    assert held == payload(1)


def test_budget_and_content_hold_under_threads(open_tier, record_bytes):
    tier = open_tier(5)
    over_budget = threading.Event()

    def work(seed):
        for step in range(40):
            number = (seed * 7 + step * 3) % 11
            if step % 2:
                tier.write(record(number, num_tokens=1 + number % 4))
            elif (found := tier.read(key(number), FINGERPRINT)) is not None:
                assert found.payload == payload(number, num_tokens=1 + number % 4)
            if step % 13 == 0:
                tier.delete(key(number))
            if tier.nbytes > tier.capacity_bytes:
                over_budget.set()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))

    assert not over_budget.is_set()
    # Host and disk may hold different records: their orders of use differ.
    for level in [tier.host, tier.disk] if isinstance(tier, TieredStore) else [tier]:
        held = [int.from_bytes(one) for one in list(level.keys())]
        expected = sum(record_bytes - 64 + 32 * (number % 4) for number in held)
        assert 0 < level.nbytes == expected <= level.capacity_bytes
    for number in held:
        assert read(tier, number) == payload(number, num_tokens=1 + number % 4)
    assert tier.stats().corrupt == 0
