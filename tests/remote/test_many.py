"""Many requests at once: connections are files, and those are few."""

from __future__ import annotations

import asyncio
import errno

import httpx
import pytest

from daric_rag import (
    ChunkedPrompt,
    EngineClosedError,
    EngineUnavailableError,
    RemoteEngine,
)
from tests.remote.fake_server import (
    DONE,
    LAST,
    PROMPT,
    FakeServer,
    forever,
    streamed,
    until,
)

MAX_RUNNING = 128


def num_open(server: FakeServer) -> int:
    return sum(not stream.closed for stream in server.streams)


def test_a_batch_opens_only_so_many_connections(
    server: FakeServer, engine: RemoteEngine
) -> None:
    num_seen: list[int] = []

    async def note() -> None:
        # Nobody answers before as many as may come are there.
        while not num_seen or max(num_seen) < MAX_RUNNING:
            num_seen.append(num_open(server))
            await asyncio.sleep(0.001)
        num_seen.append(num_open(server))

    num = 2 * MAX_RUNNING + 5
    for _ in range(num):
        streamed(server, note, LAST, DONE)
    done = engine.generate_batch([PROMPT] * num)
    assert [completion.text for completion in done] == ["b"] * num
    assert max(num_seen) == MAX_RUNNING


def test_texts_are_tokenised_though_no_request_may_start(
    server: FakeServer, engine: RemoteEngine
) -> None:
    for _ in range(MAX_RUNNING):
        streamed(server, forever)
    running = [engine.stream(PROMPT) for _ in range(MAX_RUNNING)]
    until(lambda: num_open(server) == MAX_RUNNING)
    assert engine.layout(ChunkedPrompt(question="new"))
    # One that waits may leave; the next takes the place of one that ends.
    waiting, next_one = engine.stream(PROMPT), engine.stream(PROMPT)
    waiting.close()  # type: ignore[attr-defined]
    running.pop().close()  # type: ignore[attr-defined]
    assert list(next_one)[-1].completion is not None
    assert len(server.bodies) == MAX_RUNNING + 1
    waiting = engine.stream(PROMPT)
    running.clear()
    assert list(waiting)[-1].completion is not None


def test_who_waits_for_a_place_hears_of_the_end(
    server: FakeServer, engine: RemoteEngine
) -> None:
    for _ in range(MAX_RUNNING):
        streamed(server, forever)
    running = [engine.stream(PROMPT) for _ in range(MAX_RUNNING + 1)]
    until(lambda: num_open(server) == MAX_RUNNING)
    engine.close()
    for stream in running:
        with pytest.raises(EngineClosedError):
            next(stream)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_named(
    server: FakeServer, engine: RemoteEngine, waits: list[float], number: int
) -> None:
    attempts = ExceptionGroup("several addresses", [OSError(number, "too many")])
    whole = OSError("All connection attempts failed")
    whole.__cause__ = attempts
    error = httpx.ConnectError("All connection attempts failed")
    error.__cause__ = whole
    server.script = [error] * 3
    with pytest.raises(EngineUnavailableError, match="ulimit -n"):
        engine.generate(PROMPT)
    assert len(waits) == 2
