"""Folders that cannot be used, disks that are full, an index that fails."""

import sqlite3
import stat

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import DiskTier, disk, record_file
from tests.storage.records import (
    CAPACITY_BYTES,
    FINGERPRINT,
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


def test_a_folder_that_cannot_be_written_is_a_store_error(folder, monkeypatch):
    def refuse(*_, **__):
        raise sqlite3.OperationalError("attempt to write a readonly database")

    monkeypatch.setattr("daric_rag.storage.folder._open", refuse)
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
    monkeypatch.setattr(disk.time, "monotonic", lambda: 1e12)
    tier.write(record(4))
    assert read(tier, 4) == payload(4)


@pytest.mark.parametrize("statement", ["INSERT INTO Cache", "COMMIT"])
def test_an_index_that_cannot_be_written_leaves_no_file(
    open_disk, folder, monkeypatch, statement
):
    tier = open_disk()
    tier.write(record(1))
    cache_class = type(tier._cache)
    real = cache_class._sql.fget

    def failing(cache):
        def execute(sql, *args):
            if sql.startswith(statement):
                raise sqlite3.OperationalError("database or disk is full")
            return real(cache)(sql, *args)

        return execute

    monkeypatch.setattr(cache_class, "_sql", property(failing))
    tier.write(record(2))
    monkeypatch.undo()

    assert tier.stats().failed_writes == 1
    assert len(record_files(folder)) == 1
    assert read(tier, 1) == payload(1)
    assert read(tier, 2) is None
    # The connection is not stuck inside the transaction that failed.
    monkeypatch.setattr(disk.time, "monotonic", lambda: 1e12)
    tier.write(record(3))
    assert read(tier, 3) == payload(3)


def test_an_index_that_cannot_be_read_is_a_miss(open_disk, monkeypatch):
    tier = open_disk()

    def malformed(*_, **__):
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(tier._cache, "get", malformed)
    assert read(tier, 1) is None
    assert not tier.contains(key(1))
