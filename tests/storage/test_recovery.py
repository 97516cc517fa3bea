"""Killed at any moment, or left with a damaged index: no committed record is lost."""

import logging
import sqlite3
from contextlib import closing

import pytest

from daric_rag.storage import record_file
from tests.storage.records import (
    RECORD_BYTES,
    disk_usage,
    document,
    key,
    path_of,
    payload,
    read,
    record,
    record_files,
    start_elsewhere,
)

# The process kills itself before or after a step of its sixth write, for which it has
# to evict the first of its records.
_PRELUDE = """
from daric_rag.storage import database, ledger, new_file, record_file, saver
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def kill(owner, name, when):
    step = getattr(owner, name)
    def dying(*args, **kwargs):
        result = None if when == 'before' else step(*args, **kwargs)
        die()
    setattr(owner, name, dying)
class Half:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def write(self, part):
        self.file.write(part[:10])
        die()
create = new_file._create
def half(path): return Half(create(path))
for n in range(5): tier.write(record(n))
"""

_STAGES = {
    "before the victim's row goes": "kill(database.RecordDatabase, 'delete', 'before')",
    "before the reservation": "kill(database.RecordDatabase, 'reserve', 'before')",
    "before its commit": "kill(database.RecordDatabase, 'reserve', 'after')",
    "before the file": "kill(saver, 'write_record_file', 'before')",
    "in the file": "new_file._create = half",
    "before the file's name": "kill(record_file.Path, 'rename', 'before')",
    "after the file's name": "kill(record_file.Path, 'rename', 'after')",
    "before the row's commit": "kill(database.RecordDatabase, 'publish', 'after')",
    "after the row's commit": "kill(ledger.Ledger, 'publish', 'after')",
}


# The same, written past the page cache, a block after the other.
_DIRECT_STAGES = {
    "before the first block": "kill(os, 'pwrite', 'before')",
    "behind the first block": "kill(os, 'pwrite', 'after')",
    "before the head": "kill_at(os, 'pwrite', 3, 'before')",
    "behind the head": "kill_at(os, 'pwrite', 3, 'after')",
    "before its end is cut": "kill(os, 'ftruncate', 'before')",
    "before the file's name": _STAGES["before the file's name"],
    "after the file's name": _STAGES["after the file's name"],
}
_DIRECT_PRELUDE = """
new_file._STAGING_LEN = 8192
def kill_at(owner, name, number, when):
    step, done = getattr(owner, name), []
    def dying(*args):
        done.append(True)
        if when == 'before' and len(done) == number: die()
        result = step(*args)
        if len(done) == number: die()
        return result
    setattr(owner, name, dying)
tier.close()
tier = DiskTier(tier.directory, tier.capacity_bytes, keeps_pages=False)
"""


@pytest.mark.parametrize("stage", _DIRECT_STAGES)
def test_a_kill_while_writing_past_the_cache_loses_nothing_committed(
    open_disk, folder, stage
):
    long = 400  # tokens, of 32 bytes: a buffer, a part of one, and the head
    budget = 5 * RECORD_BYTES + 40 * long
    code = _PRELUDE + _DIRECT_PRELUDE + _DIRECT_STAGES[stage]
    with start_elsewhere(
        folder, f"{code}\ntier.write(record(5, num_tokens={long}))\n", budget
    ) as process:
        process.communicate(timeout=60)
    assert process.returncode == -9

    tier = open_disk(budget, keeps_pages=False)
    assert sorted(tier.keys()) == [key(n) for n in range(5)]
    assert all(read(tier, n) == payload(n) for n in range(5))
    assert list(folder.glob("??/??/*.tmp")) == []
    tier.write(record(5, num_tokens=long))
    assert read(tier, 5) == payload(5, num_tokens=long)
    assert tier.stats().corrupt == 0


@pytest.mark.parametrize("stage", _STAGES)
def test_a_kill_at_any_stage_loses_nothing_committed(open_disk, folder, stage):
    budget = 5 * RECORD_BYTES
    code = _PRELUDE + _STAGES[stage] + "\ntier.write(record(5))\n"
    with start_elsewhere(folder, code, budget) as process:
        process.communicate(timeout=60)
    assert process.returncode == -9

    tier = open_disk(budget)
    held = sorted(tier.keys())

    is_published = stage == "after the row's commit"
    assert held[-1] == key(5 if is_published else 4)
    # The victim may have gone already, and its row may tell of it later.
    contents = {one: read(tier, int.from_bytes(one)) for one in held}
    lost = [one for one, content in contents.items() if content is None]
    assert lost in ([], [key(0)])
    assert all(contents[key(n)] == payload(n) for n in range(1, 5))
    assert tier.nbytes == disk_usage(folder)
    assert list(folder.glob("??/??/*.tmp")) == []
    assert list((folder / "writers").iterdir()) == []
    tier.write(record(7))
    assert read(tier, 7) == payload(7)
    assert tier.stats().corrupt == 0
    assert disk_usage(folder) <= budget


def test_a_dead_writers_reservation_goes_when_room_is_short(open_disk, folder):
    budget = 5 * RECORD_BYTES
    tier = open_disk(budget)
    code = _PRELUDE.replace("range(5)", "range(3)") + (
        "new_file._create = half\ntier.write(record(5, num_tokens=6))\n"
    )
    with start_elsewhere(folder, code, budget) as process:
        process.communicate(timeout=60)

    tier.write(record(6))
    tier.write(record(7))

    assert sorted(tier.keys()) == [key(n) for n in (0, 1, 2, 6, 7)]
    assert tier.stats().evicted == 0
    assert tier.nbytes == disk_usage(folder) == budget


def test_reclaim_takes_leftovers_and_leaves_the_rest(open_disk, folder):
    tier = open_disk()
    for number in range(3):
        tier.write(record(number))
    tier.delete(key(2))
    (folder / "00/00").mkdir(parents=True)
    (folder / "00/00" / ("a" * 28 + ".val")).write_bytes(b"0123456789")
    (folder / "00/00" / ("b" * 28 + ".val.tmp")).write_bytes(b"01234")
    (folder / "notes.txt").write_text("not ours")
    lost = tier._index.find(key(1))
    (folder / lost).unlink()

    expected = (0, 1, 1, 1, 15 + RECORD_BYTES)
    for dry_run in (True, False):
        done = tier.reclaim(dry_run=dry_run)
        counts = (done.reservations, done.orphans, done.temporary, done.rows)
        assert (*counts, done.nbytes) == expected

    assert tier.reclaim().nbytes == 0
    assert len(record_files(folder)) == 1
    assert (folder / "notes.txt").exists()
    assert not (folder / "00/00").exists()
    assert read(tier, 0) == payload(0)


def test_reclaim_leaves_a_living_writers_file(open_disk, monkeypatch):
    tier, other = open_disk(), open_disk()
    rename = record_file.Path.rename
    found = []

    def watched(path, target):
        found.append(other.reclaim().nbytes)
        result = rename(path, target)
        found.append(other.reclaim().nbytes)
        return result

    monkeypatch.setattr(record_file.Path, "rename", watched)
    tier.write(record(1))
    monkeypatch.undo()

    assert found == [0, 0]
    assert read(tier, 1) == payload(1)


def garble(path):
    content = bytearray(path.read_bytes())
    for position in range(200, len(content), 7):
        content[position] ^= 0x5A
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replace(path):
    path.write_bytes(b"not a database" * 1000)


def empty(path):
    path.write_bytes(b"")


def delete(path):
    path.unlink()


def swap_last_pages(path):
    content = bytearray(path.read_bytes())
    content[-4096:], content[-8192:-4096] = content[-8192:-4096], content[-4096:]
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [garble, truncate, replace, empty, delete, swap_last_pages]
)
def test_a_damaged_index_is_made_anew_from_the_records(
    open_disk, folder, caplog, damage
):
    caplog.set_level(logging.WARNING)
    tier = open_disk()
    for number in range(40):
        tier.write(record(number, num_tokens=1 + number % 3))
    for one in document([50, 51], side_data=b"title"):
        tier.write(one)
    expected = {(row.key, row.filename, row.parent) for row in tier.segments()}
    tier.close()
    damage(folder / "cache.db")

    tier = open_disk()

    assert "made anew" in caplog.text
    assert "42 records kept, 0 unusable files deleted" in caplog.text
    rows = tier.segments()
    assert {(row.key, row.filename, row.parent) for row in rows} == expected
    assert {row.side_data for row in rows} == {b"", b"title"}
    assert tier.nbytes == disk_usage(folder) == sum(row.nbytes for row in rows)
    for number in range(40):
        assert read(tier, number) == payload(number, num_tokens=1 + number % 3)
    tier.write(record(100))
    assert read(open_disk(), 100) == payload(100)


def test_what_is_no_record_does_not_survive_a_damaged_index(open_disk, folder):
    tier = open_disk()
    for number in range(3):
        tier.write(record(number))
    tier.close()
    first, second, _ = record_files(folder)
    kept_by_first = first.read_bytes()
    first.write_bytes(kept_by_first[:-1])
    (folder / "00/00").mkdir(parents=True, exist_ok=True)
    (folder / "00/00" / ("a" * 28 + ".val")).write_bytes(second.read_bytes())
    (folder / "00/00" / ("b" * 28 + ".val.tmp")).write_bytes(second.read_bytes())
    replace(folder / "cache.db")

    tier = open_disk()

    assert len(tier.keys()) == len(record_files(folder)) == 2
    assert tier.nbytes == disk_usage(folder) == 2 * RECORD_BYTES


def test_pins_and_uses_survive_where_the_damaged_index_still_shows_them(
    open_disk, folder
):
    tier = open_disk()
    for number in range(3):
        tier.write(record(number))
    read(tier, 0)
    tier.pin([key(1)])
    tier.close()
    with closing(sqlite3.connect(folder / "cache.db")) as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'Cache_key_raw'"
        (page,) = database.execute(query).fetchone()
    content = bytearray((folder / "cache.db").read_bytes())
    content[(page - 1) * 4096 : page * 4096] = bytes(4096)
    (folder / "cache.db").write_bytes(content)

    rows = {row.key: row for row in open_disk().segments()}

    assert {number: rows[key(number)].uses for number in range(3)} == {0: 2, 1: 1, 2: 1}
    assert [number for number in range(3) if rows[key(number)].pinned] == [1]


def test_an_index_damaged_while_in_use_is_made_anew(open_disk, folder, monkeypatch):
    tier = open_disk()
    for number in range(30):
        tier.write(record(number))
    tier.close_thread()
    with closing(sqlite3.connect(folder / "cache.db")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    garble(folder / "cache.db")

    assert read(tier, 1) == payload(1)
    assert read(tier, 99) is None
    tier.write(record(40))  # May find the damage; then saving is paused.
    monkeypatch.setattr("daric_rag.storage.saver._PAUSE_S", 0.0)
    tier._saver.resume()
    tier.write(record(40))

    assert [read(tier, number) for number in range(30)] == [
        payload(number) for number in range(30)
    ]
    assert read(open_disk(), 40) == payload(40)


def test_a_damaged_name_that_no_message_can_tell_is_damage(
    open_disk, folder, monkeypatch
):
    tier = open_disk()
    tier.write(record(1))
    tier.close()
    path = folder / "cache.db"
    content = path.read_bytes()
    damaged = content.replace(b"UPDATE Settings SET", b"UPDATE Settin\x99s SET")
    assert damaged != content
    path.write_bytes(damaged)

    tier = open_disk()
    tier.write(record(2))
    assert tier.stats().failed_writes == 1
    monkeypatch.setattr("daric_rag.storage.saver.time.monotonic", lambda: 1e12)
    tier.write(record(2))

    assert [read(tier, number) for number in (1, 2)] == [payload(1), payload(2)]


@pytest.mark.parametrize("fate", ["gone", "cut", "foreign", "a folder"])
def test_a_record_whose_file_is_lost_is_written_anew(open_disk, folder, fate):
    tier = open_disk()
    for number in range(3):
        tier.write(record(number))
    path, other = path_of(tier, 1), path_of(tier, 2)
    content = path.read_bytes()
    path.unlink()
    if fate == "cut":
        path.write_bytes(content[:-1])
    elif fate == "foreign":
        path.write_bytes(other.read_bytes())
    elif fate == "a folder":
        path.mkdir()
    # Nobody has read it since.
    tier.write(record(1))
    assert read(tier, 1) == payload(1)
    assert sorted(tier.keys()) == [key(n) for n in range(3)]
    again = open_disk()
    assert all(read(again, n) == payload(n) for n in range(3))
