"""What a vLLM server tells remote clients; named by its ``--middleware``.

vLLM's HTTP API lacks three things that a client needs: the reuse counts of a streamed
answer, which tokens control the model, and the chat template as text. The middleware
adds an event to streams whose request asks for it, and two routes below ``/v1``, so
that vLLM's own check of API keys guards them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from daric_rag.runtime.remote_tokenizer import FACTS_PATH, TEMPLATE_PATH, ServerFacts
from daric_rag.runtime.remote_wire import MAX_COUNTED, REUSE_HEADER
from daric_rag.runtime.request_ids import answer_request_id, served_request_id
from daric_rag.runtime.serving import FIXED_OPTIONS

__all__ = ["DaricMiddleware"]

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_COMPLETIONS = "/v1/completions"
_DONE = b"data: [DONE]"

_RENDERED = frozenset({"messages", "add_generation_prompt", "tools"})

# Of a number of answers: Python itself refuses to read huge ones.
_MAX_DIGITS = 3

# The engine hears of a stop string from the front end, which streams on meanwhile.
_NUM_LOOKS = 3
_LOOK_AGAIN_S = 0.01


class DaricMiddleware:
    """API server process. Adds what remote clients need to vLLM's own app.

    Args:
        app: The next ASGI application.
    """

    def __init__(self, app: App) -> None:
        """Wait for the app's start."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; see the ASGI specification."""
        if scope["type"] == "lifespan":
            _add_routes(scope["app"])
        elif scope["type"] == "http" and scope["path"].endswith(_COMPLETIONS):
            ids = _asked_for(Headers(scope=scope))
            if ids:
                send = _CountingSend(scope["app"], ids, send)
        await self._app(scope, receive, send)


def _asked_for(headers: Headers) -> list[str]:
    """Return the requests, by vLLM's ids, whose counts a client wants to be told."""
    request_id, wanted = headers.get("x-request-id"), headers.get(REUSE_HEADER, "")
    if not request_id or not wanted.isdecimal() or len(wanted) > _MAX_DIGITS:
        return []
    served, num = served_request_id(request_id), int(wanted)
    asked = range(min(num, MAX_COUNTED))
    return [answer_request_id(served, index, num) for index in asked]


class _CountingSend:
    """API server process. Puts a stream's reuse counts in front of its end."""

    def __init__(self, app: Any, ids: list[str], send: Send) -> None:
        self._app, self._ids, self._send = app, ids, send

    async def __call__(self, message: Message) -> None:
        if message.get("body", b"").startswith(_DONE):
            told = await self._counts()
            events = [
                json.dumps({"index": index, "kv_transfer_params": told[request_id]})
                for index, request_id in enumerate(self._ids)
                if request_id in told
            ]
            body = "".join(f"data: {event}\n\n" for event in events).encode()
            await self._send({**message, "body": body, "more_body": True})
        await self._send(message)

    async def _counts(self) -> dict[str, dict[str, Any]]:
        """Return the counts that the engine knows, by request; one call asks for all.

        It answers between two steps, and a call for each would hold it up.
        """
        engine = self._app.state.engine_client
        told: dict[str, dict[str, Any]] = {}
        try:
            for _ in range(_NUM_LOOKS):
                unknown = [own for own in self._ids if own not in told]
                if not unknown:
                    break
                (answers, *_) = await engine.collective_rpc(
                    "daric_closing_params", args=(unknown,)
                )
                pairs = zip(unknown, answers, strict=True)
                told |= {
                    own: dict(params) for own, params in pairs if params is not None
                }
                if len(told) < len(self._ids):
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except Exception:
            # The request has been answered and must not fail any more.
            logger.warning("the reuse counts of %s are unknown", ", ".join(self._ids))
        return told


def _add_routes(app: Any) -> None:
    """Add our routes in front of vLLM's, whatever wildcards it may have."""
    app.router.routes[:0] = [
        Route(FACTS_PATH, _tell_facts, methods=["GET"]),
        Route(TEMPLATE_PATH, _render, methods=["POST"]),
    ]


async def _tell_facts(request: Request) -> Response:
    state = request.app.state
    config, tokenizer = state.vllm_config, state.engine_client.get_tokenizer()
    facts = ServerFacts(
        reuses=config.parallel_config.worker_cls == FIXED_OPTIONS["worker_cls"],
        block_size=config.cache_config.block_size,
        vocab_size=config.model_config.get_vocab_size(),
        scheduling_policy=config.scheduler_config.policy,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        unk_token_id=tokenizer.unk_token_id,
        has_chat_template=bool(_template(state) or tokenizer.chat_template),
        opening_ids=tuple(tokenizer.encode("", add_special_tokens=True)),
        added_tokens={
            index: (token.content, token.special)
            for index, token in tokenizer.added_tokens_decoder.items()
        },
    )
    return JSONResponse(facts.to_dict())


async def _render(request: Request) -> Response:
    """Render a conversation as the server itself would: its template and defaults."""
    state = request.app.state
    try:
        content = await request.json()
        # Nobody may bring a template, or anything else that has code in it.
        if not content.keys() <= _RENDERED:
            raise ValueError(f"only {', '.join(sorted(_RENDERED))} can be rendered")
        defaults = state.online_renderer.default_chat_template_kwargs
        ours = {"chat_template": _template(state), "tokenize": False}
        text = state.engine_client.get_tokenizer().apply_chat_template(
            content.pop("messages"), **{**defaults, **content, **ours}
        )
    except Exception as error:  # Jinja's own: a template may refuse what it is given.
        return JSONResponse({"error": str(error) or type(error).__name__})
    return JSONResponse({"text": text})


def _template(state: Any) -> str | None:
    """Return the template of ``--chat-template``, which overrules the model's own."""
    template: str | None = state.online_renderer.chat_template
    return template
