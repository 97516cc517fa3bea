"""What the middleware adds to a server's app; the app here is a stand-in for vLLM's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from daric_rag.runtime.remote_tokenizer import ServerFacts
from daric_rag.runtime.server_middleware import DaricMiddleware

KEY = "a-secret-key"
ASKING = {"x-request-id": "abc", "x-daric-reuse": "1"}
COUNTS = {"daric": {"version": 1, "reuse": {"prompt_tokens": 5}}}


class Guard:
    """Stands for vLLM's own check of keys, which comes behind our middleware."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        guarded = scope["type"] == "http" and scope["path"].startswith("/v1")
        if guarded and headers.get(b"authorization") != f"Bearer {KEY}".encode():
            await JSONResponse({"error": "no"}, 401)(scope, receive, send)
            return
        await self.app(scope, receive, send)


@dataclass
class Engine:
    """Stands for vLLM's engine client.

    Attributes:
        told: What it says of the ids that it is asked for; used up from the front.
        asked: The ids of every call.
    """

    told: list[Any] = field(default_factory=list)
    asked: list[list[str]] = field(default_factory=list)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        assert method == "daric_closing_params"
        (ids,) = args
        self.asked.append(list(ids))
        answers = [self.told.pop(0) for _ in ids]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [answers, None]

    def get_tokenizer(self) -> Any:
        def render(messages: Any, **options: Any) -> str:
            if messages[0]["role"] == "system":
                raise ValueError("no system role here")
            assert (options["tokenize"], options["add_generation_prompt"]) == (0, 1)
            tools = options.get("tools", "")
            thought = "thinking:" * options["enable_thinking"]
            return (
                f"{options['chat_template']}:{thought}{messages[0]['content']}{tools}"
            )

        added = {7: SimpleNamespace(content="<x>", special=False)}
        return SimpleNamespace(
            bos_token_id=1,
            eos_token_id=2,
            unk_token_id=None,
            chat_template=None,
            added_tokens_decoder=added,
            encode=lambda text, add_special_tokens: [1] * add_special_tokens,
            apply_chat_template=render,
        )


async def complete(request: Request) -> Response:
    async def events() -> Any:
        yield 'data: {"choices": []}\n\n'
        yield "data: [DONE]\n\n"

    if (await request.json()).get("stream"):
        return StreamingResponse(events(), media_type="text/event-stream")
    return JSONResponse({"whole": True})


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def app(engine: Engine) -> Starlette:
    app = Starlette(
        routes=[Route("/v1/completions", complete, methods=["POST"])],
        middleware=[Middleware(DaricMiddleware), Middleware(Guard)],
    )
    worker_cls = "daric_rag.runtime.worker.DaricWorker"
    app.state.engine_client = engine
    app.state.online_renderer = SimpleNamespace(
        chat_template="T", default_chat_template_kwargs={"enable_thinking": False}
    )
    app.state.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=worker_cls),
        cache_config=SimpleNamespace(block_size=16),
        scheduler_config=SimpleNamespace(policy="fcfs"),
        model_config=SimpleNamespace(get_vocab_size=lambda: 99),
    )
    return app


@pytest.fixture
async def client(app: Starlette) -> Any:
    await _start(app)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://server",
        headers={"authorization": f"Bearer {KEY}"},
    ) as client:
        yield client


async def _start(app: Starlette) -> None:
    """Begin a lifespan as a server does; nobody waits for its end."""
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(_: Any) -> None:
        pass

    await app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)


async def stream(client: httpx.AsyncClient, **headers: str) -> list[str]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await client.post(
        "/v1/completions", json={"stream": True}, headers=names
    )
    assert response.status_code == 200
    return [line[6:] for line in response.text.split("\n\n") if line]


async def test_a_stream_ends_with_its_counts(
    client: httpx.AsyncClient, engine: Engine
) -> None:
    engine.told = [COUNTS]
    first, counts, done = await stream(client, **ASKING)
    assert json.loads(first) == {"choices": []}
    assert json.loads(counts) == {"index": 0, "kv_transfer_params": COUNTS}
    assert done == "[DONE]"
    assert engine.asked == [["cmpl-abc-0"]]


async def test_every_answer_has_its_counts(
    client: httpx.AsyncClient, engine: Engine
) -> None:
    others = {"daric": {"version": 1, "reuse": {"prompt_tokens": 6}}}
    engine.told = [COUNTS, others, None, None, None]
    _, *counts, _ = await stream(client, **ASKING | {"x-daric-reuse": "3"})
    assert [json.loads(text) for text in counts] == [
        {"index": 0, "kv_transfer_params": COUNTS},
        {"index": 1, "kv_transfer_params": others},
    ]
    first, *again = engine.asked
    assert first == [f"{index}_cmpl-abc-0" for index in range(3)]
    assert again == [["2_cmpl-abc-0"]] * 2


async def test_a_large_number_asks_for_the_first_answers_in_one_call(
    client: httpx.AsyncClient, engine: Engine
) -> None:
    engine.told = [COUNTS] * 999
    _, *counts, _ = await stream(client, **ASKING | {"x-daric-reuse": "999"})
    assert [json.loads(text)["index"] for text in counts] == list(range(64))
    assert engine.asked == [[f"{index}_cmpl-abc-0" for index in range(64)]]


@pytest.mark.parametrize("num", ["", "0", "-1", "x", "1000", "9" * 5000])
async def test_foolish_numbers_ask_for_nothing(
    client: httpx.AsyncClient, engine: Engine, num: str
) -> None:
    headers = ASKING | {"x-daric-reuse": num}
    assert len(await stream(client, **headers)) == 2
    assert engine.asked == []


async def test_the_engine_is_asked_again_while_it_does_not_know(
    client: httpx.AsyncClient, engine: Engine
) -> None:
    engine.told = [None, None, COUNTS]
    assert len(await stream(client, **ASKING)) == 3
    engine.told = [None] * 9
    assert len(await stream(client, **ASKING)) == 2
    assert len(engine.told) == 6


async def test_counts_never_fail_an_answer(
    client: httpx.AsyncClient, engine: Engine
) -> None:
    engine.told = [RuntimeError("engine died")]
    assert len(await stream(client, **ASKING)) == 2


@pytest.mark.parametrize("missing", ["x-request-id", "x-daric-reuse"])
async def test_who_does_not_ask_is_not_told(
    client: httpx.AsyncClient, engine: Engine, missing: str
) -> None:
    headers = {name: value for name, value in ASKING.items() if name != missing}
    assert len(await stream(client, **headers)) == 2
    assert engine.asked == []


async def test_what_is_no_stream_is_left_alone(
    client: httpx.AsyncClient, engine: Engine
) -> None:
    response = await client.post("/v1/completions", json={}, headers=ASKING)
    assert response.json() == {"whole": True}
    assert engine.asked == []


async def test_a_server_describes_itself(client: httpx.AsyncClient) -> None:
    facts = ServerFacts.from_dict((await client.get("/v1/daric")).json())
    assert facts == ServerFacts(
        reuses=True,
        block_size=16,
        vocab_size=99,
        scheduling_policy="fcfs",
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=None,
        has_chat_template=True,
        opening_ids=(1,),
        added_tokens={7: ("<x>", False)},
    )


@pytest.mark.parametrize(
    ("role", "more", "answer"),
    [
        ("user", {}, {"text": "T:hi"}),
        ("user", {"tools": [5]}, {"text": "T:hi[5]"}),
        ("system", {}, {"error": "no system role here"}),
        (
            "user",
            {"chat_template": "{{ evil }}"},
            {"error": "only add_generation_prompt, messages, tools can be rendered"},
        ),
    ],
)
async def test_the_server_renders_its_template_and_no_other(
    client: httpx.AsyncClient, role: str, more: Any, answer: dict[str, str]
) -> None:
    messages = [{"role": role, "content": "hi"}]
    content = {"messages": messages, "add_generation_prompt": True} | more
    response = await client.post("/v1/daric/chat_template", json=content)
    assert response.json() == answer


@pytest.mark.parametrize(
    ("defaults", "text"),
    [
        ({"enable_thinking": True}, "T:thinking:hi"),
        # What the client says, and what makes it text, is not for defaults to say.
        (
            {
                "enable_thinking": False,
                "tokenize": True,
                "add_generation_prompt": False,
                "chat_template": "other",
                "tools": [7],
            },
            "T:hi[5]",
        ),
    ],
)
async def test_the_server_s_defaults_for_templates_hold(
    app: Starlette, client: httpx.AsyncClient, defaults: dict[str, Any], text: str
) -> None:
    app.state.online_renderer.default_chat_template_kwargs = defaults
    messages = [{"role": "user", "content": "hi"}]
    content: dict[str, Any] = {"messages": messages, "add_generation_prompt": True}
    if "tools" in defaults:
        content["tools"] = [5]
    response = await client.post("/v1/daric/chat_template", json=content)
    assert response.json() == {"text": text}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/daric"),
        ("POST", "/v1/daric/chat_template"),
        ("POST", "/v1/completions"),
    ],
)
async def test_nothing_is_told_without_the_key(
    client: httpx.AsyncClient, engine: Engine, method: str, path: str
) -> None:
    headers = ASKING | {"authorization": "Bearer other"}
    response = await client.request(
        method, path, json={"stream": True}, headers=headers
    )
    assert response.status_code == 401
    assert engine.asked == []
