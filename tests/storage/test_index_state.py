"""An index whose state lost a bit is made anew; it breaks neither calls nor budget."""

import sqlite3
from contextlib import closing

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage.folder import open_database
from tests.storage.records import (
    FINGERPRINT,
    RECORD_BYTES,
    disk_usage,
    key,
    payload,
    read,
    record,
)

BUDGET = 10 * RECORD_BYTES


def edit(folder, statement, *values):
    with closing(sqlite3.connect(folder / "cache.db")) as database:
        database.execute(statement, values)
        database.commit()


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("column", ["changes", "clock", "forgotten"])
@pytest.mark.parametrize("value", [None, "x", 1.5, -1, 2**63 - 1])
def test_a_state_that_cannot_be_is_made_anew(open_disk, folder, is_open, column, value):
    tier = open_disk()
    for number in range(5):
        tier.write(record(number))
    tier.pin([key(1)])
    if not is_open:
        tier.close()
    edit(folder, f"UPDATE daric_state SET {column} = ?", value)
    if not is_open:
        tier = open_disk()

    assert read(tier, 99) is None
    tier.write(record(50))
    tier.flush()
    tier.take_evicted()

    assert tier.stats().failed_writes == 0
    for number in (0, 1, 2, 3, 4, 50):
        assert read(open_disk(), number) == payload(number)
    assert [row.key for row in open_disk().segments() if row.pinned] == [key(1)]


@pytest.mark.parametrize("size", [-(10**6), 10**12, None, "x"])
def test_the_sum_of_sizes_is_counted_when_a_store_is_opened(open_disk, folder, size):
    tier = open_disk(BUDGET)
    for number in range(10):
        tier.write(record(number))
    tier.close()
    edit(folder, "UPDATE Settings SET value = ? WHERE key = 'size'", size)

    tier = open_disk(BUDGET)
    for number in range(100, 130):
        tier.write(record(number))

    assert disk_usage(folder) == tier.nbytes == BUDGET
    assert tier.stats().failed_writes == 0


def test_a_sum_that_cannot_be_is_counted_anew_while_in_use(open_disk, folder):
    tier = open_disk(BUDGET)
    for number in range(10):
        tier.write(record(number))
    edit(folder, "UPDATE Settings SET value = -1000000 WHERE key = 'size'")

    tier.write(record(100))  # Finds the damage; then saving is paused.
    tier.unpin([])
    for number in range(101, 115):
        tier.write(record(number))

    assert disk_usage(folder) == tier.nbytes == BUDGET


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("access_count", 2**63 - 1),
        ("access_count", -(2**63)),
        ("access_time", 1e308),
        ("access_time", float("inf")),
        ("daric_priority", 2**63 - 1),
    ],
)
def test_a_use_that_cannot_be_harms_no_request(open_disk, folder, column, value):
    tier = open_disk()
    for number in (1, 2):
        tier.write(record(number))
    tier.close()
    edit(folder, f"UPDATE Cache SET {column} = ? WHERE key = ?", value, key(1))

    tier = open_disk()
    for _ in range(2):
        found = tier.read_many([key(1), key(2)], FINGERPRINT)
        assert [bytes(one.payload) for one in found] == [payload(1), payload(2)]
        tier.flush()
    assert all(0 <= row.last_used < 2**38 for row in open_disk().segments())


def test_a_planted_reservation_deletes_nothing_outside(open_disk, folder, tmp_path):
    open_disk().close()
    outside = tmp_path / "outside.val"
    outside.write_text("precious")
    edit(
        folder,
        "INSERT INTO Cache(key, raw, store_time, mode, filename, size)"
        " VALUES (?, 1, 0, 0, '../outside.val', 5)",
        b"\0daric\0\0" + bytes(22),
    )

    tier = open_disk(2 * RECORD_BYTES)
    for number in range(4):
        tier.write(record(number))

    assert outside.exists()
    assert tier.nbytes == disk_usage(folder) == 2 * RECORD_BYTES


@pytest.mark.parametrize("error", [ValueError("no text"), sqlite3.DatabaseError("bit")])
def test_an_index_damaged_while_it_is_made_is_made_once_more(open_disk, folder, error):
    tier = open_disk()
    for number in range(3):
        tier.write(record(number))
    tier.pin([key(1)])
    tier.close()
    failures = [error, error]

    def load(database):
        if failures:
            raise failures.pop()

    open_database(folder, None, load).close()
    assert not failures
    tier = open_disk()
    assert all(read(tier, number) == payload(number) for number in range(3))
    assert [row.key for row in tier.segments() if row.pinned] == [key(1)]


def test_an_index_that_is_always_damaged_is_given_up(open_disk, folder):
    """With a reason, and with every record still there."""
    tier = open_disk()
    tier.write(record(0))
    tier.close()

    def load(database):
        raise sqlite3.DatabaseError("bit")

    with pytest.raises(StoreError, match="check the disk"):
        open_database(folder, None, load)
    assert read(open_disk(), 0) == payload(0)
