"""README says nothing that is not so: its commands, its code, its tables."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from daric_rag import DaricConfig, EmbeddedEngine

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FENCED = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
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
    assert {"policy", "avg_chunk_budget", "mtaf", "alignment"} <= set(listed)
    for name, value in listed.items():
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
    assert "ReuseStats(" in done.stdout
    assert (cache_home / "daric_rag" / "store").is_dir()


@pytest.mark.engine
@pytest.mark.real_model
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path, real_model: Path) -> None:
    """As it is, with the real model; `real_model` has seen to its conversion."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
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
