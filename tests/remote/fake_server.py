"""A vLLM server with daric_rag that lives in httpx's transport."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx

from daric_rag import RemoteEngine, ReuseStats, TokenPrompt
from daric_rag.wire import encode_reuse

KEY = "a-secret-key"
MODEL = "tiny"
MAX_MODEL_LEN = 500
VOCAB_SIZE = 300
SPECIAL = {"<|end|>": 1, "<|user|>": 2, "<|bot|>": 3}
FIRST_BYTE = 10  # a token per byte from here on

_SPELLING = re.compile("|".join(map(re.escape, SPECIAL)))

# The last is not finished with its token: half a character, as vLLM holds it back.
TEXTS = ("é", " 日本", "", "\n\ndata: x", "😀.")
TOKENS = (11, 12, 13, 14, 15)


def encode(text: str) -> list[int]:
    ids: list[int] = []
    start = 0
    for match in _SPELLING.finditer(text):
        ids += [FIRST_BYTE + byte for byte in text[start : match.start()].encode()]
        ids.append(SPECIAL[match[0]])
        start = match.end()
    return ids + [FIRST_BYTE + byte for byte in text[start:].encode()]


class LocalTokenizer:
    """The fake server's tokenizer, on this side."""

    bos_token_id, eos_token_id, unk_token_id = None, 1, None
    chat_template = "a template"
    added_tokens_decoder: Mapping[int, Any] = {
        i: SimpleNamespace(content=text, special=True) for text, i in SPECIAL.items()
    }

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [index + self.shift for index in encode(text)]

    def apply_chat_template(self, conversation: Any, **_: Any) -> str:
        if conversation[0]["role"] == "system":
            raise ValueError("no system role here")
        turns = "".join(f"<|user|>{m['content']}<|end|>" for m in conversation)
        return turns + "<|bot|>"


def event(content: Any) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def choice(
    text: str, token: int, reason: str | None, top: int | None
) -> dict[str, Any]:
    entry = {f"token_id:{token}": -0.5} | {
        f"token_id:{100 + rank}": -1.5 - rank for rank in range(top or 0)
    }
    logprobs = None if top is None else {"top_logprobs": [entry]}
    return {
        "index": 0,
        "text": text,
        "token_ids": [token],
        "finish_reason": reason,
        "logprobs": logprobs,
    }


def answer(body: dict[str, Any], counts: ReuseStats | None) -> Iterator[bytes]:
    """The events of an answer of at most five tokens."""
    num = min(body["max_tokens"], len(TOKENS))
    yield b": keep-alive\n\n"
    for index, (text, token) in enumerate(zip(TEXTS, TOKENS, strict=True)):
        if index < num:
            reason = "length" if index == num - 1 else None
            yield event({"choices": [choice(text, token, reason, body["logprobs"])]})
    details = {"prompt_tokens_details": {"cached_tokens": 7}}
    yield event({"choices": [], "usage": details})
    if counts is not None:
        yield event({"kv_transfer_params": encode_reuse(counts)})
    yield b"data: [DONE]\n\n"


@dataclass
class Pieces(httpx.AsyncByteStream):
    """A body in pieces of a few bytes; what is no bytes is awaited or raised."""

    items: Sequence[Any]
    cut: int
    closed: bool = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for item in self.items:
            if isinstance(item, Exception):
                raise item
            if not isinstance(item, bytes):
                await item()
                continue
            for start in range(0, len(item), self.cut):
                yield item[start : start + self.cut]

    async def aclose(self) -> None:
        self.closed = True


Reply = Callable[[httpx.Request, dict[str, Any]], httpx.Response]


@dataclass
class FakeServer(httpx.AsyncBaseTransport):
    """Answers as vLLM does.

    Attributes:
        daric: Whether it has our middleware and connector.
        policy: How it schedules requests.
        missing: Paths that it does not have.
        counts: What it tells of reuse.
        cut: Bytes per piece of a stream.
        script: What happens to the next completions instead: an exception to raise,
            or a function that makes the response.
        paths: Asked for, in order.
        bodies: Of the completions.
        headers: Of the completions.
        streams: Of the completions.
    """

    daric: bool = True
    policy: str = "fcfs"
    missing: set[str] = field(default_factory=set)
    counts: ReuseStats | None = field(
        default_factory=lambda: ReuseStats(disjoint_hit_tokens=9, load_s=0.5)
    )
    cut: int = 7
    script: list[Exception | Reply] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[httpx.Headers] = field(default_factory=list)
    streams: list[Pieces] = field(default_factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        path = request.url.path
        self.paths.append(path)
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        if path == "/v1/completions":
            return self._complete(request, json.loads(content))
        routes = {"/v1/models": self._models, "/tokenize": self._tokenize}
        if self.daric:
            routes |= {"/v1/daric": self._facts}
            routes |= {"/v1/daric/chat_template": self._render}
        if path not in routes or path in self.missing:
            return httpx.Response(404, json={"detail": "Not Found"})
        body = json.loads(content) if content else {}
        return httpx.Response(200, json=routes[path](body))

    def stream(self, *items: Any) -> httpx.Response:
        self.streams.append(Pieces(items, self.cut))
        return httpx.Response(
            200,
            headers={"content-type": "text/event-stream"},
            stream=self.streams[-1],
        )

    def _complete(self, request: httpx.Request, body: dict[str, Any]) -> httpx.Response:
        self.bodies.append(body)
        self.headers.append(request.headers)
        if self.script:
            act = self.script.pop(0)
            if isinstance(act, Exception):
                raise act
            return act(request, body)
        told = "x-daric-reuse" in request.headers and self.daric
        return self.stream(*answer(body, self.counts if told else None))

    def _models(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"data": [{"id": MODEL, "max_model_len": MAX_MODEL_LEN}]}

    def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": encode(body["prompt"])}

    def _facts(self, _: dict[str, Any]) -> dict[str, Any]:
        return {
            "reuses": True,
            "block_size": 16,
            "vocab_size": VOCAB_SIZE,
            "scheduling_policy": self.policy,
            "bos_token_id": None,
            "eos_token_id": 1,
            "unk_token_id": None,
            "has_chat_template": True,
            "opening_ids": [],
            "added_tokens": {str(i): [text, True] for text, i in SPECIAL.items()},
            "a_later_version": "knows more",
        }

    def _render(self, body: dict[str, Any]) -> dict[str, Any]:
        turns = "".join(f"<|user|>{m['content']}<|end|>" for m in body["messages"])
        if body["messages"][0]["role"] == "system":
            return {"error": "no system role here"}
        return {"text": turns + "".join(map(str, body.get("tools", ()))) + "<|bot|>"}


def error_reply(status: int, content: Any, **headers: str) -> Reply:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda *_: httpx.Response(status, json=content, headers=names)


async def forever() -> None:
    await asyncio.Event().wait()


PROMPT = TokenPrompt([[20] * 30, [21] * 40, [22, 23]])
FIRST = event(
    {"choices": [{"index": 0, "text": "a", "token_ids": [11], "finish_reason": None}]}
)
LAST = event(
    {"choices": [{"index": 0, "text": "b", "token_ids": [12], "finish_reason": "stop"}]}
)
DONE = b"data: [DONE]\n\n"


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


def remote_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "daric-remote"]
