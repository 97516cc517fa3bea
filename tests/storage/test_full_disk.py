"""A disk without any room: the store opens for reading, and evicting mends it."""

import os
import sqlite3
from types import SimpleNamespace

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage.admin import open_existing
from daric_rag.storage.database import RecordDatabase
from tests.storage.records import (
    RECORD_BYTES,
    disk_usage,
    key,
    payload,
    read,
    record,
    record_files,
)

_NUM_RECORDS = 5


@pytest.fixture
def full(open_disk, folder, monkeypatch):
    """A store on a disk that is full until a record's file is gone."""
    tier = open_disk()
    for number in range(_NUM_RECORDS):
        tier.write(record(number))
    tier.close()
    init = RecordDatabase.__init__

    def is_full():
        return len(record_files(folder)) == _NUM_RECORDS

    def statvfs(_):
        free = 0 if is_full() else 1 << 20
        return SimpleNamespace(f_files=9, f_favail=9, f_bavail=free, f_frsize=1)

    def failing(database, directory):
        if is_full():
            raise sqlite3.OperationalError("disk I/O error")
        init(database, directory)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(RecordDatabase, "__init__", failing)


def test_a_store_on_a_full_disk_is_served(full, open_disk):
    tier = open_disk()
    assert tier.read_only
    contents = [read(tier, number) for number in range(_NUM_RECORDS)]
    assert contents == [payload(number) for number in range(_NUM_RECORDS)]
    with pytest.raises(StoreError, match="evict documents"):
        tier.reclaim()


def test_evicting_frees_a_full_disk_and_makes_the_store_writable(full, folder):
    tier = open_existing(folder, writes=True)

    assert tier.evict([key(0), key(1)]) == 2 * RECORD_BYTES

    assert not tier.read_only
    assert disk_usage(folder) == tier.nbytes == (_NUM_RECORDS - 2) * RECORD_BYTES
    assert [row.key for row in tier.segments()] == [key(2), key(3), key(4)]
    tier.write(record(9))
    assert read(tier, 9) == payload(9)
    tier.close()


def test_an_error_of_the_disk_is_no_lack_of_room(folder, open_disk, monkeypatch):
    open_disk().close()

    def failing(*_):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(RecordDatabase, "__init__", failing)
    with pytest.raises(StoreError, match="disk I/O error"):
        open_disk()
