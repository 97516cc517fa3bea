"""Fixtures of the runtime tests: one engine at a time, shared while it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.reference.dense import DenseReference, load_reference
from tests.reference.tiny_models import build
from tests.runtime.harness import Harness


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives a kind's checkpoint."""
    root = tmp_path_factory.mktemp("tiny_models")
    return lambda kind: build(kind, root)


@pytest.fixture(scope="session")
def reference_of(tiny_model: Callable[[str], Path]) -> Callable[[str], DenseReference]:
    """Gives a kind's dense reference."""
    return cache(lambda kind: load_reference(tiny_model(kind)))


@pytest.fixture(scope="session")
def harness_of(
    tiny_model: Callable[[str], Path],
    reference_of: Callable[[str], DenseReference],
) -> Iterator[Callable[..., Harness]]:
    """Gives a harness; the last one stays open until another is asked for."""
    current: dict[Any, Harness] = {}

    def get(kind: str, **options: Any) -> Harness:
        key = (kind, repr(sorted(options.items(), key=lambda item: item[0])))
        if key not in current:
            close_all()
            current[key] = Harness(tiny_model(kind), reference_of(kind), **options)
        return current[key]

    def close_all() -> None:
        for harness in current.values():
            harness.close()
        current.clear()

    yield get
    close_all()
