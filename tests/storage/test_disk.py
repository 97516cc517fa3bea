"""The disk tier of one process: what it keeps over time, and in which order it goes."""

import contextlib
import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from daric_rag.errors import ConfigError
from daric_rag.storage.database import RecordDatabase
from tests.storage.records import (
    CAPACITY_BYTES,
    FINGERPRINT,
    RECORD_BYTES,
    ROOT,
    disk_usage,
    document,
    key,
    payload,
    read,
    record,
    record_files,
)


@pytest.mark.parametrize("policy", ["lru", "frequency"])
def test_reopening_keeps_records_and_their_order(open_disk, policy):
    tier = open_disk(policy=policy)
    for number in range(4):
        tier.write(record(number))
    assert read(tier, 0) == payload(0)
    tier.touch([key(1), key(99)])
    tier.close()

    tier = open_disk(4 * RECORD_BYTES, policy=policy)

    assert tier.keys() == [key(2), key(3), key(0), key(1)]
    assert tier.nbytes == 4 * RECORD_BYTES
    tier.write(record(4))
    assert read(tier, 2) is None
    assert read(tier, 0) == payload(0)


def test_reopening_with_a_smaller_budget_evicts_at_the_next_write(open_disk):
    tier = open_disk()
    for number in range(6):
        tier.write(record(number))
    tier.close()

    tier = open_disk(2 * RECORD_BYTES)
    tier.write(record(6))

    assert tier.keys() == [key(5), key(6)]


def test_a_document_goes_tail_first_and_as_a_whole(open_disk):
    tier = open_disk(5 * RECORD_BYTES)
    for one in [*document([1, 2, 3]), *document([10, 11])]:
        tier.write(one)

    tier.write(record(20))
    assert sorted(tier.keys()) == [key(n) for n in (1, 2, 10, 11, 20)]
    tier.write(record(21))
    tier.write(record(22))
    assert sorted(tier.keys()) == [key(n) for n in (10, 11, 20, 21, 22)]
    assert tier.take_evicted() == [key(3), key(2), key(1)]
    assert tier.take_evicted() == []


def test_what_came_back_is_not_reported_as_evicted(open_disk):
    tier = open_disk(2 * RECORD_BYTES)
    for number in (1, 2, 3, 1):
        tier.write(record(number))

    assert tier.take_evicted() == [key(2)]


def test_a_popular_record_survives_a_flood_under_frequency_only(open_disk, folder):
    survives = {}
    for policy in ("lru", "frequency"):
        tier = open_disk(4 * RECORD_BYTES, policy=policy)
        tier.write(record(1))
        for _ in range(20):
            read(tier, 1)
        for number in range(100, 110):
            tier.write(record(number))
        survives[policy] = tier.contains(key(1))
        tier.evict(tier.keys())
        tier.close()

    assert survives == {"lru": False, "frequency": True}


def test_an_unknown_policy_is_refused(open_disk):
    with pytest.raises(ConfigError, match="'frequency' or 'lru'"):
        open_disk(policy="mru")


def test_a_hit_runs_no_sql(open_disk, monkeypatch):
    tier = open_disk()
    tier.write(record(1))

    def refuse(_):
        raise AssertionError("SQL")

    monkeypatch.setattr(RecordDatabase, "_sql", property(refuse))
    assert read(tier, 1) == payload(1)
    assert tier.contains(key(1))
    tier.touch([key(1)])
    monkeypatch.undo()


def test_opening_reads_the_rows_at_once_and_no_file(open_disk, folder, monkeypatch):
    tier = open_disk()
    for number in range(50):
        tier.write(record(number))
    tier.close()
    statements = []
    real = RecordDatabase._sql.fget

    def recording(database):
        execute = real(database)
        return lambda sql, *args: statements.append(sql) or execute(sql, *args)

    monkeypatch.setattr(RecordDatabase, "_sql", property(recording))
    for path in record_files(folder):
        path.unlink()
    assert len(open_disk().keys()) == 50
    assert sum("FROM Cache" in statement for statement in statements) == 3
    assert any("WHERE key >=" in statement for statement in statements)


def test_segments_tell_what_was_written(open_disk):
    tier = open_disk()
    for one in document([1, 2], side_data=b"title"):
        tier.write(one)
    read(tier, 2)
    tier.pin([key(2)])

    first, last = sorted(tier.segments(), key=lambda row: row.segment_index)

    assert (first.key, first.parent, first.segment_index) == (key(1), ROOT, 0)
    assert (last.key, last.parent, last.segment_index) == (key(2), key(1), 1)
    assert (first.side_data, last.side_data) == (b"", b"title")
    assert (first.uses, last.uses) == (1, 2)
    assert (first.pinned, last.pinned) == (False, True)
    assert last.fingerprint == FINGERPRINT
    assert last.num_tokens == 3
    assert last.nbytes == RECORD_BYTES + len(b"title")
    assert last.last_used >= first.last_used > 1e9


def test_side_data_comes_back_with_the_record(open_disk):
    tier = open_disk()
    tier.write(record(1, side_data=b"title"))

    found = tier.read(key(1), FINGERPRINT)

    assert found.side_data == b"title"
    assert found.header == record(1, side_data=b"title").header


def test_a_pin_keeps_a_document_and_survives_reopening(open_disk):
    tier = open_disk(4 * RECORD_BYTES)
    for one in document([1, 2]):
        tier.write(one)
    assert tier.pin([key(2), key(99)]) == 1
    assert tier.pin([key(2)]) == 0
    tier.close()

    tier = open_disk(4 * RECORD_BYTES)
    for number in range(10, 20):
        tier.write(record(number))
    assert tier.contains(key(1))
    assert tier.contains(key(2))

    assert tier.unpin([key(2)]) == 1
    for number in range(20, 30):
        tier.write(record(number))
    assert not tier.contains(key(1))
    assert not tier.contains(key(2))


def test_what_is_protected_is_not_evicted(open_disk):
    tier = open_disk(2 * RECORD_BYTES)
    tier.write(record(1))
    tier.write(record(2))
    tier.protect([key(1)])

    tier.write(record(3))
    assert sorted(tier.keys()) == [key(1), key(3)]

    tier.release([key(1)])
    tier.write(record(4))
    assert not tier.contains(key(1))


def test_nothing_goes_in_vain_when_there_is_no_room(open_disk, caplog):
    tier = open_disk(3 * RECORD_BYTES)
    for number in (1, 2, 3):
        tier.write(record(number))
    tier.pin([key(1), key(2)])

    tier.write(record(4, num_tokens=6))  # More than the one that may go.
    tier.write(record(5))  # Saving is paused.

    assert sorted(tier.keys()) == [key(1), key(2), key(3)]
    assert tier.stats().failed_writes == 2
    assert caplog.text.count("unpin documents or raise disk_bytes") == 1
    tier.unpin([key(1)])
    tier.write(record(5))
    assert tier.contains(key(5))


def test_evict_frees_what_it_says(open_disk, folder):
    tier = open_disk()
    for one in document([1, 2, 3]):
        tier.write(one)
    tier.pin([key(3)])

    assert tier.evict([key(3), key(2), key(99)]) == 2 * RECORD_BYTES
    assert tier.keys() == [key(1)]
    assert disk_usage(folder) == RECORD_BYTES


def test_verify_finds_damage_and_changes_nothing(open_disk, folder):
    tier = open_disk()
    tier.write(record(1))
    assert tier.verify(key(1)) is None
    assert isinstance(tier.verify(key(2)), FileNotFoundError)

    (path,) = record_files(folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    assert tier.verify(key(1)).kind == "checksum"
    assert path.exists()
    assert tier.contains(key(1))
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.corrupt) == (0, 0, 0)


def test_flush_leaves_nothing_in_memory_only(open_disk, monkeypatch):
    tier = open_disk()
    for number in range(3):
        tier.write(record(number))
    read(tier, 1)
    synced = []
    real = os.fdatasync

    def fdatasync(file):
        synced.append(Path(f"/proc/self/fd/{file}").readlink().name)
        real(file)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    tier.flush()

    assert sum(name.endswith(".val") for name in synced) == 3
    assert synced[-1] == "cache.db-wal"
    synced.clear()
    tier.flush()
    assert synced == ["cache.db-wal"]
    uses = {row.key: row.uses for row in tier.segments()}
    assert uses == {key(0): 1, key(1): 2, key(2): 1}


def test_the_folder_never_exceeds_the_budget_under_threads(open_disk, folder):
    tier = open_disk(4 * RECORD_BYTES)
    done = threading.Event()
    seen = []

    def watch():
        while not done.is_set():
            seen.append(disk_usage(folder))

    def work(seed):
        for step in range(25):
            tier.write(record(seed * 3 + step % 7, num_tokens=1 + step % 3))
        tier.close_thread()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    done.set()
    watcher.join()

    assert 0 < max(seen) <= 4 * RECORD_BYTES
    assert disk_usage(folder) == tier.nbytes == open_disk().nbytes
    assert tier.stats().failed_writes == 0


def test_the_index_agrees_with_the_files(open_disk, folder):
    """diskcache's counter of bytes, kept by triggers, is what the files take."""
    tier = open_disk(5 * RECORD_BYTES)
    for number in range(12):
        tier.write(record(number, num_tokens=1 + number % 4))
        tier.delete(key(max(0, number - 3)))
    tier.close()

    with contextlib.closing(sqlite3.connect(folder / "cache.db")) as database:
        query = "SELECT value FROM Settings WHERE key = 'size'"
        assert database.execute(query).fetchone() == (disk_usage(folder),)
    assert open_disk(CAPACITY_BYTES).nbytes == disk_usage(folder)
