"""Files that no row names, as after an earlier index was put back."""

import shutil

from daric_rag.storage import sweeping
from tests.storage.records import (
    RECORD_BYTES,
    disk_usage,
    key,
    payload,
    read,
    record,
    record_files,
)

_ORPHAN = "00/00/" + "a" * 28 + ".val"


def add_orphans(folder):
    path = folder / _ORPHAN
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"0123456789")
    path.with_name(path.name + ".tmp").write_bytes(b"01234")
    return path


def test_an_earlier_index_put_back_exceeds_no_budget(open_disk, folder, tmp_path):
    budget = 5 * RECORD_BYTES
    tier = open_disk(budget)
    tier.write(record(0))
    tier.close()
    shutil.copy(folder / "cache.db", tmp_path / "backup")
    tier = open_disk(budget)
    for number in range(1, 5):
        tier.write(record(number))
    tier.close()
    shutil.copy(tmp_path / "backup", folder / "cache.db")

    tier = open_disk(budget)
    assert tier.keys() == [key(0)]
    assert read(tier, 0) == payload(0)
    for number in range(5, 9):
        tier.write(record(number))

    assert tier.nbytes == disk_usage(folder) == budget


def test_what_a_living_writer_may_be_writing_stays(open_disk, folder):
    tier = open_disk()
    tier.write(record(1))
    path = add_orphans(folder)

    open_disk().close()
    assert path.exists()
    tier.close()
    tier = open_disk()

    assert disk_usage(folder) == RECORD_BYTES
    assert read(tier, 1) == payload(1)


def test_a_writer_that_begins_meanwhile_keeps_its_record(
    open_disk, folder, monkeypatch
):
    tier = open_disk()
    tier.write(record(1))
    tier.close()
    path = add_orphans(folder)
    listing = sweeping._list_names

    def interrupted(*args):
        monkeypatch.undo()
        tier.write(record(2))
        yield from listing(*args)

    monkeypatch.setattr(sweeping, "_list_names", interrupted)
    other = open_disk()

    assert [read(other, number) for number in (1, 2)] == [payload(1), payload(2)]
    assert path.exists()


def test_where_time_runs_out_the_rest_stays(open_disk, folder, monkeypatch):
    open_disk().close()
    path = add_orphans(folder)
    monkeypatch.setattr(sweeping, "_TIMEOUT_S", -1.0)
    open_disk().close()
    assert path.exists()
    monkeypatch.undo()
    open_disk().close()
    assert record_files(folder) == []
