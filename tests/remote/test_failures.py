"""What goes wrong between a remote engine and its server, and what callers get."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from daric_rag import (
    AuthenticationError,
    ChunkedPrompt,
    ConfigError,
    DaricError,
    EngineClosedError,
    EngineError,
    EngineUnavailableError,
    ModelNotFoundError,
    PromptTooLongError,
    RemoteEngine,
    TokenPrompt,
    WireError,
)
from daric_rag.runtime import remote_loop
from daric_rag.runtime.remote_retry import Backoff
from tests.remote.fake_server import KEY, FakeServer, error_reply, event, forever

PROMPT = TokenPrompt([[20] * 30, [21] * 40, [22, 23]])
FIRST = event(
    {"choices": [{"index": 0, "text": "a", "token_ids": [11], "finish_reason": None}]}
)
LAST = event(
    {"choices": [{"index": 0, "text": "b", "token_ids": [12], "finish_reason": "stop"}]}
)
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


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


@pytest.fixture
def engine(server: FakeServer) -> Iterator[RemoteEngine]:
    with open_engine(server) as engine:
        yield engine


def open_engine(server: FakeServer, **options: Any) -> RemoteEngine:
    return RemoteEngine(
        "http://server:8000", **{"api_key": KEY, "transport": server} | options
    )


def streamed(server: FakeServer, *items: Any) -> None:
    server.script.append(lambda *_: server.stream(*items))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def vllm_error(message: str, code: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "T", "param": param, "code": code}}


# ------------------------------------------------------------- a table of errors

TOO_LONG = (
    "This model's maximum context length is 400 tokens. However, your prompt contains "
    "425 input tokens, which exceeds this limit even without any output tokens."
)
RESPONSES: list[tuple[int, Any, type[DaricError], str]] = [
    (400, vllm_error("logprobs of 50", 400), ConfigError, "logprobs of 50"),
    (400, vllm_error(TOO_LONG, 400), PromptTooLongError, "remove at least 26 tokens"),
    (401, {"error": "Unauthorized"}, AuthenticationError, "api_key="),
    (403, "<html>", AuthenticationError, "VLLM_API_KEY"),
    (404, vllm_error("No model x.", 404, "model"), ModelNotFoundError, "/v1/models"),
    (404, {"detail": "Not Found"}, EngineError, "vllm serve"),
    (422, vllm_error("no", 422), ConfigError, "refused the request: no"),
    (307, {}, EngineError, r"failed \(307"),
    (500, vllm_error("EngineCore died", 500), EngineError, "EngineCore died.*log"),
    (501, "", EngineError, "501"),
    (502, "<html>bad gateway</html>", EngineUnavailableError, "502 .*ask again"),
    (504, {}, EngineUnavailableError, "504"),
]


@pytest.mark.parametrize(("status", "content", "error", "text"), RESPONSES)
def test_a_response_s_status_has_its_exception(
    server: FakeServer,
    engine: RemoteEngine,
    status: int,
    content: Any,
    error: type[DaricError],
    text: str,
) -> None:
    server.script = [error_reply(status, content)]
    with pytest.raises(error, match=text) as caught:
        engine.generate(PROMPT)
    assert type(caught.value) is error
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        (vllm_error("Token id 999 is out of vocabulary", 400), ConfigError, "id 999"),
        (vllm_error("EngineCore encountered an issue.", 500), EngineError, "issue"),
        (vllm_error("busy", 503), EngineUnavailableError, "busy"),
        ({"error": "plain"}, EngineError, "plain"),
        ([1, 2], EngineError, "no JSON"),
        ({"choices": [{"index": 0}]}, EngineError, "another form"),
        ({"choices": 5}, EngineError, "another form"),
    ],
)
@pytest.mark.parametrize("before", [[], [FIRST]])
def test_an_error_in_the_stream_has_its_exception(
    server: FakeServer,
    engine: RemoteEngine,
    before: list[bytes],
    content: Any,
    error: type[DaricError],
    text: str,
) -> None:
    streamed(server, *before, event(content), DONE)
    stream = engine.stream(PROMPT)
    for _ in before:
        assert next(stream).text == "a"
    with pytest.raises(error, match=text) as caught:
        next(stream)
    assert type(caught.value) is error
    assert list(stream) == []
    until(lambda: server.streams[0].closed)


@pytest.mark.parametrize("items", [[], [FIRST], [DONE], [FIRST, DONE]])
def test_a_stream_that_ends_early_is_no_answer(
    server: FakeServer, engine: RemoteEngine, items: list[bytes]
) -> None:
    streamed(server, *items)
    with pytest.raises(EngineError, match="without an answer"):
        engine.generate(PROMPT)


def test_a_server_that_dies_in_midst_of_an_answer_is_not_asked_again(
    server: FakeServer, engine: RemoteEngine
) -> None:
    streamed(server, FIRST, httpx.RemoteProtocolError("incomplete chunked read"))
    stream = engine.stream(PROMPT)
    assert next(stream).text == "a"
    with pytest.raises(EngineUnavailableError, match=r"broke.*incomplete chunked read"):
        next(stream)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("end", [[], [httpx.ReadError("reset")]])
def test_a_whole_answer_is_kept_though_its_counts_are_lost(
    server: FakeServer, engine: RemoteEngine, end: list[Exception]
) -> None:
    streamed(server, FIRST, LAST, *end)
    done = engine.generate(PROMPT)
    assert (done.text, done.finish_reason) == ("ab", "stop")
    assert "did not tell" in done.reuse.reason


def test_a_silent_server_is_given_up_and_not_asked_again(server: FakeServer) -> None:
    streamed(server, FIRST, httpx.ReadTimeout(""))
    server.script.append(httpx.ReadTimeout(""))
    with open_engine(server, timeout_s=7.5) as engine:
        for _ in range(2):
            with pytest.raises(EngineUnavailableError, match=r"silent for 7.5 s"):
                engine.generate(PROMPT)
    assert len(server.bodies) == 2


# ------------------------------------------------------------------ further tries


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


# ------------------------------------------------------------------------ aborting


def test_closing_a_stream_closes_its_connection(
    server: FakeServer, engine: RemoteEngine
) -> None:
    streamed(server, FIRST, forever)
    stream = engine.stream(PROMPT)
    assert next(stream).text == "a"
    assert not server.streams[0].closed
    stream.close()  # type: ignore[attr-defined]
    until(lambda: server.streams[0].closed)
    assert list(stream) == []


def test_dropping_a_stream_closes_its_connection(
    server: FakeServer, engine: RemoteEngine
) -> None:
    streamed(server, FIRST, forever)
    stream = engine.stream(PROMPT)
    next(stream)
    del stream
    until(lambda: server.streams[0].closed)


async def test_cancelling_closes_the_connection(server: FakeServer) -> None:
    async with open_engine(server) as engine:
        for call in (engine.agenerate, lambda prompt: anext(engine.astream(prompt))):
            streamed(server, forever)
            task = asyncio.ensure_future(call(PROMPT))
            while not server.streams:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stream = server.streams.pop()
            while not stream.closed:
                await asyncio.sleep(0.001)


def test_one_failure_in_a_batch_ends_the_others(
    server: FakeServer, engine: RemoteEngine
) -> None:
    async def both_there() -> None:
        while len(server.streams) < 2:
            await asyncio.sleep(0.001)

    streamed(server, both_there, event(vllm_error("bad", 400)), DONE)
    streamed(server, forever)
    with pytest.raises(ConfigError, match="bad"):
        engine.generate_batch([PROMPT, PROMPT])
    until(lambda: all(stream.closed for stream in server.streams))


def test_closing_the_engine_wakes_who_waits(server: FakeServer) -> None:
    engine = open_engine(server)
    streamed(server, FIRST, forever)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            engine.generate(PROMPT)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: bool(server.streams))
    engine.close()
    thread.join(5)
    (error,) = errors
    assert isinstance(error, EngineClosedError)
    assert server.streams[0].closed


def test_a_forked_process_has_no_thread_to_ask(
    server: FakeServer, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(EngineClosedError, match="forked"):
            engine.generate(PROMPT)
        with pytest.raises(EngineClosedError, match="forked"):
            engine.layout(ChunkedPrompt(question="new"))
    assert engine.generate(PROMPT).text


def remote_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "daric-remote"]


def test_no_thread_outlives_its_engine(server: FakeServer) -> None:
    engine = open_engine(server)
    assert remote_threads()
    engine.close()
    assert not remote_threads()


def test_a_dropped_engine_is_closed_at_once(server: FakeServer) -> None:
    """No garbage collection is needed, whatever errors its callers have seen."""
    engine = open_engine(server)
    server.script = [error_reply(400, vllm_error("bad", 400))]
    server.missing = {"/tokenize"}
    gc.collect()
    gc.disable()
    try:
        for prompt in (PROMPT, ChunkedPrompt(question="new")):
            with pytest.raises(DaricError):
                engine.generate(prompt)
        del engine
        until(lambda: not remote_threads())
    finally:
        gc.enable()


# ------------------------------------------------------------------------- opening


@pytest.mark.parametrize(
    "url",
    ["", "server:8000", "ftp://server", "http://", "http://a:b@server", "http://s?x=1"],
)
def test_an_address_that_is_none(server: FakeServer, url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        RemoteEngine(url, transport=server)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("timeout_s", "5"),
        ("max_retries", -1),
        ("max_retries", 1.5),
        ("max_retries", True),
    ],
)
def test_numbers_that_are_none(server: FakeServer, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .* above"):
        open_engine(server, **{name: value})


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_as_others_write_it(server: FakeServer, path: str) -> None:
    url = f"http://server:8000{path}"
    with RemoteEngine(url, api_key=KEY, transport=server) as engine:
        assert engine.base_url == "http://server:8000"


@pytest.mark.parametrize("model", ["other", ""])
def test_a_model_that_is_not_served(server: FakeServer, model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="it serves tiny"):
        open_engine(server, model=model)


def test_one_of_several_models_must_be_named(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [{"id": name, "max_model_len": 90} for name in ("b", "a")]
    adapter = {"id": "adapter", "max_model_len": None}
    monkeypatch.setattr(server, "_models", lambda _: {"data": [*cards, adapter]})
    with pytest.raises(ConfigError, match=r"pass model=.*serves a, b$"):
        open_engine(server)
    with open_engine(server, model="a") as engine:
        assert (engine.model, engine.max_model_len) == ("a", 90)


@pytest.mark.parametrize("cards", [{}, [], {"data": [{"id": "a"}]}, "models"])
def test_a_server_of_another_kind(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, cards: Any
) -> None:
    monkeypatch.setattr(server, "_models", lambda _: cards)
    with pytest.raises(EngineError, match=r"another form.*vllm serve"):
        open_engine(server)


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize"])
def test_a_path_that_every_vllm_server_has(server: FakeServer, path: str) -> None:
    server.missing = {path}
    with pytest.raises(EngineError, match=r"no such path.*vllm serve"):
        open_engine(server)


@pytest.mark.parametrize("facts", [{}, [], {"block_size": 16}, "x"])
def test_facts_of_another_form(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, facts: Any
) -> None:
    monkeypatch.setattr(server, "_facts", lambda _: facts)
    with pytest.raises(WireError, match="same daric_rag"):
        open_engine(server)


@pytest.mark.parametrize("num_answered", range(3))
def test_a_template_that_cannot_be_asked_for_is_not_one_without_system_role(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, num_answered: int
) -> None:
    render, num_asked = server._render, 0

    def broken_once(body: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        if num_asked == num_answered + 1:
            raise httpx.ReadTimeout("")
        return render(body)

    monkeypatch.setattr(server, "_render", broken_once)
    with pytest.raises(EngineUnavailableError, match="silent"):
        open_engine(server)


def test_tokenising_fails_as_the_server_does(
    server: FakeServer, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_tokenize", lambda _: {"tokens": "abc"})
    with pytest.raises(WireError, match="/tokenize"):
        engine.layout(ChunkedPrompt(question="new"))


def test_a_failed_opening_leaves_no_thread(server: FakeServer) -> None:
    with pytest.raises(AuthenticationError):
        open_engine(server, api_key="wrong-key-0")
    assert "daric-remote" not in [thread.name for thread in threading.enumerate()]


# ------------------------------------------------------------------------- secrets


def test_secrets_are_shown_nowhere(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    gateway = {"x-gateway": "gateway-secret-1"}
    with open_engine(server, headers=gateway) as engine:
        shown += [repr(engine), repr(vars(engine)), str(engine)]
        echo = f"bad token {KEY} and gateway-secret-1"
        for status in (400, 404, 500, 503):
            server.script = [error_reply(status, vllm_error(echo, status))] * 3
            with pytest.raises(DaricError) as caught:
                engine.generate(PROMPT)
            shown += [str(caught.value), repr(caught.value)]
        streamed(server, event(vllm_error(echo, 400)))
        with pytest.raises(ConfigError, match=r"\*\*\* and \*\*\*") as caught:
            engine.generate(PROMPT)
        shown.append(str(caught.value))
    assert server.headers[0]["x-gateway"] == "gateway-secret-1"
    for text in (*shown, caplog.text):
        assert KEY not in text
        assert "gateway-secret-1" not in text


@pytest.mark.parametrize("key", ["a-secret-key\n", "a-secret-kéy"])
def test_a_key_that_no_header_can_carry(server: FakeServer, key: str) -> None:
    with pytest.raises(ConfigError, match="line breaks") as caught:
        open_engine(server, api_key=key)
    assert "a-secret" not in str(caught.value)


def test_a_server_s_text_is_one_short_printable_line(
    server: FakeServer, engine: RemoteEngine
) -> None:
    server.script = [error_reply(500, vllm_error("\x1b[31m" + "x\n" * 900, 500))]
    with pytest.raises(EngineError) as caught:
        engine.generate(PROMPT)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
