"""What a store tells other processes and the disk, beyond the records it writes."""

import errno
import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from daric_rag.storage import (
    MEMORY,
    HostTier,
    RecordCipher,
    TieredStore,
    open_probe,
    record_file,
    saver,
    syncing,
    tiered,
)
from daric_rag.storage.io_pool import WriteBehind
from tests.storage.records import (
    FINGERPRINT,
    RECORD_BYTES,
    document,
    key,
    keys,
    path_of,
    payload,
    read,
    record,
    uses,
)

PATIENCE_S = 30


def wait_until(is_so) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not (is_true := is_so()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_true


# ------------------------------------------------------------------------------- uses


@pytest.fixture
def serve(open_disk, monkeypatch):
    """Opens a store that has records on disk, and has written nothing itself."""
    prompt = partial(WriteBehind, idle_interval_s=0.01)
    monkeypatch.setattr(tiered, "WriteBehind", prompt)
    opened = []

    def open_one(host_bytes=100 * RECORD_BYTES):
        host = HostTier(host_bytes)
        opened.append(TieredStore(host, open_disk(6 * RECORD_BYTES)))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.mark.parametrize("host_bytes", [1, 100 * RECORD_BYTES])
def test_who_only_reads_tells_its_uses(open_disk, serve, host_bytes):
    other = open_disk(6 * RECORD_BYTES)
    for number in (1, 2):
        other.write(record(number))
    store = serve(host_bytes)
    for _ in range(4):
        store.read_many(keys(1, 2), FINGERPRINT)

    assert wait_until(lambda: uses(other) == {key(1): 5, key(2): 5})

    # Uses after the first tick are told as well.
    store.read_many(keys(2), FINGERPRINT)
    assert wait_until(lambda: uses(other) == {key(1): 5, key(2): 6})


def test_a_flood_elsewhere_spares_what_a_reader_serves(open_disk, serve):
    other = open_disk(6 * RECORD_BYTES)
    for number in range(6):
        other.write(record(number))
    store = serve()
    for _ in range(5):
        store.read_many(keys(0, 1), FINGERPRINT)
    assert wait_until(lambda: uses(other)[key(0)] == uses(other)[key(1)] == 6)

    for number in range(10, 16):
        other.write(record(number))

    assert set(keys(0, 1)) <= set(other.keys())
    assert not set(keys(2, 3)) & set(other.keys())


def test_a_closed_store_leaves_no_thread(serve):
    before = set(threading.enumerate())
    store = serve()
    store.read_many(keys(1), FINGERPRINT)
    assert set(threading.enumerate()) > before
    store.close()
    assert set(threading.enumerate()) == before


# ----------------------------------------------------------------------------- writes


def test_what_was_evicted_elsewhere_is_written_again(open_disk):
    tier, other = open_disk(), open_disk()
    tier.write(record(1))
    other.evict(keys(1))

    tier.write(record(1))

    assert read(open_disk(), 1) == payload(1)


def test_nor_does_host_memory_keep_it_from_being_written(open_disk, serve):
    store, other = serve(), open_disk()
    for _ in range(2):
        one = record(1)
        store.write(one.header, one.payload)
        store.flush()
        assert other.contains(key(1))
        other.evict(keys(1))
    assert store.stats().dropped_writes == 0


@pytest.mark.parametrize("cipher", [None, RecordCipher(b"k" * 32)])
def test_a_document_may_end_within_one_that_is_stored(open_disk, cipher):
    tier = open_disk(cipher=cipher)
    for one in document([1, 2, 3], b"long"):
        tier.write(one)
    read(tier, 2)
    tier.pin(keys(2))
    other = open_disk(cipher=cipher)
    assert other.contains(key(2))
    before = {row.key: row for row in tier.segments()}

    for title in (b"short", b"too late"):
        for one in document([1, 2], title):
            tier.write(one)

    told = [{row.key: row for row in one.segments()} for one in (tier, other)]
    assert told[0] == told[1]
    assert {k: row.side_data for k, row in told[0].items()} == {
        key(1): b"",
        key(2): b"short",
        key(3): b"long",
    }
    row = told[0][key(2)]
    assert (row.uses, row.pinned, row.filename) == (2, True, before[key(2)].filename)
    assert read(tier, 2) == read(other, 2) == payload(2)
    assert tier.take_evicted() == other.take_evicted() == []
    assert tier.nbytes == other.nbytes == sum(row.nbytes for row in before.values())


# ------------------------------------------------------------------------------- sync


@pytest.fixture
def synced(monkeypatch):
    """Paths that were synced, in order."""
    paths = []

    def note(file):
        paths.append(Path(f"/proc/self/fd/{file}").readlink())

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "fdatasync", note)
    return paths


def test_flushing_syncs_every_folder_above_a_record(open_disk, folder, synced):
    tier = open_disk()
    tier.write(record(1))
    path = path_of(tier, 1)
    synced.clear()
    tier.flush()
    assert {path, path.parent, path.parent.parent, folder} <= set(synced)
    assert synced.index(path) == 0  # Or a name might survive its content.


def test_what_is_never_flushed_is_synced_behind(open_disk, monkeypatch, synced):
    monkeypatch.setattr("daric_rag.storage.saver._MAX_UNSYNCED", 8)
    tier = open_disk(20 * RECORD_BYTES)
    for number in range(100):
        tier.write(record(number))
    behind = {path for path in synced if path.suffix == ".val"}
    assert 80 <= len(behind) < 100

    tier.flush()

    assert {path_of(tier, number) for number in range(80, 100)} <= set(synced)


@pytest.mark.parametrize("keeps_pages", [True, False])
def test_pages_are_given_back_where_they_are_not_kept(
    open_disk, monkeypatch, keeps_pages
):
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: advised.append(given[1:]))
    tier = open_disk(100 * RECORD_BYTES, keeps_pages=keeps_pages)
    for number in range(40):
        tier.write(record(number))
    num_behind = len(advised)
    tier.flush()
    given_back = (0, 0, os.POSIX_FADV_DONTNEED)
    assert (num_behind > 0) == (not keeps_pages)
    assert (advised.count(given_back) >= 40) == (not keeps_pages)
    assert bool(advised) == (not keeps_pages)
    assert all(read(tier, number) == payload(number) for number in range(40))


def test_evicted_records_are_not_remembered(open_disk, monkeypatch, synced):
    monkeypatch.setattr("daric_rag.storage.saver._MAX_UNSYNCED", 8)
    tier = open_disk(3 * RECORD_BYTES)
    for number in range(100):
        tier.write(record(number))
    opened = []
    open_file = os.open

    def note(path, *args, **options):
        opened.append(Path(path))
        return open_file(path, *args, **options)

    monkeypatch.setattr(os, "open", note)
    tier.flush()

    assert len([path for path in opened if path.suffix == ".val"]) <= 8
    # Behind the writes, nothing was synced that was not there any more.
    assert len([path for path in synced if path.suffix == ".val"]) <= 3 + 8


def test_a_sync_that_fails_behind_is_told_and_keeps_the_record(
    open_disk, monkeypatch, caplog
):
    monkeypatch.setattr("daric_rag.storage.saver._MAX_UNSYNCED", 2)

    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    tier = open_disk()
    for number in range(4):
        tier.write(record(number))

    assert caplog.text.count("may not survive a power cut") == 1
    assert tier.stats().failed_writes == 0
    assert [read(tier, number) for number in range(4)] == [*map(payload, range(4))]


def test_a_sync_that_fails_costs_the_record_where_it_has_to_last(
    open_disk, monkeypatch, caplog
):
    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    tier = open_disk(keeps_pages=False)
    tier.write(record(0))
    tier.flush()
    tier.write(record(1))
    monkeypatch.setattr(os, "fdatasync", fail)
    tier.flush()
    assert "may not survive a power cut" in caplog.text
    assert tier.stats().failed_syncs == 1
    # Else the next run would find it, and call it safe.
    assert tier.keys() == [key(0)]
    assert tier.take_evicted() == [key(1)]
    monkeypatch.undo()
    tier.write(record(1))
    tier.flush()
    assert (read(tier, 1), tier.stats().failed_syncs) == (payload(1), 1)


def test_a_sync_that_fails_behind_costs_the_records_where_they_have_to_last(
    open_disk, monkeypatch
):
    monkeypatch.setattr("daric_rag.storage.saver._MAX_UNSYNCED_UNKEPT", 4)

    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    tier = open_disk(keeps_pages=False)
    for number in range(5):
        tier.write(record(number))
    assert tier.keys() == [key(2), key(3), key(4)]
    assert tier.stats().failed_syncs == 2


@pytest.mark.parametrize("keeps_pages", [True, False])
def test_what_others_wrote_is_synced_where_it_has_to_last(
    open_disk, folder, monkeypatch, keeps_pages
):
    synced = []
    monkeypatch.setattr(saver, "sync_file_system", synced.append)
    open_disk().write(record(1))
    tier = open_disk(keeps_pages=keeps_pages)
    assert tier.contains(key(1))
    tier.flush()
    assert synced == ([] if keeps_pages else [folder])


def test_a_file_system_that_does_not_sync_is_told(open_disk, monkeypatch, caplog):
    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    tier = open_disk(keeps_pages=False)
    monkeypatch.setattr(saver, "sync_file_system", fail)
    tier.flush()
    assert tier.stats().failed_syncs == 1
    assert "may not survive a power cut" in caplog.text


def test_file_systems_are_synced(tmp_path, monkeypatch):
    syncing.sync_file_system(tmp_path)
    with pytest.raises(FileNotFoundError):
        syncing.sync_file_system(tmp_path / "absent")
    calls = []
    monkeypatch.setattr(syncing, "_syncfs", lambda: lambda file: -1)
    monkeypatch.setattr(syncing.ctypes, "get_errno", lambda: errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        syncing.sync_file_system(tmp_path)
    monkeypatch.setattr(syncing, "_syncfs", lambda: None)
    monkeypatch.setattr(os, "sync", lambda: calls.append("all"))
    syncing.sync_file_system(tmp_path)
    assert calls[-1] == "all"


# ------------------------------------------------------------------------- the machine


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_mount_in_trouble_costs_no_record(open_disk, monkeypatch, number):
    tier = open_disk()
    tier.write(record(1))

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(record_file, "_open_regular", fail)
    assert read(tier, 1) is None
    monkeypatch.undo()

    assert tier.stats().corrupt == 0
    assert read(tier, 1) == payload(1)


@pytest.mark.parametrize("options", [{"path": MEMORY, "disk_bytes": 1}, {}])
def test_a_probe_of_a_store_without_disk_makes_no_folder(folder, options):
    probe = open_probe(**({"path": folder, "disk_bytes": 0} | options))
    assert not probe.contains(key(1))
    probe.close()
    assert not folder.exists()


def test_a_probe_of_a_store_with_disk_finds_its_records(open_disk, folder):
    open_disk().write(record(1))
    probe = open_probe(folder, disk_bytes=1)
    assert probe.contains(key(1))
    probe.close()
