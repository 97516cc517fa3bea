"""A conversation as it is handed to a chat template: with signs where it can be cut.

What people wrote for the model to read goes in as follows::

    user, tool result, anything    one sign; the text itself never meets the template,
    with documents                 but where that escapes what it gets: then the text
                                   stands between two signs
    system, assistant              the text, a sign at its end: templates look into
                                   both (to take out old reasoning, for instance)
    tool calls, tools              their fields, a sign before the name

Signs are letters only, all different, and occur in none of the texts. Control tokens
that a text forges are marked for cutting, see `TextEncoder.guarded`; but in an
assistant's text the template finds the tags that it looks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from daric_rag.chat_template import ChatTemplate
from daric_rag.errors import PromptError
from daric_rag.prompt_types import ChatMessage, DocumentPart
from daric_rag.tokenization import BREAK, TextEncoder, set_apart

__all__ = ["Kind", "Part", "Sign", "Skeleton", "join_parts"]

Part = str | DocumentPart
Kind = Literal["content", "start", "end", "call", "tool"]

_TO_LETTERS = str.maketrans("0123456789", "abcdefghij")
_TO_DIGITS = str.maketrans("abcdefghij", "0123456789")


@dataclass(frozen=True, slots=True)
class Sign:
    """What stands where a sign was written.

    Attributes:
        number: Tells it from all others of the conversation.
        kind: ``"content"`` stands for a message's parts; ``"start"`` and ``"end"`` are
            before and behind a text; ``"call"`` and ``"tool"`` are before a name.
        index: Of the message, or of the tool.
        role: Of the message; ``"tool"`` for a tool.
        parts: What a content stands for.
        text: What an end is behind, a tool's name, or "".
        leads: Whether this is the system text, or begins with it.
    """

    number: int
    kind: Kind
    index: int
    role: str
    parts: tuple[Part, ...] = ()
    text: str = ""
    leads: bool = False


class Skeleton:
    """What a template is to render, and what its signs stand for.

    Args:
        messages: The conversation.
        tools: Their descriptions.
        template: Of the model; nothing is rendered in full here.
        encoder: Of the model.
        spared: Tags to be left in an assistant's text.

    Attributes:
        cut: Marks where forged control tokens are cut.
        messages: For the template.
        tools: For the template.
        signs: By their number.

    Raises:
        PromptError: There is no place for the system text.
    """

    def __init__(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        template: ChatTemplate,
        encoder: TextEncoder,
        spared: frozenset[str] = frozenset(),
    ) -> None:
        """Write every message and tool as the template is to see it."""
        self._template = template
        self._encoder = encoder
        self._spared = spared
        self._stem = _free_stem(messages, tools)
        self.cut = f"{self._stem}Z"
        self.signs: list[Sign] = []
        self.tools = [self._tool(index, tool) for index, tool in enumerate(tools)]
        self.messages: list[dict[str, Any]] = []
        pending: tuple[Part, ...] = ()
        leading = True
        for index, message in enumerate(messages):
            leading = leading and message.role == "system"
            if leading and not template.has_system_role:
                pending = join_parts([*pending, *message.parts()])
            elif pending and message.role == "user":
                self.messages.append(self._message(index, message, pending))
                pending = ()
            else:
                self.messages.append(self._message(index, message))
        if pending:
            raise PromptError(
                "the chat template knows no system role, and there is no user message "
                "to put the system text into; add one"
            )

    def split(self, text: str) -> tuple[str, list[tuple[Sign, str]]]:
        """Return a rendering's beginning, and every sign with the text behind it.

        Raises:
            PromptError: There are signs that were never written.
        """
        first, *rest = re.split(f"{self._stem}([a-j]+)Z", text)
        numbers = [int(letters.translate(_TO_DIGITS)) for letters in rest[::2]]
        if any(number >= len(self.signs) for number in numbers):
            raise PromptError(
                "the chat template changes letters of its input, so that nothing tells "
                "where messages are; pass TokenPrompt with your own tokenisation"
            )
        found = [self.signs[number] for number in numbers]
        return first, list(zip(found, rest[1::2], strict=True))

    def _message(
        self, index: int, message: ChatMessage, system: tuple[Part, ...] = ()
    ) -> dict[str, Any]:
        """Write a message; it begins with a system text that has no other place."""
        made: dict[str, Any] = {"role": message.role}
        made["content"] = self._content(index, message, system)
        if message.tool_calls:
            made["tool_calls"] = [self._call(index, c) for c in message.tool_calls]
        for name in ("tool_call_id", "name"):
            if getattr(message, name) is not None:
                made[name] = self._guarded(getattr(message, name))
        return made

    def _content(
        self, index: int, message: ChatMessage, system: tuple[Part, ...]
    ) -> str:
        role, parts, opening = message.role, join_parts(message.parts()), ""
        leads = role == "system" and not self.messages
        if any(isinstance(part, DocumentPart) for part in system):
            parts, leads = join_parts([*system, *parts]), True
        elif system:
            opening = self._text(index, "system", "".join(map(str, system)) + BREAK)
        if role != "assistant" and self._template.trims(role):
            parts = _trimmed(parts, inside=bool(opening))
        has_documents = any(isinstance(part, DocumentPart) for part in parts)
        if has_documents or role in ("user", "tool"):
            if self._template.keeps(role):
                return opening + self._sign("content", index, role, parts, leads=leads)
            if has_documents:
                raise PromptError(
                    f"the chat template escapes what a {role} message says, so that "
                    f"message {index} cannot hold documents; put them into a user "
                    f"message"
                )
        text = "".join(map(str, parts))
        if role in ("system", "assistant"):
            return opening + self._text(index, role, text)
        start = self._sign("start", index, role)
        written = self._encoder.guarded(text, self.cut)
        return f"{opening}{start}{written}{self._sign('end', index, role)}"

    def _text(self, index: int, role: str, text: str) -> str:
        """Return a text for the template to see, with a sign at its end."""
        bare = text.rstrip()
        spared = self._spared if role == "assistant" else ()
        written = self._encoder.guarded(bare, self.cut, spared)
        if not written:
            return text
        sign = self._sign("end", index, role, text=written)
        return f"{written}{sign}{text[len(bare) :]}"

    def _tool(self, index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
        # In one order, so that a tool has one hash. vLLM's server uses the same.
        made = _ordered(_plain(tool), ("type", "function"))
        made["function"] = _ordered(
            made["function"], ("name", "description", "parameters")
        )
        sign = self._sign("tool", index, "tool", text=made["function"]["name"])
        return self._named(made, sign)

    def _call(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        made = _plain(call)
        arguments = made["function"].get("arguments")
        if isinstance(arguments, str):
            made["function"]["arguments"] = _parsed(arguments)
        return self._named(made, self._sign("call", index, "assistant"))

    def _named(self, function: dict[str, Any], sign: str) -> dict[str, Any]:
        """Return a tool or a call for the template to write, a sign before its name."""
        guarded: dict[str, Any] = self._guarded(function)
        guarded["function"]["name"] = sign + guarded["function"]["name"]
        return guarded

    def _sign(
        self,
        kind: Kind,
        index: int,
        role: str,
        parts: tuple[Part, ...] = (),
        *,
        text: str = "",
        leads: bool = False,
    ) -> str:
        number = len(self.signs)
        self.signs.append(Sign(number, kind, index, role, parts, text, leads))
        return f"{self._stem}{str(number).translate(_TO_LETTERS)}Z"

    def _guarded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._encoder.guarded(value, self.cut)
        if isinstance(value, list):
            return [self._guarded(entry) for entry in value]
        if isinstance(value, dict):
            return {self._guarded(k): self._guarded(v) for k, v in value.items()}
        return value


def join_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return parts with neighbouring texts joined, each set apart from the next."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = set_apart(last) + part
        else:
            joined.append(part)
    return tuple(joined)


def _trimmed(parts: tuple[Part, ...], *, inside: bool) -> tuple[Part, ...]:
    """Take white space off both ends, as the template would; documents keep theirs.

    Args:
        parts: A message's.
        inside: Whether something stands before them in the message.
    """
    trimmed = list(parts)
    if trimmed and isinstance(trimmed[0], str) and not inside:
        trimmed[0] = trimmed[0].lstrip()
    if trimmed and isinstance(trimmed[-1], str):
        trimmed[-1] = trimmed[-1].rstrip()
    return tuple(trimmed)


def _free_stem(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
) -> str:
    """Return letters that no text has which the template will see."""
    texts = [_dumped(list(tools))]
    for message in messages:
        texts += [str(part) for part in message.parts() if isinstance(part, str)]
        texts += [message.name or "", message.tool_call_id or ""]
        texts.append(_dumped(list(message.tool_calls)))
    stem = "Qdaric"
    while any(stem in text for text in texts):
        stem += "k"
    return stem


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(value))
    return copied


def _parsed(arguments: str) -> object:
    """Return a call's arguments as templates expect them: an object, if they are."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _ordered(mapping: dict[str, Any], first: Sequence[str]) -> dict[str, Any]:
    return {name: mapping[name] for name in first if name in mapping} | mapping
