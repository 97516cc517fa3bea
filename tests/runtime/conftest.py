"""Fixtures of the runtime tests: one engine at a time, shared while it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import shared_engines
from tests.reference.dense import DenseReference, load_reference
from tests.reference.tiny_models import build
from tests.runtime.harness import Harness


@pytest.fixture(scope="session")
def tiny_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str | Path], Path]:
    """Gives a kind's checkpoint; a folder is one already."""
    root = tmp_path_factory.mktemp("tiny_models")
    return lambda kind: kind if isinstance(kind, Path) else build(kind, root)


@pytest.fixture(scope="session")
def reference_of(
    tiny_model: Callable[[str | Path], Path],
) -> Callable[[str | Path], DenseReference]:
    """Gives a kind's dense reference."""
    return cache(lambda kind: load_reference(tiny_model(kind)))


class HarnessPool:
    """Opens harnesses; the last one stays open until another is asked for."""

    def __init__(
        self,
        model_of: Callable[[str | Path], Path],
        reference_of: Callable[[str | Path], DenseReference],
    ) -> None:
        self._model_of, self._reference_of = model_of, reference_of
        self._current: dict[Any, Harness] = {}

    def __call__(self, kind: str | Path, **options: Any) -> Harness:
        key = (kind, repr(sorted(options.items(), key=lambda item: item[0])))
        if key not in self._current:
            self.close()
            model, reference = self._model_of(kind), self._reference_of(kind)
            self._current[key] = Harness(model, reference, **options)
        return self._current[key]

    def close(self) -> None:
        """Closes what is open, so that a test can open an engine of its own."""
        for harness in self._current.values():
            harness.close()
        self._current.clear()


@pytest.fixture(scope="session")
def harness_of(
    tiny_model: Callable[[str | Path], Path],
    reference_of: Callable[[str | Path], DenseReference],
) -> Iterator[HarnessPool]:
    """Gives a harness of a kind and options, shared by the tests that ask alike."""
    pool = HarnessPool(tiny_model, reference_of)
    shared_engines.append(pool)
    yield pool
    pool.close()


@pytest.fixture
def no_engine(harness_of: HarnessPool) -> None:
    """Sees to it that no shared engine is open."""
    harness_of.close()
