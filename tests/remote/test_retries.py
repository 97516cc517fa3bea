"""What a remote engine asks for again, when, and what it does not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from daric_rag import EngineUnavailableError, RemoteEngine
from daric_rag.runtime.remote_retry import Backoff
from tests.remote.fake_server import (
    PROMPT,
    FakeServer,
    error_reply,
    open_engine,
    vllm_error,
)


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout(""),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
        httpx.ReadError(""),
        error_reply(503, vllm_error("The engine is currently busy", 503)),
        error_reply(429, {}),
    ],
)
def test_what_was_not_begun_is_tried_again(
    server: FakeServer, engine: RemoteEngine, waits: list[float], failure: Any
) -> None:
    server.script = [failure, failure]
    assert engine.generate(PROMPT).text
    assert len(server.bodies) == 3
    first, second = waits
    assert 0.25 <= first <= 0.5 <= second <= 1.0
    # The same request: the scheduler side may know it by its id already.
    assert len({headers["x-request-id"] for headers in server.headers}) == 1


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (httpx.ConnectError("refused"), "no server answers at http://server:8000 "),
        (error_reply(503, vllm_error("too busy", 503)), "too busy.*max_retries"),
    ],
)
@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_tries_are_counted(
    server: FakeServer, waits: list[float], failure: Any, text: str, max_retries: int
) -> None:
    server.script = [failure] * 10
    with (
        open_engine(server, max_retries=max_retries) as engine,
        pytest.raises(EngineUnavailableError, match=text),
    ):
        engine.generate(PROMPT)
    assert len(server.bodies) == 1 + max_retries
    assert len(waits) == max_retries


def test_the_server_says_when_to_come_back(
    server: FakeServer, engine: RemoteEngine, waits: list[float]
) -> None:
    later = datetime.now(UTC) + timedelta(seconds=20)
    server.script = [
        error_reply(503, {}, retry_after="4"),
        error_reply(429, {}, retry_after=format_datetime(later, usegmt=True)),
    ]
    assert engine.generate(PROMPT).text
    assert waits[0] == 4.0
    assert 15 < waits[1] <= 20


def test_a_server_that_wants_to_be_left_alone_is(
    server: FakeServer, engine: RemoteEngine, waits: list[float]
) -> None:
    server.script = [error_reply(503, {}, retry_after="3600")]
    with pytest.raises(EngineUnavailableError):
        engine.generate(PROMPT)
    assert (len(server.bodies), waits) == (1, [])


def test_a_busy_server_s_connection_is_given_back(
    server: FakeServer, engine: RemoteEngine, waits: list[float]
) -> None:
    def busy(*_: Any) -> httpx.Response:
        response = server.stream(b"come back later")
        response.status_code = 503
        return response

    server.script = [busy]
    assert engine.generate(PROMPT).text
    assert server.streams[0].closed


def test_waits_double_up_to_a_limit() -> None:
    backoff = Backoff(max_retries=9, base_s=1.0, max_s=10.0, jitter=lambda: 1.0)
    waits = [backoff.wait_s(num_tried) for num_tried in range(1, 11)]
    assert waits == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0, 10.0, None]
    assert backoff.wait_s(1, "soon") == 1.0
