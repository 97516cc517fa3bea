"""README says nothing that is not so: its commands, its code, its tables."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from daric_rag import DaricConfig, EmbeddedEngine, cli, prewarm_run
from daric_rag.config import GIB
from daric_rag.document_info import DocumentInfo, encode_document
from daric_rag.storage import DiskTier
from tests.prewarm.engines import DiskEngine
from tests.storage.records import CAPACITY_BYTES, RECORD_BYTES, record

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FENCED = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
EXAMPLE = ROOT / "examples" / "reordered_documents.py"
# What the code for a framework shows; other code shows the engine's own counts.
TOLD = {"langchain": "cache_read", "llama_index": "cached_tokens"}
PYTHON = [code for language, code in FENCED if language == "python"]
MAKE = sorted(set(re.findall(r"`?\bmake(?: DEVICE=cpu)? ([a-z]+)\b", README)))


def test_make_targets_exist() -> None:
    """Every `make x` is a target; what the two main ones run is covered elsewhere."""
    targets = set(MAKE) & set(
        re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    )
    assert {"demo", "test", "bench", "format", "clean"} <= targets
    for target in targets:
        subprocess.run(
            ["make", "-n", target], cwd=ROOT, check=True, capture_output=True
        )


def commands(name: str) -> list[list[str]]:
    """What follows ``daric NAME`` in the text's blocks, as a shell reads it."""
    return [
        shlex.split(line, comments=True)[2:]
        for _, code in FENCED
        for line in code.splitlines()
        if line.startswith(f"daric {name} ")
    ]


STORE_COMMANDS = commands("store")
PREWARM_COMMANDS = commands("prewarm")


def test_store_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, on a store whose documents are called as in the text."""
    store = tmp_path / "store"
    with closing(DiskTier(store, CAPACITY_BYTES)) as tier:
        for number in range(3):
            note = DocumentInfo.of([number], f"Report {number}", "default")
            tier.write(record(number, side_data=encode_document(note)))
    monkeypatch.setenv("DARIC_STORE", str(store))
    monkeypatch.chdir(tmp_path)
    assert {command[0] for command in STORE_COMMANDS} >= {"ls", "export", "import"}
    for command in STORE_COMMANDS:
        result = CliRunner().invoke(cli.app, ["store", *command])
        assert result.exit_code == 0, (command, result.output)
    assert (tmp_path / "reports.tar").stat().st_size > 3 * RECORD_BYTES


def test_prewarm_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, on a folder of the name in the text."""
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"document {number}")
    monkeypatch.setenv("DARIC_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        prewarm_run,
        "open_engine",
        lambda settings, store: DiskEngine(store or settings.store_folder()),
    )
    assert len(PREWARM_COMMANDS) >= 4
    for command in PREWARM_COMMANDS:
        result = CliRunner().invoke(cli.app, ["prewarm", *command])
        assert result.exit_code == 0, (command, result.output)
    with closing(DiskTier(tmp_path / "store", CAPACITY_BYTES)) as tier:
        assert len(tier.segments()) == 6


def test_extras_exist() -> None:
    """Every extra that is to be installed is one of ours."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r'"\.\[([a-z-]+)\]"', README))
    assert extras >= {"cpu", "langchain", "demo"}
    assert extras <= set(project["optional-dependencies"])


def test_configuration_table() -> None:
    """Names and defaults are those of the code."""
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", README, re.M)
    defaults = DaricConfig().to_dict()
    listed = {
        name: value.strip().strip('"') for name, value in rows if name in defaults
    }
    assert set(listed) == set(defaults)
    for name, value in listed.items():
        if value.endswith(" GiB"):
            value = str(int(value.removesuffix(" GiB")) * GIB)
        assert str(defaults[name]) == value


def test_methods_exist() -> None:
    """What the list of methods names is there."""
    sentence = re.search(r"Beside it\s+stand(.*?);", README, re.DOTALL)
    assert sentence is not None
    names = re.findall(r"`(\w+)`", sentence[1])
    assert len(names) >= 8
    for name in names:
        assert callable(getattr(EmbeddedEngine, name))


@pytest.mark.engine
@pytest.mark.real_model
@pytest.mark.parametrize("code", PYTHON)
def test_python_runs(code: str, cache_home: Path, real_model: Path) -> None:
    """In a process of its own, as a newcomer would, with an empty store."""
    code = code.replace('"smollm2-135m"', repr(str(real_model)))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cache_home.parent,
    )
    assert done.returncode == 0, done.stderr
    told = [word for name, word in TOLD.items() if f"integrations.{name}" in code]
    assert (told or ["ReuseStats("])[0] in done.stdout
    assert (cache_home / "daric_rag" / "store").is_dir()


@pytest.mark.engine
@pytest.mark.real_model
def test_example_runs(real_model: Path) -> None:
    """As it is, with the real model; `real_model` has seen to its conversion."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, cold, warm = (line.split() for line in done.stdout.splitlines())
    loaded = [int(line[line.index("loaded,") - 1]) for line in (first, cold, warm)]
    assert loaded[0] == loaded[1] == 0
    assert loaded[2] > 0
