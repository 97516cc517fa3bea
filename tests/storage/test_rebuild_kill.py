"""Killed while the index is made anew: it is no index before it is finished."""

import contextlib
import sqlite3
from contextlib import closing

import pytest

from daric_rag.storage import DiskTier
from tests.storage.records import (
    CAPACITY_BYTES,
    RECORD_BYTES,
    disk_usage,
    key,
    payload,
    read,
    record,
    run_elsewhere,
)

NUM_RECORDS = 30

_KILLS = {
    "before it begins": "die_at(folder, 'rebuild', 1)",
    "at the old one's name": "die_at(recovery.Path, 'rename', 1)",
    "at the old journal": "die_at(recovery.Path, 'rename', 2)",
    "at the first row": "die_at(database.RecordDatabase, 'insert', 1)",
    "between transactions": "die_at(database.RecordDatabase, 'insert', 11)",
    "after the last row": "die_at(folder.RecordDatabase, 'finish', 1)",
    "before the old one goes": "die_at(folder, 'discard_old_index', 1)",
}
_PRELUDE = """
import os, signal
from daric_rag.storage import DiskTier, database, folder, recovery
recovery._ROWS_PER_TRANSACTION = 10
def die_at(owner, name, count):
    step = getattr(owner, name)
    calls = []
    def dying(*args, **kwargs):
        calls.append(name)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*args, **kwargs)
    setattr(owner, name, dying)
"""


@pytest.fixture
def damaged(folder, tmp_path):
    """A store with a pin, whose index has lost a page."""
    with closing(DiskTier(folder, CAPACITY_BYTES)) as tier:
        for number in range(NUM_RECORDS):
            tier.write(record(number))
        tier.pin([key(7)])
    with closing(sqlite3.connect(folder / "cache.db")) as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'Cache_key_raw'"
        (page,) = database.execute(query).fetchone()
    content = bytearray((folder / "cache.db").read_bytes())
    content[(page - 1) * 4096 : page * 4096] = bytes(4096)
    (folder / "cache.db").write_bytes(content)
    return folder


@pytest.mark.parametrize("kill", _KILLS)
def test_a_kill_while_the_index_is_made_anew_loses_nothing(
    damaged, open_disk, tmp_path, kill
):
    code = _PRELUDE + _KILLS[kill] + f"\nDiskTier({str(damaged)!r}, {CAPACITY_BYTES})\n"
    with pytest.raises(AssertionError):
        run_elsewhere(tmp_path / "other", code)
    with contextlib.suppress(AssertionError):  # Finds what the first has left.
        run_elsewhere(tmp_path / "other", code)

    tier = open_disk()

    rows = {row.key: row for row in tier.segments()}
    assert sorted(rows) == [key(number) for number in range(NUM_RECORDS)]
    assert [row.key for row in rows.values() if row.pinned] == [key(7)]
    assert tier.nbytes == disk_usage(damaged) == NUM_RECORDS * RECORD_BYTES
    assert tier.reclaim().nbytes == 0
    for number in range(NUM_RECORDS):
        assert read(tier, number) == payload(number)
    assert not list(damaged.glob("*.old*"))


def test_an_index_left_empty_is_no_index(open_disk, folder):
    """As by a process that ended between making it and filling it."""
    tier = open_disk()
    tier.write(record(1))
    tier.close()
    with closing(sqlite3.connect(folder / "cache.db")) as database:
        database.execute("DELETE FROM Cache")
        database.execute("PRAGMA user_version = 0")
        database.commit()

    assert read(open_disk(), 1) == payload(1)
