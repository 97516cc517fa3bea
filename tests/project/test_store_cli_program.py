"""``daric store`` as a program: its one-line errors, broken streams, its key."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer

from daric_rag.errors import ConfigError, StoreError
from daric_rag.storage import DiskTier
from daric_rag.store_cli import store_app
from tests.project.store_commands import answer, held, invoke, titles
from tests.storage.archives import NUMBERS, titled, write_all
from tests.storage.records import CAPACITY_BYTES, document

KEY = b"k" * 32
DARIC = (sys.executable, "-m", "daric_rag.cli")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of three documents, which the environment names."""
    path = tmp_path / "store"
    with closing(DiskTier(path, CAPACITY_BYTES)) as tier:
        write_all(tier)
    monkeypatch.setenv("DARIC_STORE", str(path))
    # With it nothing is left to be written when the interpreter ends.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return path


def daric(*arguments: str, closed: int | None = None, **options: Any) -> Any:
    """Run the program, if wanted with one of its standard streams closed."""
    command = [*DARIC, *arguments]
    if closed is not None:
        command = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, check=False, text=True, **{**pipes, **options})


def assert_one_line(stderr: str, text: str) -> None:
    assert stderr.startswith("daric: ")
    assert stderr.count("\n") == 1
    assert text in stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ls", "--store", "gone"], "no store in"),
        (["ls", "--older-than", "old"], "'old' is no time"),
        (["import", "gone.tar", "--disk-bytes", "much"], "'much' is no size"),
        (["import", "gone.tar"], "cannot read gone.tar"),
        (["export", "x.tar"], "say which documents"),
    ],
)
def test_errors_are_one_line(folder: Path, arguments: list[str], text: str) -> None:
    done = daric("store", *arguments, "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert_one_line(done.stderr, text)


def test_a_listing_loads_neither_torch_nor_vllm(folder: Path) -> None:
    code = """
import sys
from daric_rag import cli
try:
    cli.app(["store", "ls"])
except SystemExit:
    pass
heavy = {"torch", "vllm", "transformers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Report" in done.stdout


# ----------------------------------------------------------------------------- streams


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_title_fits_any_encoding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    with closing(DiskTier(folder, CAPACITY_BYTES)) as tier:
        for one in document([9], titled(9, "Jahresbericht \u6f22")):
            tier.write(one)
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    done = daric("store", "ls")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Jahresbericht \\u6f22" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["store", "ls"], ["store", "ls", "--json"], ["store", "--help"], ["version"]],
)
def test_an_output_that_cannot_be_written_is_one_line(
    folder: Path, tmp_path: Path, arguments: list[str]
) -> None:
    file = tmp_path / "output"
    file.touch()
    with open(file, "rb") as unwritable:
        done = daric(*arguments, stdout=unwritable)
    assert done.returncode == 1
    assert_one_line(done.stderr, "standard output")


def test_an_error_that_cannot_be_told_is_still_one(
    tmp_path: Path, folder: Path
) -> None:
    file = tmp_path / "output"
    file.touch()
    with open(file, "rb") as unwritable:
        done = daric("store", "evict", stdout=unwritable, stderr=unwritable)
    assert done.returncode == 1
    assert daric("store", "evict", closed=2).returncode == 1


def test_nothing_is_done_without_an_output(folder: Path) -> None:
    for arguments in (["ls"], ["evict", "--all", "--yes"]):
        done = daric("store", *arguments, closed=1)
        assert done.returncode == 1
        assert_one_line(done.stderr, "standard output is closed")
    assert held(folder) == {*NUMBERS}


def test_evicting_everything_is_not_confirmed_by_a_closed_input(folder: Path) -> None:
    done = daric("store", "evict", "--all", closed=0)
    assert done.returncode == 1
    assert_one_line(done.stderr, "--yes")
    assert held(folder) == {*NUMBERS}


def test_a_reader_that_has_enough_is_no_error(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        assert daric("store", "ls", stdout=pipe).stderr == ""


# --------------------------------------------------------------------------------- key


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key of an encrypted store of three documents, which the environment names."""
    pytest.importorskip("cryptography")
    from daric_rag.storage import RecordCipher

    store, path = tmp_path / "sealed", tmp_path / "key"
    with closing(DiskTier(store, CAPACITY_BYTES, cipher=RecordCipher(KEY))) as tier:
        write_all(tier)
    path.write_text(KEY.hex())
    path.chmod(0o600)
    monkeypatch.setenv("DARIC_STORE", str(store))
    return path


COMMANDS: dict[str, list[str]] = {
    "ls": [],
    "stats": [],
    "verify": [],
    "pin": ["--all"],
    "unpin": ["--all"],
    "evict": ["--all", "--yes"],
    "gc": [],
    "export": ["other.tar", "--all"],
    "import": ["all.tar"],
}


def test_every_command_takes_a_key(
    key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = ("--key-file", str(key_file))
    answer("export", "all.tar", "--all", *key)
    for command, arguments in COMMANDS.items():
        with pytest.raises(StoreError, match="no key is given"):
            invoke(command, *arguments)
        answer(command, *arguments, *key)
    assert len(answer("ls", *key)["documents"]) == 3


def test_the_commands_are_all_of_them() -> None:
    group = typer.main.get_command(store_app)
    assert set(group.commands) == set(COMMANDS)


def test_two_keys_or_an_empty_one_are_refused(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--key-file is empty"):
        invoke("ls", "--key-file", "")
    monkeypatch.setenv("DARIC_STORE_KEY_FILE", str(key_file))
    assert titles(key_file.with_name("sealed")) == {"Report", "Plan", ""}
    with pytest.raises(ConfigError, match="keep one of them"):
        invoke("ls", "--key-file", str(key_file))
