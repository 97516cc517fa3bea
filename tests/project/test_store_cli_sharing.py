"""``daric store``: carrying documents, stores of others' making, and other writers."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from daric_rag.errors import ConfigError, StoreError
from daric_rag.storage import DiskTier
from tests.project.store_commands import answer, held, invoke, titles
from tests.storage.archives import NUMBERS, write_all
from tests.storage.records import (
    CAPACITY_BYTES,
    REPOSITORY,
    record_files,
)

# Writes documents of one segment without end.
WRITER = """
import itertools, sys, time
from contextlib import closing
from daric_rag.storage import DiskTier
from tests.storage.records import CAPACITY_BYTES, record
with closing(DiskTier(sys.argv[1], CAPACITY_BYTES)) as tier:
    for number in itertools.count(1000):
        tier.write(record(number))
        time.sleep(0.002)
        if number == 1000:
            print("writing", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of three documents, which the environment names."""
    path = tmp_path / "store"
    with closing(DiskTier(path, CAPACITY_BYTES)) as tier:
        write_all(tier)
    monkeypatch.setenv("DARIC_STORE", str(path))
    return path


# ------------------------------------------------------------------- export and import


def test_export_and_import_carry_documents(folder: Path, tmp_path: Path) -> None:
    file, target = str(tmp_path / "all.tar"), tmp_path / "target"
    DiskTier(target, CAPACITY_BYTES).close()
    answer("pin", "--title", "Plan")
    done = answer("export", file, "--all")
    assert (done["num_documents"], done["num_records"]) == (3, len(NUMBERS))
    store = ("--store", str(target))
    done = answer("import", file, *store)
    assert (done["num_records"], done["num_pinned"]) == (len(NUMBERS), 1)
    assert titles(target) == titles(folder)
    assert held(target) == {*NUMBERS}
    assert "5 were there already" in invoke("import", file, *store).stdout


def test_import_stops_at_the_budget(folder: Path, tmp_path: Path) -> None:
    file, target = str(tmp_path / "all.tar"), tmp_path / "target"
    DiskTier(target, CAPACITY_BYTES).close()
    answer("export", file, "--all")
    store = ("--store", str(target))
    with pytest.raises(ConfigError, match="--evict needs --disk-bytes"):
        invoke("import", file, *store, "--evict")
    with pytest.raises(ConfigError, match="'' is no size"):
        invoke("import", file, *store, "--evict", "--disk-bytes", "")
    done = answer("import", file, *store, "--disk-bytes", "1kB", exit_code=1)
    assert "--disk-bytes" in done["stopped"]
    assert 0 < done["num_records"] < len(NUMBERS)
    done = answer("import", file, *store, "--disk-bytes", "1kB", "--evict")
    assert done["stopped"] == ""
    assert sum(path.stat().st_size for path in record_files(target)) <= 1000


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    target = path.with_suffix(".target")
    target.write_bytes(b"precious")
    path.symlink_to(target)


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_suffix(".nowhere"))


@pytest.mark.parametrize("make", [make_pipe, make_link, make_dangling_link, Path.mkdir])
@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_export_replaces_regular_files_only(
    folder: Path, tmp_path: Path, make: Callable[[Path], None], options: tuple[str, ...]
) -> None:
    path = tmp_path / "all.tar"
    make(path)
    before = path.lstat()
    with pytest.raises(StoreError, match="no regular file"):
        invoke("export", str(path), "--all", *options)
    after = path.lstat()  # whose time of access may be later
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_sealed_store_needs_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    from daric_rag.storage import RecordCipher

    sealed, plain = tmp_path / "sealed", tmp_path / "plain"
    with closing(
        DiskTier(sealed, CAPACITY_BYTES, cipher=RecordCipher(b"k" * 32))
    ) as tier:
        write_all(tier)
    DiskTier(plain, CAPACITY_BYTES).close()
    with pytest.raises(StoreError, match="DARIC_STORE_KEY"):
        invoke("ls", "--store", str(sealed))
    key_file, file = tmp_path / "key", str(tmp_path / "all.tar")
    key_file.write_text((b"k" * 32).hex())
    key_file.chmod(0o600)
    monkeypatch.setenv("DARIC_STORE_KEY_FILE", str(key_file))
    assert titles(sealed) == {"Report", "Plan", ""}
    answer("export", file, "--all", "--store", str(sealed))
    monkeypatch.delenv("DARIC_STORE_KEY_FILE")
    store = ("--store", str(plain))
    with pytest.raises(StoreError, match="--archive-key-file"):
        invoke("import", file, *store)
    answer("import", file, *store, "--archive-key-file", str(key_file))
    assert titles(plain) == {"Report", "Plan", ""}


# ------------------------------------------------------------- stores of others' making


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "gc"])
def test_no_store_is_made_where_none_is(tmp_path: Path, command: str) -> None:
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(StoreError, match="no store in"):
            invoke(command, "--store", str(path))
    assert list(tmp_path.iterdir()) == []


def test_an_import_makes_the_store_of_a_new_machine(
    folder: Path, tmp_path: Path
) -> None:
    file, new = str(tmp_path / "all.tar"), tmp_path / "new"
    with pytest.raises(StoreError, match="cannot read"):
        invoke("import", file, "--store", str(new))
    assert not new.exists()
    answer("export", file, "--all", "--store", str(folder))
    answer("import", file, "--store", str(new))
    assert titles(new) == titles(folder)


def test_the_default_is_the_user_s_cache_folder(cache_home: Path) -> None:
    with pytest.raises(StoreError, match=str(cache_home / "daric_rag" / "store")):
        invoke("ls")
    assert not cache_home.exists()


@pytest.mark.parametrize("version", [1, 3])
def test_a_store_of_another_version_is_left_alone(tmp_path: Path, version: int) -> None:
    marker = tmp_path / f"DARIC_STORE_{version}"
    marker.touch()
    with pytest.raises(StoreError, match="another version"):
        invoke("ls", "--store", str(tmp_path))
    assert list(tmp_path.iterdir()) == [marker]


def test_a_read_only_store_can_be_looked_at_and_not_changed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    file = str(tmp_path / "all.tar")
    answer("export", file, "--all")
    monkeypatch.setattr("diskcache.Cache.reset", refuse)
    assert answer("stats")["read_only"]
    assert titles(folder) == {"Report", "Plan", ""}
    assert answer("verify")["num_records"] == len(NUMBERS)
    assert answer("evict", "--all", "--dry-run")["num_segments"] == len(NUMBERS)
    answer("gc", "--dry-run")
    answer("export", file, "--all", "--overwrite")
    for arguments in (
        ["pin", "--all"],
        ["evict", "--all", "--yes"],
        ["verify", "--repair"],
        ["import", file],
        ["gc"],
    ):
        with pytest.raises(StoreError, match="can only be read"):
            invoke(*arguments)


def test_commands_work_while_another_process_writes(
    folder: Path, tmp_path: Path
) -> None:
    answer("pin", "--title", "Report")
    file = str(tmp_path / "some.tar")
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    with writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            for _ in range(5):
                assert answer("verify")["damaged"] == []
                assert answer("stats")["nbytes"] <= CAPACITY_BYTES
                answer("evict", "--older-than", "0s", "--yes")
                answer("gc")
                invoke("export", file, "--all", "--overwrite")
                time.sleep(0.05)
            assert writer.poll() is None
        finally:
            writer.send_signal(signal.SIGKILL)
    assert answer("verify")["damaged"] == []
    assert "Report" in titles(folder)
    assert held(folder) >= {1, 2, 3}
