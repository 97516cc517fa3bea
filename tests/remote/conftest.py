"""A fake server and an engine on it; no test here may touch the network."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from daric_rag import RemoteEngine
from daric_rag.runtime import remote_loop
from tests.remote.fake_server import FakeServer, open_engine


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a test touched the network")

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def engine(server: FakeServer) -> Iterator[RemoteEngine]:
    with open_engine(server) as engine:
        yield engine


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between tries, none of which is waited."""
    waited: list[float] = []
    sleep = asyncio.sleep

    async def note(delay: float) -> None:
        waited.append(delay)
        await sleep(0)

    monkeypatch.setattr(remote_loop.asyncio, "sleep", note)
    return waited
