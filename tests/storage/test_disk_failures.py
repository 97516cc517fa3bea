"""Folders that cannot be used, disks that are full, an index that fails."""

import contextlib
import gc
import os
import shutil
import sqlite3
import stat
import tempfile
from pathlib import Path

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import DiskTier, StoreProbe, record_file, saver
from daric_rag.storage.database import RecordDatabase
from tests.storage.records import (
    CAPACITY_BYTES,
    FINGERPRINT,
    RECORD_BYTES,
    disk_usage,
    key,
    payload,
    read,
    record,
    record_files,
)


def test_the_folder_is_private(open_disk, folder):
    open_disk()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_path_below_a_file_is_a_store_error(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file/store"):
        with pytest.raises(StoreError, match="choose a folder"):
            DiskTier(path, CAPACITY_BYTES)


def refuse_writing(*_, **__):
    raise sqlite3.OperationalError("attempt to write a readonly database")


def test_a_new_folder_that_cannot_be_written_is_a_store_error(folder, monkeypatch):
    monkeypatch.setattr("daric_rag.storage.folder.RecordDatabase", refuse_writing)
    with pytest.raises(StoreError, match=r"readonly.*:memory:"):
        DiskTier(folder, CAPACITY_BYTES)


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")

    with pytest.raises(StoreError, match="not empty"):
        DiskTier(tmp_path, CAPACITY_BYTES)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_key_of_the_wrong_length_is_a_store_error(open_disk):
    with pytest.raises(StoreError, match="32 bytes"):
        open_disk().read(b"short", FINGERPRINT)


class FullDisk:
    """A file that takes ten bytes and then finds the disk full."""

    def __init__(self, file):
        self.file = file
        self.written = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, part):
        if self.written:
            raise OSError(28, "No space left on device")
        self.written = self.file.write(part[:10])
        return self.written


def test_a_full_disk_pauses_saving_and_keeps_serving(
    open_disk, folder, monkeypatch, caplog
):
    tier = open_disk()
    tier.write(record(1))
    create = record_file._create
    monkeypatch.setattr(record_file, "_create", lambda path: FullDisk(create(path)))

    for number in (2, 3):
        tier.write(record(number))

    assert tier.stats().failed_writes == 2
    assert caplog.text.count("is paused") == 1
    assert "No space left" in caplog.text
    assert len(record_files(folder)) == 1  # The half-written file is gone.
    assert read(tier, 1) == payload(1)
    assert read(tier, 2) is None

    monkeypatch.undo()
    tier.write(record(4))
    assert read(tier, 4) is None  # Still paused.
    monkeypatch.setattr(saver.time, "monotonic", lambda: 1e12)
    tier.write(record(4))
    assert read(tier, 4) == payload(4)
    assert tier.nbytes == disk_usage(folder) == 2 * RECORD_BYTES


@pytest.mark.parametrize("statement", ["INSERT INTO Cache", "UPDATE Cache", "COMMIT"])
def test_an_index_that_cannot_be_written_leaves_no_file(
    open_disk, folder, monkeypatch, statement
):
    tier = open_disk()
    tier.write(record(1))
    real = RecordDatabase._sql.fget

    def failing(cache):
        def execute(sql, *args):
            if sql.startswith(statement):
                raise sqlite3.OperationalError("database or disk is full")
            return real(cache)(sql, *args)

        return execute

    monkeypatch.setattr(RecordDatabase, "_sql", property(failing))
    tier.write(record(2))
    monkeypatch.undo()

    assert tier.stats().failed_writes == 1
    assert len(record_files(folder)) == 1
    assert read(tier, 1) == payload(1)
    assert read(tier, 2) is None
    # The connection is not stuck inside the transaction that failed.
    monkeypatch.setattr(saver.time, "monotonic", lambda: 1e12)
    tier.write(record(3))
    assert read(tier, 3) == payload(3)
    assert tier.nbytes == disk_usage(folder) == 2 * RECORD_BYTES
    assert sorted(open_disk().keys()) == sorted(tier.keys())


def test_protection_survives_a_failed_transaction(open_disk, monkeypatch):
    tier = open_disk(2 * RECORD_BYTES)
    for number in (1, 2):
        tier.write(record(number))
    tier.protect([key(1)])
    monkeypatch.setattr(RecordDatabase, "publish", refuse_writing)
    tier.write(record(3))
    monkeypatch.undo()
    monkeypatch.setattr(saver.time, "monotonic", lambda: 1e12)

    for number in (4, 5):
        tier.write(record(number))

    assert sorted(tier.keys()) == [key(1), key(5)]
    tier.release([key(1)])
    tier.write(record(6))
    assert sorted(tier.keys()) == [key(5), key(6)]


def test_a_disk_that_does_not_sync_is_told_and_tried_again(
    open_disk, monkeypatch, caplog
):
    tier = open_disk()
    tier.write(record(1))

    def fail(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    tier.flush()
    assert "may not survive a power cut" in caplog.text
    monkeypatch.undo()
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    tier.flush()
    assert len(synced) == 4  # The record, its two folders, the journal.


def test_an_index_that_cannot_be_read_is_a_miss(open_disk, monkeypatch):
    tier = open_disk()

    def malformed(*_, **__):
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(RecordDatabase, "state", malformed)
    assert read(tier, 1) is None
    assert not tier.contains(key(1))
    monkeypatch.undo()


def test_an_index_that_another_process_holds_for_long_is_no_alarm(
    open_disk, folder, monkeypatch, caplog
):
    monkeypatch.setattr("daric_rag.storage.database.LOCK_TIMEOUT_S", 0.05)
    tier = open_disk()
    with contextlib.closing(
        sqlite3.connect(folder / "cache.db", isolation_level=None)
    ) as other:
        other.execute("BEGIN IMMEDIATE")
        tier.write(record(1))
        assert tier.stats().failed_writes == 1
        other.execute("ROLLBACK")
    tier.write(record(1))

    assert read(tier, 1) == payload(1)
    assert caplog.text == ""


@pytest.fixture
def as_nobody():
    """The folder's path, and a switch to a user who may read it and no more."""
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        parent.chmod(0o755)
        folder = parent / "store"

        @contextlib.contextmanager
        def switch():
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o555 if path.is_dir() else 0o444)
            if os.geteuid() == 0:
                os.seteuid(65534)
                try:
                    yield
                finally:
                    os.seteuid(0)
            else:
                yield
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o755 if path.is_dir() else 0o644)

        yield folder, switch


def test_a_folder_that_can_only_be_read_is_served(as_nobody, caplog):
    folder, switch = as_nobody
    tier = DiskTier(folder, CAPACITY_BYTES)
    for number in range(3):
        tier.write(record(number))
    tier.pin([key(1)])
    tier.close()
    damaged = folder / tier._index.find(key(2))
    damaged.write_bytes(b"")

    with switch():
        probe = StoreProbe(folder)
        assert probe.contains(key(1))
        assert not probe.contains(key(7))
        probe.close()
        tier = DiskTier(folder, CAPACITY_BYTES)
        assert tier.read_only
        assert [read(tier, number) for number in (0, 1, 2, 7)] == [
            payload(0),
            payload(1),
            None,
            None,
        ]
        tier.write(record(3))
        tier.delete(key(0))
        tier.touch([key(1)])
        tier.flush()
        assert tier.evict([key(0)]) == 0
        assert tier.stats().failed_writes == 1
        assert len(tier.segments()) == 3
        for change in (tier.reclaim, lambda: tier.unpin([key(1)])):
            with pytest.raises(StoreError, match="writable"):
                change()
        tier.close()

    assert damaged.exists()
    assert caplog.text.count("can only be read") == 1
    tier = DiskTier(folder, CAPACITY_BYTES)
    assert not tier.read_only
    assert read(tier, 0) == payload(0)
    tier.close()


def test_a_store_that_becomes_unwritable_goes_on_serving(open_disk, monkeypatch):
    tier = open_disk()
    tier.write(record(1))
    real = RecordDatabase._sql.fget

    def failing(database):
        def execute(sql, *args):
            if sql.startswith("BEGIN"):
                refuse_writing()
            return real(database)(sql, *args)

        return execute

    monkeypatch.setattr(RecordDatabase, "_sql", property(failing))
    tier.write(record(2))
    assert tier.stats().failed_writes == 1
    assert read(tier, 1) == payload(1)
    assert tier.evict([key(1)]) == 0
    monkeypatch.undo()
    monkeypatch.setattr(saver.time, "monotonic", lambda: 1e12)
    tier.write(record(2))
    assert read(tier, 2) == payload(2)


@pytest.mark.parametrize("how", ["deleted", "emptied", "replaced"])
def test_a_folder_that_vanishes_is_made_anew_at_the_next_write(
    open_disk, folder, caplog, how
):
    tier = open_disk()
    for number in (1, 2):
        tier.write(record(number))
    probe = StoreProbe(folder)
    assert probe.contains(key(1))
    shutil.rmtree(folder)
    if how == "emptied":
        folder.mkdir()
    if how == "replaced":
        other = DiskTier(folder, CAPACITY_BYTES)
        other.write(record(9))
        other.close()

    assert read(tier, 1) is None
    tier.write(record(2))
    tier.write(record(3))

    expected = {key(2), key(3)} | ({key(9)} if how == "replaced" else set())
    assert set(tier.keys()) == set(open_disk().keys()) == expected
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert caplog.text.count("deleted or replaced while in use") == 1
    assert tier.stats().failed_writes == 0
    assert key(1) in tier.take_evicted()
    assert probe.contains(key(3))
    probe.close()


def test_a_folder_that_vanishes_during_a_write_costs_no_record(
    open_disk, folder, monkeypatch
):
    tier = open_disk()
    for step in ("before the row", "after the row"):
        publish = RecordDatabase.publish

        def vanishing(database, *args, step=step, publish=publish):
            monkeypatch.undo()
            if step == "before the row":
                shutil.rmtree(folder)
            done = publish(database, *args)
            if step == "after the row":
                shutil.rmtree(folder)
            return done

        monkeypatch.setattr(RecordDatabase, "publish", vanishing)
        tier.write(record(1))
        monkeypatch.undo()
        assert read(tier, 1) == payload(1)
        assert open_disk().keys() == [key(1)]
        tier.delete(key(1))


def test_a_refused_folder_leaves_nothing_open(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "DARIC_STORE_3").touch()
    (tmp_path / "file").touch()
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in (tmp_path, tmp_path / "store", tmp_path / "file"):
        for kind in (lambda p: DiskTier(p, CAPACITY_BYTES), StoreProbe):
            with pytest.raises(StoreError):
                kind(path)
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
