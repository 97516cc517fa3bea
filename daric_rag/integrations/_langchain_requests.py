"""From LangChain's call to an engine's request: prompt, options, and how it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import PrivateAttr

from daric_rag.engine import ChatMessage, ChatPrompt, Engine, GenerationOptions
from daric_rag.errors import ConfigError, PromptError, PromptTooLongError
from daric_rag.integrations._langchain_fields import ChatFields
from daric_rag.integrations._langchain_messages import as_user, conversation_of
from daric_rag.integrations._langchain_results import PROVIDER, AnswerForm
from daric_rag.integrations._tool_calls import (
    call_schema,
    call_tags,
    chosen_tools,
    with_tools_as_text,
)

__all__ = ["ChatRequests", "tool_choice_of"]

_GUIDES = ("json_schema", "json_object", "regex", "choice", "structural_tag")

_PROBE = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}


class ChatRequests(ChatFields):
    """What every call of a `ChatDaric` begins with."""

    _has_template: bool | None = PrivateAttr(default=None)

    def _model_name(self, engine: Engine | None = None) -> str:
        engine = engine or self.engine
        named = self.model or getattr(engine, "model_path", None)
        return str(named or getattr(engine, "model", None) or self.base_url or PROVIDER)

    def _request(
        self,
        engine: Engine,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        kwargs: Mapping[str, Any],
        *,
        is_streamed: bool = False,
    ) -> tuple[ChatPrompt, dict[str, Any], AnswerForm]:
        """Return a request's prompt, its options, and how to read its answer."""
        given = dict(kwargs)
        given.pop("stream", None)  # It brought the request here.
        tools = list(given.pop("tools", None) or ())
        choice = tool_choice_of(given.pop("tool_choice", None), self.tool_choice)
        if "model" in given and given.pop("model") != self.model:
            raise ConfigError(
                "a request cannot have another model; make another ChatDaric"
            )
        if choice == "none":
            tools = []
        options = self._options(given, stop, is_streamed)
        chosen = chosen_tools(tools, choice) if tools else []
        conversation = conversation_of(messages, self._settings.delimiter)
        as_text = _needs_tools(tools, conversation) and self._as_text(engine)
        options |= _guide(options, tools, chosen, as_text)
        names = [tool["function"]["name"] for tool in tools]
        form = AnswerForm(self._model_name(engine), bool(chosen), names)
        if self.tool_parser is not None and tools and not (chosen or as_text):
            make_parser = partial(_parser, engine, self.tool_parser, tools)
            form = replace(form, make_parser=make_parser)
            # A call's markers may be special tokens.
            options["skip_special_tokens"] = make_parser().skip_special_tokens
        if as_text:
            conversation, tools = with_tools_as_text(conversation, tools), []
        return ChatPrompt(conversation, tools=tools), options, form

    async def _arequest(
        self,
        engine: Engine,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        kwargs: Mapping[str, Any],
        *,
        is_streamed: bool = False,
    ) -> tuple[ChatPrompt, dict[str, Any], AnswerForm]:
        """Do the same, without keeping the event loop waiting for the probe."""
        make = partial(
            self._request, engine, messages, stop, kwargs, is_streamed=is_streamed
        )
        asks = self.tool_format == "auto" and self._has_template is None
        # A parser's first use imports vLLM.
        asks = asks or self.tool_parser is not None
        has_tools = kwargs.get("tools") or any(
            isinstance(message, ToolMessage) or getattr(message, "tool_calls", ())
            for message in messages
        )
        return await asyncio.to_thread(make) if asks and has_tools else make()

    def _options(
        self, given: dict[str, Any], stop: list[str] | None, is_streamed: bool
    ) -> dict[str, Any]:
        known = GenerationOptions.__dataclass_fields__
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(
                f"{', '.join(map(repr, unknown))} cannot be passed to ChatDaric; "
                f"known: {', '.join(known)}, tools, tool_choice"
            )
        options = {**self._own_options(), **given}
        if stop is not None:
            options["stop"] = stop
        if is_streamed and options["n"] != 1:
            raise ConfigError(
                f"n is {options['n']}, and only one answer can be streamed; pass n=1, "
                f"or use invoke, batch or generate"
            )
        return options

    def _as_text(self, engine: Engine) -> bool:
        """Return whether tools are described in the system text."""
        if self.tool_format != "auto":
            return self.tool_format == "text"
        if self._has_template is None:
            try:
                engine.layout(ChatPrompt([ChatMessage("user", "-")], tools=[_PROBE]))
                self._has_template = True
            except PromptError:
                self._has_template = False
        return not self._has_template

    def get_num_tokens_from_messages(
        self,
        messages: Sequence[BaseMessage],
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> int:
        """Return the length of these messages' prompt, in tokens.

        Messages that are no whole conversation, as `trim_messages` counts them, are
        counted one by one, each as a user's.
        """
        if not messages:
            return 0
        described = [convert_to_openai_tool(tool) for tool in tools or ()]
        given = {**kwargs, "tools": described}
        try:
            return self._prompt_len(messages, given)
        except PromptTooLongError:
            raise
        except PromptError:
            alone = [as_user(message) for message in messages]
        lens = []
        for message in alone:
            if message.content or message.additional_kwargs:
                lens.append(self._prompt_len([message], given))
                given["tools"] = []
        return sum(lens)

    def _prompt_len(
        self, messages: Sequence[BaseMessage], given: Mapping[str, Any]
    ) -> int:
        engine = self._engine_source().get()
        prompt, _, _ = self._request(engine, messages, None, given)
        return engine.layout(prompt).prompt_len

    def get_token_ids(self, text: str) -> list[int]:
        """Return a text's tokens, without special ones around them.

        Raises:
            ConfigError: The engine has no tokenizer.
        """
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        engine = self._engine_source().get()
        encode = getattr(getattr(engine, "tokenizer", None), "encode", None)
        if encode is None:
            raise ConfigError(
                f"the engine, a {type(engine).__name__}, has no tokenizer; pass "
                f"custom_get_token_ids="
            )
        return list(encode(text, add_special_tokens=False))


def _parser(engine: Engine, name: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    make = getattr(engine, "tool_reader", None)
    if make is None:
        raise ConfigError(
            f"tool_parser is {name!r}, and the engine, a {type(engine).__name__}, has "
            f"no parsers; leave tool_parser out"
        )
    return make(name, tools)


def _guide(
    options: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    chosen: Sequence[Mapping[str, Any]],
    as_text: bool,
) -> dict[str, Any]:
    """Return what guides decoding so that calls are valid."""
    own = [name for name in _GUIDES if options.get(name) not in (None, False)]
    if own and chosen:
        raise ConfigError(
            f"{own[0]} and a tool call that must be made cannot be combined; pass "
            f'tool_choice="none" or "auto"'
        )
    if chosen:
        return {"json_schema": call_schema(chosen)}
    # A template's own form of calls is known to the model, and to nobody else.
    return {"structural_tag": call_tags(tools)} if tools and as_text and not own else {}


def tool_choice_of(choice: str | bool | Mapping[str, Any] | None, default: str) -> str:
    """Return a tool choice, however it is written, as `chosen_tools` takes it."""
    if choice is None:
        return default
    if isinstance(choice, bool):
        return "any" if choice else "none"
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        choice = name if isinstance(name, str) else str(dict(choice))
    return choice


def _needs_tools(tools: Sequence[Any], conversation: Sequence[ChatMessage]) -> bool:
    return bool(tools) or any(
        message.role == "tool" or message.tool_calls for message in conversation
    )
