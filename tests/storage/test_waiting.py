"""A request waits for no index: a neighbour, a rebuild or an eviction may hold it."""

import sqlite3
import threading
from contextlib import closing, contextmanager

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import HostTier, TieredStore
from daric_rag.storage.database import RecordDatabase
from tests.storage.records import (
    FINGERPRINT,
    RECORD_BYTES,
    disk_usage,
    header,
    key,
    payload,
    read,
    record,
    record_files,
)


@contextmanager
def held(folder):
    """The index, within another process's transaction that does not end."""
    with closing(sqlite3.connect(folder / "cache.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@contextmanager
def stuck(step, monkeypatch):
    """A thread in the midst of a step, until the block ends."""
    begun, gate, in_time = threading.Event(), threading.Event(), []
    real = getattr(RecordDatabase, step)

    def waiting(*args, **kwargs):
        begun.set()
        in_time.append(gate.wait(10))
        return real(*args, **kwargs)

    monkeypatch.setattr(RecordDatabase, step, waiting)
    try:
        yield begun, in_time
    finally:
        gate.set()


def test_calls_of_a_request_return_while_the_index_is_changed(open_disk, monkeypatch):
    disk = open_disk()
    with TieredStore(HostTier(10 * RECORD_BYTES), disk) as store:
        store.write(header(1), memoryview(payload(1)))
        store.flush()
        with stuck("reserve", monkeypatch) as (begun, in_time):
            store.write(header(2), memoryview(payload(2)))
            assert begun.wait(30)
            # The gate opens after these; if one waits for it, not in time.
            store.write(header(3), memoryview(payload(3)))
            assert not store.contains(key(99))
            assert store.contains(key(1))
            assert store.read_many([key(98), key(1)], FINGERPRINT)[0] is None
            assert store.take_evicted() == []
        store.flush()
        assert in_time == [True, True]
        assert disk.contains(key(3))


def test_a_damaged_record_is_a_miss_at_once_and_goes_later(
    open_disk, folder, monkeypatch
):
    monkeypatch.setattr("daric_rag.storage.database.LOCK_TIMEOUT_S", 0.05)
    tier = open_disk()
    tier.write(record(1))
    (path,) = record_files(folder)
    path.write_bytes(b"")

    with held(folder):
        assert read(tier, 1) is None
        assert (
            read(tier, 1) is None
        )  # Its row is there, but it is known for what it is.
    assert tier.stats().corrupt == 1
    assert not tier.contains(key(1))
    tier.save_uses()

    assert record_files(folder) == []
    assert open_disk().segments() == []


def test_a_lookup_reads_no_more_than_it_asks_for(open_disk, monkeypatch):
    """After a failed transaction all rows are due, but not in a request."""
    tier, other = open_disk(), open_disk()
    for number in range(3):
        tier.write(record(number))

    def refuse(*_):
        raise sqlite3.OperationalError("disk I/O error")

    for step in ("publish", "release"):
        monkeypatch.setattr(RecordDatabase, step, refuse)
    tier.write(record(3))
    monkeypatch.undo()
    other.write(record(4))
    monkeypatch.setattr(RecordDatabase, "rows", refuse)
    assert tier.contains(key(4))
    assert read(tier, 4) == payload(4)
    monkeypatch.undo()
    tier.save_uses()
    assert len(tier.keys()) == 4


def test_a_smaller_budget_is_reached_in_short_transactions(
    open_disk, folder, monkeypatch
):
    monkeypatch.setattr("daric_rag.storage.ledger._DELETIONS_PER_TRANSACTION", 5)
    large = open_disk()
    for number in range(40):
        large.write(record(number))
    small = open_disk(4 * RECORD_BYTES)
    deleted = []
    real_delete, real_begin = RecordDatabase.delete, RecordDatabase._begin
    monkeypatch.setattr(
        RecordDatabase,
        "delete",
        lambda *args: deleted.__setitem__(-1, deleted[-1] + 1) or real_delete(*args),
    )
    monkeypatch.setattr(
        RecordDatabase, "_begin", lambda *args: deleted.append(0) or real_begin(*args)
    )

    small.write(record(50))

    assert sum(deleted) == 37
    assert max(deleted) == 5
    assert disk_usage(folder) == small.nbytes == 4 * RECORD_BYTES
    assert small.stats().evicted == 37


def test_a_busy_index_is_named_as_the_reason(open_disk, folder, monkeypatch):
    monkeypatch.setattr("daric_rag.storage.database.LOCK_TIMEOUT_S", 0.05)
    tier = open_disk()
    tier.write(record(1))
    with held(folder), pytest.raises(StoreError, match="another process is busy"):
        tier.pin([key(1)])
