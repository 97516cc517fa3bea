"""Tools of a chat: how the model is told of them, and how its calls are read. Pure.

Two forms exist. Models whose chat template has tools are told by it, and answer in the
form they were trained for. To all others the tools are described in the system text,
each a document and so a chunk of its own, with the commonest of these forms::

    <tool_call>
    {"name": "search", "arguments": {"query": "mills"}}
    </tool_call>

Where a call is asked for, decoding is guided and the answer is such a JSON object
alone, whatever the model was trained for. Read are both, whoever wrote them; what is no
whole call stays text.

A model whose template has another form is read by vLLM's parser for its family, where
that is named (`ParsedCalls`); or it is asked for calls (``tool_choice="any"``), or told
of its tools as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from daric_rag.engine import ChatMessage, DocumentPart
from daric_rag.errors import ConfigError

__all__ = [
    "AnswerReader",
    "CallReader",
    "ParsedCalls",
    "ToolCall",
    "call_schema",
    "call_tags",
    "chosen_tools",
    "with_tools_as_text",
]

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"

_INTRODUCTION = f"""You can call functions. To call one, write its name and its \
arguments as JSON between tags:
{_OPENING}
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
{_CLOSING}

The functions:"""

Tool = Mapping[str, Any]
"""A tool's description in OpenAI's form."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call.

    Attributes:
        name: Of the tool.
        arguments: JSON of an object.
    """

    name: str
    arguments: str

    def parsed(self) -> dict[str, Any]:
        """Return the arguments."""
        arguments: dict[str, Any] = json.loads(self.arguments)
        return arguments


def chosen_tools(tools: Sequence[Tool], choice: str) -> list[Tool]:
    """Return the tools of which one must be called; none if that is up to the model.

    Args:
        tools: Those that are bound.
        choice: ``"auto"``, ``"none"``, ``"any"``, ``"required"`` or a tool's name.

    Raises:
        ConfigError: There is no such tool.
    """
    if choice in ("auto", "none"):
        return []
    chosen = [
        tool
        for tool in tools
        if choice in ("any", "required") or _function(tool)["name"] == choice
    ]
    if not chosen:
        names = ", ".join(_function(tool)["name"] for tool in tools)
        raise ConfigError(
            f"tool_choice is {choice!r}; it must be auto, any, none or one of the "
            f"bound tools ({names or 'there are none'})"
        )
    return chosen


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the JSON schema of a call to one of the tools.

    Raises:
        ConfigError: A tool's own schema cannot be part of another.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for index, tool in enumerate(tools):
        arguments, own = _lifted(_arguments_schema(tool), f"tool{index}_")
        definitions |= own
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": _function(tool)["name"]},
                    "arguments": arguments,
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": definitions} if definitions else schema


def call_tags(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the structural tag that keeps calls whole and their arguments valid."""
    tags = [
        {
            "begin": f'{_OPENING}\n{{"name": {json.dumps(_function(tool)["name"])}, '
            f'"arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": _arguments_schema(tool),
            },
            "end": f"}}\n{_CLOSING}",
        }
        for tool in tools
    ]
    tagged = {"type": "triggered_tags", "triggers": [_OPENING], "tags": tags}
    return {"type": "structural_tag", "format": tagged}


def with_tools_as_text(
    messages: Sequence[ChatMessage], tools: Sequence[Tool]
) -> list[ChatMessage]:
    """Return a conversation for templates without tools.

    Tools are documents at the end of the system text, earlier calls are text, and their
    results are what the user says.
    """
    written: list[ChatMessage] = []
    last_role = ""
    for message in messages:
        text = _as_text(message)
        if last_role == message.role == "tool":
            # Many templates want the roles to take turns.
            before = written.pop()
            text = replace(before, content=(*before.parts(), *text.parts()))
        written.append(text)
        last_role = message.role
    if not tools:
        return written
    parts: list[str | DocumentPart] = [_INTRODUCTION]
    for tool in tools:
        function = _function(tool)
        parts.append(DocumentPart(_dumped(dict(function)), f"tool {function['name']}"))
    if written and written[0].role == "system":
        parts = [*written[0].parts(), *parts]
        del written[0]
    return [ChatMessage("system", parts), *written]


class AnswerReader(Protocol):
    """Splits one answer into text and calls."""

    def feed(
        self, piece: str, token_ids: Sequence[int] = ()
    ) -> Iterator[str | ToolCall]:
        """Take the answer's next piece; yield what is sure by now."""
        ...

    def finish(self) -> Iterator[str | ToolCall]:
        """Yield what is left at the answer's end."""
        ...

    def read(self, text: str) -> Iterator[str | ToolCall]:
        """Take a whole answer, instead of pieces, and yield what it is."""
        ...


class CallReader:
    """Splits an answer, piece by piece, into text and calls.

    Args:
        is_call: Whether the whole answer is the JSON of a call.
        names: Of the bound tools: JSON of another shape stays text.
    """

    def __init__(self, *, is_call: bool, names: Sequence[str]) -> None:
        """Wait for the first piece."""
        self._is_call = is_call
        self._names = frozenset(names)
        self._held = ""

    def feed(
        self, piece: str, token_ids: Sequence[int] = ()
    ) -> Iterator[str | ToolCall]:
        """Take the answer's next piece; yield what is sure by now.

        What may be the beginning of a call is held back.
        """
        self._held += piece
        while self._names and not self._is_call:
            start = self._held.find(_OPENING)
            if start < 0:
                start = len(self._held) - _overlap(self._held, _OPENING)
            if start:
                text, self._held = self._held[:start], self._held[start:]
                yield text
            end = self._held.find(_CLOSING)
            if not self._held.startswith(_OPENING) or end < 0:
                return
            end += len(_CLOSING)
            call, self._held = self._held[:end], self._held[end:]
            yield _call(call[len(_OPENING) : -len(_CLOSING)], self._names) or call
        if not self._names and self._held:
            text, self._held = self._held, ""
            yield text

    def finish(self) -> Iterator[str | ToolCall]:
        """Yield what is left at the answer's end."""
        held, self._held = self._held, ""
        if held:
            yield _call(held.removeprefix(_OPENING), self._names) or held

    def read(self, text: str) -> Iterator[str | ToolCall]:
        """Take a whole answer, instead of pieces, and yield what it is."""
        yield from self.feed(text)
        yield from self.finish()


class ParsedCalls:
    """Splits an answer as an engine's own parser does.

    Args:
        reader: The engine's ``tool_reader``.
    """

    def __init__(self, reader: Any) -> None:
        """Wait for the first piece."""
        self._reader = reader

    def feed(
        self, piece: str, token_ids: Sequence[int] = ()
    ) -> Iterator[str | ToolCall]:
        """Take the answer's next piece; yield its text. Calls come at the end."""
        text = self._reader.feed(piece, token_ids)
        if text:
            yield text

    def finish(self) -> Iterator[str | ToolCall]:
        """Yield what is left at the answer's end."""
        yield from _parts(*self._reader.finish())

    def read(self, text: str) -> Iterator[str | ToolCall]:
        """Take a whole answer, instead of pieces, and yield what it is."""
        yield from _parts(*self._reader.read(text))


def _parts(text: str, calls: Sequence[tuple[str, str]]) -> Iterator[str | ToolCall]:
    if text:
        yield text
    for name, arguments in calls:
        yield _parsed_call(name, arguments)


def _parsed_call(name: str, arguments: str) -> str | ToolCall:
    """Return a call, or its text where a model wrote no object of arguments."""
    try:
        is_whole = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_whole = False
    return ToolCall(name, arguments) if is_whole else f"{name}({arguments})"


def _call(text: str, names: frozenset[str]) -> ToolCall | None:
    """Return a call; None if the text is no whole one."""
    try:
        call = json.loads(text)
        name = call["name"]
        arguments = call["arguments"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or name not in names:
        return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, _dumped(arguments))


def _as_text(message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        parts = ("<tool_response>", *message.parts(), "</tool_response>")
        return ChatMessage("user", parts)
    if not message.tool_calls:
        return message
    calls = [
        f"{_OPENING}\n{_dumped(_called(c))}\n{_CLOSING}" for c in message.tool_calls
    ]
    return replace(message, content=(*message.parts(), *calls), tool_calls=())


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        # Else they are a model's own words, which were no JSON.
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}


def _function(tool: Tool) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool["function"]
    return function


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    schema = dict(_function(tool).get("parameters") or {})
    # An empty one allows any JSON, and arguments are an object's.
    return {"type": "object", "properties": {}} | schema


def _lifted(schema: dict[str, Any], prefix: str) -> tuple[Any, dict[str, Any]]:
    """Return a schema without its definitions, and those, under names of its own.

    References count from the root of the schema that it becomes a part of.
    """
    own = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    text = json.dumps({k: v for k, v in schema.items() if k not in own})
    defined = json.dumps(
        {prefix + k: v for group in own.values() for k, v in group.items()}
    )
    if '"$ref": "#"' in text + defined:
        raise ConfigError(
            'a tool\'s schema refers to itself as "#"; give it a name under "$defs"'
        )
    for group in own:
        text = text.replace(f'"#/{group}/', f'"#/$defs/{prefix}')
        defined = defined.replace(f'"#/{group}/', f'"#/$defs/{prefix}')
    return json.loads(text), json.loads(defined)


def _overlap(text: str, tag: str) -> int:
    """Return how many of the text's last characters may begin the tag."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(tag[:n])), 0)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
