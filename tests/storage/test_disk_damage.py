"""Whatever became of a stored byte: a miss, never an exception, never code."""

import os
import pickle
import sqlite3

import pytest

from daric_rag.storage import record_file
from daric_rag.storage.format import HEADER_LEN
from tests.storage.records import (
    FINGERPRINT,
    RECORD_BYTES,
    key,
    payload,
    read,
    record,
    record_files,
)


def flip_header(content):
    content[20] ^= 1


def flip_length(content):
    content[152 + 6] ^= 0x40  # payload_len becomes 2**54 bytes more


def flip_first_payload_byte(content):
    content[HEADER_LEN] ^= 1


def flip_last_byte(content):
    content[-1] ^= 0x80


def truncate(content):
    del content[-1:]


def truncate_to_header(content):
    del content[HEADER_LEN:]


def truncate_to_nothing(content):
    content.clear()


def append(content):
    content.append(0)


@pytest.mark.parametrize(
    "damage",
    [
        flip_header,
        flip_length,
        flip_first_payload_byte,
        flip_last_byte,
        truncate,
        truncate_to_header,
        truncate_to_nothing,
        append,
    ],
)
@pytest.mark.parametrize("reopened", [False, True])
def test_a_damaged_file_is_a_miss(open_disk, folder, damage, reopened):
    tier = open_disk()
    tier.write(record(1))
    (path,) = record_files(folder)
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    if reopened:
        tier = open_disk()

    assert read(tier, 1) is None

    assert tier.stats().corrupt == 1
    assert tier.stats().misses == 1
    assert not tier.contains(key(1))
    assert tier.nbytes == 0
    tier.flush()
    assert record_files(folder) == []
    tier.write(record(1))
    assert read(tier, 1) == payload(1)


def test_every_flipped_byte_is_a_miss(open_disk, folder):
    tier = open_disk()
    for position in range(RECORD_BYTES):
        tier.write(record(1))
        (path,) = record_files(folder)
        content = bytearray(path.read_bytes())
        content[position] ^= 0x10
        path.write_bytes(content)
        assert read(tier, 1) is None, position
    assert tier.stats().corrupt == RECORD_BYTES


def test_swapped_files_are_misses(open_disk, folder):
    tier = open_disk()
    tier.write(record(1))
    tier.write(record(2))
    one, two = record_files(folder)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)

    assert tier.read_many([key(1), key(2)], FINGERPRINT) == [None, None]
    assert tier.stats().corrupt == 2


def test_a_lost_file_is_a_miss_and_its_row_goes(open_disk, folder):
    tier = open_disk()
    tier.write(record(1))
    record_files(folder)[0].unlink()

    assert read(tier, 1) is None
    assert not tier.contains(key(1))
    assert tier.stats().corrupt == 0
    assert tier.nbytes == 0


def test_an_unreadable_moment_deletes_nothing(open_disk, monkeypatch):
    tier = open_disk()
    tier.write(record(1))

    def out_of_files(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(record_file, "open", out_of_files, raising=False)
    assert read(tier, 1) is None
    monkeypatch.undo()
    assert read(tier, 1) == payload(1)
    assert tier.stats().corrupt == 0


def test_neither_a_pipe_nor_a_link_nor_a_folder_passes_for_a_record(
    open_disk, folder, tmp_path
):
    tier = open_disk()
    for number in (1, 2, 3):
        tier.write(record(number))
    paths = [folder / tier._index.find(key(number)) for number in (1, 2, 3)]
    outside = tmp_path / "outside.val"
    outside.write_bytes(paths[1].read_bytes())
    for path in paths:
        path.unlink()
    os.mkfifo(paths[0])
    paths[1].symlink_to(outside)
    paths[2].mkdir()

    assert [read(tier, number) for number in (1, 2, 3)] == [None] * 3
    assert tier.stats().corrupt == 3
    assert outside.exists()
    assert tier.nbytes == 0
    tier.write(record(1))
    assert read(tier, 1) == payload(1)


def test_many_bad_records_make_few_warnings(open_disk, folder, caplog):
    tier = open_disk()
    for number in range(20):
        tier.write(record(number))
    for path in record_files(folder)[:10]:
        path.unlink()
    for path in record_files(folder):
        path.write_bytes(b"")

    assert [read(tier, number) for number in range(20)] == [None] * 20
    tier.flush()
    assert len(caplog.records) == 2


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("raw_key", [True, False])
@pytest.mark.parametrize("in_file", [True, False])
def test_a_planted_pickle_is_never_loaded(
    open_disk, folder, tmp_path, raw_key, in_file
):
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    tier = open_disk()
    tier.write(record(1))
    name = "aa/bb/" + "c" * 28 + ".val"
    if in_file:
        (folder / "aa/bb").mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bomb)
    planted_key = key(2) if raw_key else bomb
    with sqlite3.connect(folder / "cache.db") as database:
        database.execute(
            "INSERT INTO Cache(key, raw, store_time, access_time, mode, size,"
            " filename, value) VALUES (?, ?, 0, 0, 4, 0, ?, ?)",
            (
                planted_key,
                raw_key,
                name if in_file else None,
                None if in_file else bomb,
            ),
        )
    database.close()

    for reader in (tier, open_disk()):
        assert read(reader, 2) is None
        assert reader.keys() == [key(1)]
        assert read(reader, 1) == payload(1)
    tier.write(record(2))
    assert read(tier, 2) == payload(2)
    assert not (tmp_path / "exploded").exists()


def test_a_planted_path_is_neither_read_nor_deleted(open_disk, folder, tmp_path):
    tier = open_disk()
    tier.write(record(1))
    outside = tmp_path / "outside.val"
    record_files(folder)[0].rename(outside)
    with sqlite3.connect(folder / "cache.db") as database:
        database.execute("UPDATE Cache SET filename = '../outside.val'")
    database.close()

    assert read(tier, 1) is None
    assert read(open_disk(), 1) is None
    assert outside.exists()
