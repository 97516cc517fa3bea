"""Host memory: no copies, one block of memory, and whole documents evicted."""

import numpy as np
import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import HostTier, Record
from tests.storage.records import (
    FINGERPRINT,
    PAYLOAD_LEN,
    RECORD_BYTES,
    ROOT,
    document,
    header,
    key,
    payload,
    record,
)


def address(view):
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


_LONG = 1000  # tokens: beside such a payload, what a header takes is nothing


def keys(*numbers):
    return [key(number) for number in numbers]


def held(tier):
    return sorted(int.from_bytes(one, "big") for one in list(tier.keys()))


@pytest.fixture
def open_host():
    def open_one(num_records, policy="frequency", num_tokens=3):
        record_bytes = header(0, num_tokens=num_tokens).record_bytes
        return HostTier(num_records * record_bytes, policy=policy)

    return open_one


def fill(tier, number, **fields):
    """Write a record as the runtime does: into a buffer of the tier."""
    one = record(number, **fields)
    buffer = tier.allocate(one.header.payload_len, parent=one.header.parent_key)
    buffer[:] = one.payload
    tier.write(Record(one.header, buffer))


def test_a_read_returns_the_written_buffer(open_host):
    tier = open_host(4)
    buffer = tier.allocate(PAYLOAD_LEN)
    buffer[:] = payload(1)
    tier.write(Record(header(1), buffer))

    found = tier.read(key(1), FINGERPRINT)

    assert address(found.payload) == address(buffer)


def test_a_payload_from_elsewhere_is_copied_into_the_arena(open_host):
    tier = open_host(4)
    tier.write(record(1, side_data=b"title"))

    found = tier.read(key(1), FINGERPRINT)

    assert tier.arena.owns(found.payload)
    assert (found.header, found.side_data) == (
        header(1, side_data=b"title"),
        b"title",
    )
    assert found.payload == payload(1)


def test_one_block_of_memory_serves_for_ever(open_host):
    tier = open_host(3, num_tokens=_LONG)
    for number in range(50):
        fill(tier, number, num_tokens=_LONG)
        assert tier.nbytes <= tier.capacity_bytes
    assert held(tier) == [47, 48, 49]
    assert tier.overflow_bytes == 0
    assert tier.stats().evicted == 47


def test_what_a_reader_sees_is_never_overwritten(open_host):
    tier = open_host(3, num_tokens=_LONG)
    fill(tier, 0, num_tokens=_LONG)
    seen = np.frombuffer(tier.read(key(0), FINGERPRINT).payload, np.uint8)[5:]

    for number in range(1, 50):
        fill(tier, number, num_tokens=_LONG)

    assert not tier.contains(key(0))
    assert seen.tobytes() == payload(0, num_tokens=_LONG)[5:]
    assert len(tier.keys()) == 2  # What is seen takes its room in the arena.
    assert tier.overflow_bytes == 0


def test_more_than_the_tier_holds_is_mapped_apart_and_evicts_nothing(open_host):
    tier = open_host(2)
    fill(tier, 1)

    buffer = tier.allocate(10 * RECORD_BYTES)

    assert buffer.nbytes == tier.overflow_bytes == 10 * RECORD_BYTES
    buffer[-1] = 1
    assert held(tier) == [1]


def test_records_in_use_are_not_evicted_for_a_buffer(open_host):
    tier = open_host(2)
    fill(tier, 1)
    fill(tier, 2)
    tier.hold(keys(1, 2))
    buffers = [tier.allocate(PAYLOAD_LEN) for _ in range(4)]
    assert held(tier) == [1, 2]
    assert tier.overflow_bytes > 0

    tier.release(keys(1, 2))
    buffers.append(tier.allocate(2 * PAYLOAD_LEN))

    assert held(tier) == []
    assert len(buffers) == 5


def test_records_in_use_are_not_evicted_for_a_record(open_host):
    tier = open_host(2)
    fill(tier, 1)
    fill(tier, 2)
    tier.hold(keys(1, 2, 2))

    tier.write(record(3))

    assert held(tier) == [1, 2]
    assert tier.stats().failed_writes == 1
    assert tier.take_evicted() == keys(3)

    tier.release(keys(2))
    tier.release(keys(1))
    tier.write(record(4))
    assert held(tier) == [2, 4]


def test_a_record_may_be_held_before_it_comes(open_host):
    tier = open_host(2)
    tier.hold(keys(1))
    for number in range(1, 5):
        fill(tier, number)
    assert held(tier) == [1, 4]
    with pytest.raises(ValueError, match="hold"):
        tier.release(keys(2))


def test_pins_do_not_count(open_host):
    tier = open_host(2)
    assert tier.pin(keys(1, 9)) == 2
    assert tier.pin(keys(1)) == 0
    for number in range(1, 5):
        fill(tier, number)
    assert held(tier) == [1, 4]

    assert tier.unpin(keys(1, 3)) == 1
    fill(tier, 5)
    fill(tier, 6)

    assert held(tier) == [5, 6]


@pytest.mark.parametrize("policy", ["lru", "frequency"])
def test_documents_go_one_after_the_other_last_segment_first(open_host, policy):
    tier = open_host(6, policy)
    for one in (*document([1, 2, 3]), *document([11, 12, 13])):
        tier.write(one)
    for number in range(21, 25):
        tier.write(record(number))
    assert tier.take_evicted() == keys(3, 2, 1, 13)
    assert tier.take_evicted() == []


def test_a_pinned_last_segment_keeps_the_document(open_host):
    tier = open_host(4)
    for one in document([1, 2, 3]):
        tier.write(one)
    tier.pin(keys(3))
    for number in range(21, 31):
        tier.write(record(number))
    assert held(tier) == [1, 2, 3, 30]


@pytest.mark.parametrize(("policy", "survivors"), [("lru", 0), ("frequency", 5)])
def test_a_flood_leaves_what_is_in_regular_use(open_host, policy, survivors):
    tier = open_host(10, policy)
    for number in range(5):
        tier.write(record(number))
    for _ in range(3):
        tier.read_many(keys(*range(5)), FINGERPRINT)

    for number in range(100, 130):
        tier.write(record(number))

    assert len([one for one in held(tier) if one < 5]) == survivors


def write(tier, number, **fields):
    tier.write(record(number, **fields))


@pytest.mark.parametrize("save", [fill, write])
def test_a_new_document_does_not_displace_itself(open_host, save):
    tier = open_host(4, num_tokens=_LONG)
    for number in (91, 92, 93, 94):
        tier.write(record(number, num_tokens=_LONG))
    for _ in range(5):
        tier.read_many(keys(91, 92, 93, 94), FINGERPRINT)

    for number, parent in ((1, ROOT), (2, key(1)), (3, key(2))):
        save(tier, number, parent=parent, num_tokens=_LONG)

    assert held(tier) == [1, 2, 3, 94]


def test_writing_again_keeps_the_record_of_its_uses(open_host):
    tier = open_host(3)
    tier.write(record(1))
    for _ in range(4):
        tier.read(key(1), FINGERPRINT)
    tier.write(record(1, side_data=b"longer"))
    assert tier.nbytes == RECORD_BYTES + 6
    for number in range(10, 20):
        tier.write(record(number))
    assert tier.read(key(1), FINGERPRINT).side_data == b"longer"


def test_keys_come_in_the_order_of_eviction(open_host):
    tier = open_host(4, "lru")
    for number in (3, 1, 2):
        tier.write(record(number))
    tier.read(key(1), FINGERPRINT)
    assert tier.keys() == keys(3, 2, 1)


def test_a_record_has_one_parent(open_host):
    tier = open_host(4)
    tier.write(record(1))
    with pytest.raises(StoreError, match="parent_key"):
        tier.write(record(1, parent=key(7)))
    assert tier.nbytes == len(tier.keys()) * RECORD_BYTES


def test_closing_frees_everything_but_what_is_seen(open_host):
    num_tokens = 10_000  # 320,000 bytes: more than a page of any system
    tier = open_host(4, num_tokens=num_tokens)
    tier.pin(keys(2))
    fill(tier, 1, num_tokens=num_tokens)
    fill(tier, 2, num_tokens=num_tokens)
    found = tier.read(key(1), FINGERPRINT)

    tier.close()

    assert tier.nbytes == 0
    assert tier.arena.used_bytes == found.payload.nbytes
    assert found.payload == payload(1, num_tokens=num_tokens)
    assert tier.arena.buffer[320_000:].tobytes().count(0) > 900_000


def test_a_budget_beyond_all_memory_names_the_field():
    with pytest.raises(StoreError, match="host_bytes"):
        HostTier(1 << 60)
