"""What a remote engine asks of its server at first, and the secrets it keeps."""

from __future__ import annotations

import logging
import threading
import traceback
from typing import Any

import httpx
import pytest

from daric_rag import (
    AuthenticationError,
    ChunkedPrompt,
    ConfigError,
    DaricError,
    EngineError,
    EngineUnavailableError,
    ModelNotFoundError,
    RemoteEngine,
    WireError,
)
from tests.remote.fake_server import (
    KEY,
    PROMPT,
    FakeServer,
    error_reply,
    event,
    open_engine,
    streamed,
    vllm_error,
)


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


@pytest.mark.parametrize("num_answered", range(3))
@pytest.mark.parametrize(
    ("status", "content", "error"),
    [
        (400, "<html>", ConfigError),
        (403, "<html>", AuthenticationError),
        (500, {}, EngineError),
        (200, {"status": "please log in"}, WireError),
    ],
)
def test_a_gateway_that_fails_teaches_nothing_of_the_template(
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    num_answered: int,
    status: int,
    content: Any,
    error: type[DaricError],
) -> None:
    handle, num_asked = server.handle_async_request, 0

    async def fail_once(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        if request.url.path.endswith("/chat_template"):
            num_asked += 1
            if num_asked == num_answered + 1:
                return httpx.Response(status, json=content)
        return await handle(request)

    monkeypatch.setattr(server, "handle_async_request", fail_once)
    with pytest.raises(error) as caught:
        open_engine(server)
    assert type(caught.value) is error


def test_tokenising_fails_as_the_server_does(
    server: FakeServer, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_tokenize", lambda _: {"tokens": "abc"})
    with pytest.raises(WireError, match="/tokenize"):
        engine.layout(ChunkedPrompt(question="new"))


@pytest.mark.parametrize(
    ("url", "shown"), [("http://server:8000", "http://server:8000"), ("ftp://s", "")]
)
def test_an_engine_that_is_not_open_yet_can_be_shown(
    server: FakeServer, url: str, shown: str
) -> None:
    """As debuggers and crash reports do, of every frame."""
    with pytest.raises(DaricError) as caught:
        RemoteEngine(url, transport=server)
    engine = next(
        frame.f_locals["self"]
        for frame, _ in traceback.walk_tb(caught.value.__traceback__)
        if isinstance(frame.f_locals.get("self"), RemoteEngine)
    )
    assert repr(engine) == f"RemoteEngine({shown!r}, model='')"


def test_a_failed_opening_leaves_no_thread(server: FakeServer) -> None:
    with pytest.raises(AuthenticationError):
        open_engine(server, api_key="wrong-key-0")
    assert "daric-remote" not in [thread.name for thread in threading.enumerate()]


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


@pytest.mark.parametrize("option", ["api_key", "headers"])
@pytest.mark.parametrize(
    "key",
    [
        "",
        " ",
        "a-secret-key\n",
        "a-secret-kéy",
        "a-secret-key ",
        " a-secret-key",
        "a-secret\tkey",
        "a-secret\x00key",
        b"a-secret-key",
    ],
)
def test_a_key_that_no_header_can_carry(
    server: FakeServer, option: str, key: Any
) -> None:
    name, value = option, key
    if option == "headers":
        name, value = "header 'x-gate'", {"x-gate": key}
    with pytest.raises(ConfigError, match=rf"{name}.* strip\(\)") as caught:
        open_engine(server, **{option: value})
    assert "a-secret" not in "".join(traceback.format_exception(caught.value))
    assert server.paths == []


@pytest.mark.parametrize("name", ["", "x gate", "x:gate", "x-gate\n", "gäte"])
def test_a_name_that_is_no_header_s(server: FakeServer, name: str) -> None:
    with pytest.raises(ConfigError, match="name that HTTP does not take"):
        open_engine(server, headers={name: "value"})


def test_a_header_that_httpx_refuses_is_not_quoted(server: FakeServer) -> None:
    with open_engine(server) as engine:
        server.script = [httpx.LocalProtocolError(f"Illegal value b'Bearer {KEY}'")]
        with pytest.raises(ConfigError, match=r"Bearer \*\*\*") as caught:
            engine.generate(PROMPT)
    assert KEY not in "".join(traceback.format_exception(caught.value))


def test_a_server_s_text_is_one_short_printable_line(
    server: FakeServer, engine: RemoteEngine
) -> None:
    server.script = [error_reply(500, vllm_error("\x1b[31m" + "x\n" * 900, 500))]
    with pytest.raises(EngineError) as caught:
        engine.generate(PROMPT)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
