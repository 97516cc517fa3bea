"""Fixtures of the reference tests: each tiny checkpoint is built and loaded once."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.reference.dense import DenseReference, load_reference
from tests.reference.tiny_models import build


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and on a busy machine lose much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the session's tiny checkpoints."""
    return tmp_path_factory.mktemp("tiny_models")


@pytest.fixture(scope="session")
def tiny_reference(tiny_root: Path) -> Callable[[str], DenseReference]:
    """Gives the dense reference of a kind; loaded once per session."""

    @cache
    def load(kind: str) -> DenseReference:
        return load_reference(build(kind, tiny_root))

    return load
