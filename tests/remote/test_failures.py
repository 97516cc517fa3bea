"""What goes wrong between a remote engine and its server, and what callers get."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from daric_rag import (
    AuthenticationError,
    ConfigError,
    DaricError,
    EngineError,
    EngineUnavailableError,
    ModelNotFoundError,
    PromptTooLongError,
    RemoteEngine,
)
from tests.remote.fake_server import (
    DONE,
    FIRST,
    LAST,
    PROMPT,
    FakeServer,
    error_reply,
    event,
    open_engine,
    streamed,
    until,
    vllm_error,
)

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
    (307, {}, EngineError, r"elsewhere \(307\).*behind it as base_url"),
    (418, {}, EngineError, r"failed \(418\): see"),
    (500, vllm_error("EngineCore died", 500), EngineError, "EngineCore died.*log"),
    (501, "", EngineError, "501"),
    (502, "<html>bad gateway</html>", EngineUnavailableError, "502 .*ask again"),
    (504, {}, EngineUnavailableError, r"\(504\)"),
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
