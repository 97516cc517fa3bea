"""Folders that cannot be used, disks that are full, an index that fails."""

import contextlib
import os
import sqlite3
import stat

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import DiskTier, new_file, saver
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
    create = new_file._create
    monkeypatch.setattr(new_file, "_create", lambda path: FullDisk(create(path)))

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
    assert len(synced) == 5  # The record, its two folders, the root, the journal.


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
