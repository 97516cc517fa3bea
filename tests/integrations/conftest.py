"""Integrations are tested without a network, but for those that start an engine."""

from __future__ import annotations

import socket
from typing import NoReturn

import pytest

from tests.conftest import shared_engines


@pytest.fixture(scope="module", autouse=True)
def no_shared_engine() -> None:
    """Sees to it that a module can open an engine of its own."""
    for pool in shared_engines:
        pool.close()


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every connection fail in tests of no engine."""

    def refuse(*arguments: object) -> NoReturn:
        raise AssertionError(f"a unit test connects to {arguments[-1]}")

    if request.node.get_closest_marker("engine") is None:
        for name in ("connect", "connect_ex"):
            monkeypatch.setattr(socket.socket, name, refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
