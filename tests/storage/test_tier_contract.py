"""What every tier promises, held against each of them and against both together."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import DiskTier, HostTier, TieredStore
from tests.storage.records import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    RECORD_BYTES,
    key,
    payload,
    record,
)


class TieredAsTier(TieredStore):
    """The store under the tier's signature, its disk settled after each write."""

    def write(self, one):
        super().write(one.header, one.payload)
        self.flush()

    @property
    def capacity_bytes(self):
        return self.disk.capacity_bytes

    @property
    def nbytes(self):
        return max(self.host.nbytes, self.disk.nbytes)

    def stats(self):
        return super().stats().disk


@pytest.fixture(params=["host", "disk", "tiered"])
def open_tier(request, tmp_path):
    opened = []

    def open_one(num_records):
        capacity_bytes = num_records * RECORD_BYTES
        if request.param == "host":
            tier = HostTier(capacity_bytes)
        elif request.param == "disk":
            tier = DiskTier(tmp_path / "store", capacity_bytes)
        else:
            disk = DiskTier(tmp_path / "store", capacity_bytes)
            tier = TieredAsTier(HostTier(capacity_bytes), disk, submit_timeout_s=60)
        opened.append(tier)
        return tier

    yield open_one
    for tier in opened:
        tier.close()
        tier.close()


def read(tier, number):
    found = tier.read(key(number), FINGERPRINT)
    return None if found is None else bytes(found.payload)


def test_a_written_record_is_read_back(open_tier):
    tier = open_tier(4)
    tier.write(record(1))

    found = tier.read(key(1), FINGERPRINT)

    assert found.header == record(1).header
    assert found.payload == payload(1)
    assert found.payload.readonly
    assert tier.contains(key(1))
    assert list(tier.keys()) == [key(1)]
    assert tier.nbytes == RECORD_BYTES


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


def test_writing_again_replaces(open_tier):
    tier = open_tier(1)
    tier.write(record(1))
    tier.write(record(1))

    assert read(tier, 1) == payload(1)
    assert tier.nbytes == RECORD_BYTES
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


def test_eviction_is_byte_accurate(open_tier):
    tier = open_tier(3)
    for number in range(3):
        tier.write(record(number))
    assert tier.nbytes == 3 * RECORD_BYTES  # An exact fit evicts nothing.

    tier.write(record(7, num_tokens=4))  # 32 bytes more than one record.

    assert sorted(tier.keys()) == [key(2), key(7)]
    assert tier.nbytes == 2 * RECORD_BYTES + 32


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


def test_budget_and_content_hold_under_threads(open_tier):
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
        expected = sum(144 + 32 * (1 + number % 4) for number in held)
        assert 0 < level.nbytes == expected <= level.capacity_bytes
    for number in held:
        assert read(tier, number) == payload(number, num_tokens=1 + number % 4)
    assert tier.stats().corrupt == 0
