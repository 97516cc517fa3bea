"""A folder that can only be read, or that vanishes or is made anew while in use."""

import contextlib
import gc
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import DiskTier, StoreProbe, ledger, record_file
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
    run_elsewhere,
)


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


def test_a_second_process_follows_to_the_new_index(open_disk, folder):
    tier = open_disk()
    tier.write(record(1))
    (folder / "cache.db").unlink()
    code = "tier.write(record(2)); print(len(tier.keys())); tier.close()"
    assert run_elsewhere(folder, code, CAPACITY_BYTES) == "2"

    tier.write(record(3))

    assert tier.read_many([key(n) for n in (1, 2, 3)], FINGERPRINT).count(None) == 0
    assert disk_usage(folder) == 3 * RECORD_BYTES


@pytest.mark.parametrize("step", ["rename", "publish"])
def test_an_index_made_anew_by_another_process_costs_no_record(
    open_disk, folder, monkeypatch, step
):
    """It is made anew while the record has a temporary file, or its own but no row."""
    tier = open_disk()
    tier.write(record(1))
    owner = {"rename": record_file.Path, "publish": ledger.Ledger}[step]
    real = getattr(owner, step)

    def interrupted(*args):
        monkeypatch.undo()
        (folder / "cache.db").unlink()
        open_disk().close()
        return real(*args)

    monkeypatch.setattr(owner, step, interrupted)
    tier.write(record(2))

    assert tier.stats().failed_writes == 0
    for reader in (tier, open_disk()):
        assert [read(reader, number) for number in (1, 2)] == [payload(1), payload(2)]
    assert disk_usage(folder) == tier.nbytes == 2 * RECORD_BYTES
