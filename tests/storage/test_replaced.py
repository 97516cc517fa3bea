"""An index made anew by another process, and files that cannot be deleted."""

import os
import pathlib

import pytest

from daric_rag.storage import DiskTier
from daric_rag.storage.index_reader import ReadOnlyDatabase
from tests.storage.records import (
    CAPACITY_BYTES,
    RECORD_BYTES,
    disk_usage,
    key,
    payload,
    read,
    record,
    record_files,
)


@pytest.fixture
def replaced(open_disk, folder):
    """A process, and one that made the index anew and stored one more record."""
    first = open_disk()
    for number in range(3):
        first.write(record(number))
    for suffix in ("-wal", "-shm", ""):
        (folder / f"cache.db{suffix}").unlink()
    second = open_disk()
    second.write(record(9))
    return first, second


def test_a_pin_reaches_the_index_that_others_see(replaced):
    first, second = replaced
    assert first.pin([key(1)]) == 1
    assert [row.key for row in second.segments() if row.pinned] == [key(1)]


def test_reclaiming_spares_what_the_new_index_names(replaced, open_disk):
    first, _ = replaced
    assert first.reclaim().nbytes == 0
    assert read(open_disk(), 9) == payload(9)


def test_who_only_reads_follows_to_the_new_index(replaced):
    first, _ = replaced
    first.save_uses()
    assert read(first, 9) == payload(9)


def test_a_pin_goes_with_its_record(open_disk, folder):
    tier, other = open_disk(3 * RECORD_BYTES), open_disk(3 * RECORD_BYTES)
    tier.write(record(1))
    tier.pin([key(1)])
    (path,) = record_files(folder)
    path.write_bytes(b"")
    assert read(tier, 1) is None
    tier.write(record(1))
    assert [row.pinned for row in other.segments()] == [False]

    for number in range(2, 6):
        tier.write(record(number))

    assert sorted(tier.keys()) == [key(3), key(4), key(5)]


def test_a_file_that_cannot_be_deleted_keeps_its_share_of_the_budget(
    open_disk, folder, monkeypatch, caplog
):
    tier = open_disk(3 * RECORD_BYTES)
    for number in range(3):
        tier.write(record(number))
    unlink = pathlib.Path.unlink

    def refuse(path, missing_ok=False):
        if path.suffix == ".val":
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(pathlib.Path, "unlink", refuse)
    for number in range(10, 13):
        tier.write(record(number))
    assert tier.evict([key(1)]) == 0
    monkeypatch.undo()

    assert disk_usage(folder) == tier.nbytes == 3 * RECORD_BYTES
    assert "not permitted" in caplog.text
    assert [read(tier, number) for number in range(3)] == [
        payload(number) for number in range(3)
    ]
    assert tier.evict([key(1)]) == RECORD_BYTES
    tier.write(record(20))
    assert read(tier, 20) == payload(20)


def test_a_file_read_as_it_is_is_read_again_when_it_has_changed(folder, monkeypatch):
    """As through a mount that is read-only here, and written elsewhere."""
    tier = DiskTier(folder, CAPACITY_BYTES)
    tier.write(record(1))
    tier.close()
    reader = ReadOnlyDatabase(folder)
    monkeypatch.setattr(reader, "_is_immutable", True)
    assert reader.is_current()
    os.utime(folder / "cache.db", ns=(1, 1))
    assert not reader.is_current()
    reader.close()
