"""Which documents come into a prompt: reports, ranks, and how many fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

from daric_rag.document_text import score_of
from daric_rag.errors import PromptError, PromptTooLongError
from daric_rag.prompt_types import (
    ChatMessage,
    ChatPrompt,
    ChunkedPrompt,
    DocumentPart,
    shown_type,
)

__all__ = [
    "BuiltPrompt",
    "DroppedDocument",
    "Message",
    "Reason",
    "Selection",
    "listed",
    "messages_of",
    "most_that_fit",
    "ranked_first",
]

Reason = Literal["empty", "duplicate", "max_documents", "max_prompt_tokens"]


class ForeignMessage(Protocol):
    """A message of LangChain (with ``type``) or LlamaIndex (with ``role``)."""

    @property
    def content(self) -> Any:
        """Text, or parts."""
        ...


Message = ChatMessage | Mapping[str, Any] | tuple[str, str] | ForeignMessage

# As OpenAI and LangChain name them.
_ROLES = {"developer": "system", "human": "user", "ai": "assistant"}

# Of OpenAI's and vLLM's answers; no template reads them in an earlier turn.
_UNREAD = ("annotations", "refusal", "reasoning", "reasoning_content")

# Beyond these, a search by halves: documents of very different density mislead it.
_MAX_GUESSES = 3


@dataclass(frozen=True, slots=True)
class DroppedDocument:
    """A document that is not in the prompt.

    Attributes:
        index: Among those given.
        title: What the store's listing would call it.
        reason: ``"empty"``; ``"duplicate"`` of an earlier one; ``"max_documents"``:
            beyond the builder's; ``"max_prompt_tokens"``: did not fit.
    """

    index: int
    title: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt, and what became of each document.

    Attributes:
        prompt: For the engine.
        kept: Indices of the documents in the prompt, in prompt order.
        dropped: The others, by index.
    """

    prompt: ChunkedPrompt | ChatPrompt
    kept: tuple[int, ...]
    dropped: tuple[DroppedDocument, ...] = ()

    @property
    def turn(self) -> ChatMessage:
        """The user's message with its documents, for the next prompt's history."""
        if isinstance(self.prompt, ChatPrompt):
            return self.prompt.messages[-1]
        return self.prompt.messages()[-1]


@dataclass(frozen=True, slots=True)
class Selection:
    """Documents as they stand in a prompt, and which do.

    Attributes:
        parts: Of every document given.
        kept: By index, in prompt order.
        dropped: Why the others are not, by index.
    """

    parts: list[DocumentPart]
    kept: dict[int, DocumentPart]
    dropped: dict[int, Reason]

    def add(self, part: DocumentPart, reason: Reason | None) -> None:
        """Take the next document in, or note why it is dropped."""
        if reason is None:
            self.kept[len(self.parts)] = part
        else:
            self.dropped[len(self.parts)] = reason
        self.parts.append(part)

    def only(self, indices: Collection[int]) -> Selection:
        """Return the selection without the others, which do not fit."""
        kept = {index: part for index, part in self.kept.items() if index in indices}
        late: dict[int, Reason] = {
            index: "max_prompt_tokens" for index in self.kept if index not in indices
        }
        return Selection(self.parts, kept, {**self.dropped, **late})

    def report(self) -> tuple[DroppedDocument, ...]:
        """Return the dropped documents, by index."""
        return tuple(
            DroppedDocument(index, self.parts[index].title, reason)
            for index, reason in sorted(self.dropped.items())
        )


def listed(documents: Sequence[Any]) -> Sequence[Any]:
    """Return the documents; refuse what is no list of them.

    Raises:
        PromptError: So it is.
    """
    if isinstance(documents, str | Mapping) or not isinstance(documents, Sequence):
        raise PromptError(
            f"documents is a {type(documents).__name__}; pass a list of documents"
        )
    return documents


def messages_of(history: Sequence[Message]) -> list[ChatMessage]:
    """Return a history in whatever form as messages.

    Raises:
        PromptError: An entry is no message.
    """
    messages = []
    for index, message in enumerate(history):
        try:
            messages.append(
                message
                if isinstance(message, ChatMessage)
                else ChatMessage(**_fields_of(message))
            )
        except (TypeError, ValueError) as error:
            raise PromptError(
                f"history[{index}] is no message ({error}); pass ChatMessage, a dict "
                f"of its fields, a pair of role and text, or a message of LangChain or "
                f"LlamaIndex"
            ) from error
    return messages


def ranked_first(
    kept: Mapping[int, DocumentPart],
    documents: Sequence[Any],
    scores: Sequence[float] | None,
) -> list[int]:
    """Return the kept documents' indices, best first."""
    own = {index: score_of(documents[index]) for index in kept}
    if scores is not None:
        own = {index: scores[index] for index in kept}
    known = {index: score for index, score in own.items() if score is not None}
    if len(known) < len(own):
        return list(kept)
    return sorted(kept, key=lambda index: -known[index])


def most_that_fit(
    num_chars: Sequence[int], limit: int, count: Callable[[int], int], fewest: int
) -> int:
    """Return how many documents fit, from the front.

    Lengths add up, so characters tell where the limit lies between two counts.

    Args:
        num_chars: Of every document.
        limit: Most tokens.
        count: Tokens with the first n documents.
        fewest: Documents that there must be.

    Raises:
        PromptTooLongError: Not even the fewest fit.
    """
    upper, upper_len = len(num_chars), count(len(num_chars))
    if upper_len <= limit:
        return upper
    lower, lower_len = fewest, count(fewest) if fewest < upper else upper_len
    if lower_len > limit:
        raise PromptTooLongError(lower_len, limit)
    chars = [0, *accumulate(num_chars)]
    guesses = 0
    while upper - lower > 1:
        share = (limit - lower_len) / max(upper_len - lower_len, 1)
        reached = chars[lower] + share * (chars[upper] - chars[lower])
        guess = bisect_right(chars, reached) - 1
        guess = min(max(guess, lower + 1), upper - 1)
        if guesses >= _MAX_GUESSES:
            guess = (lower + upper) // 2
        guesses += 1
        guess_len = count(guess)
        if guess_len <= limit:
            lower, lower_len = guess, guess_len
        else:
            upper, upper_len = guess, guess_len
    return lower


def _fields_of(message: Any) -> dict[str, Any]:
    """Return a `ChatMessage`'s fields; those that no template reads are dropped."""
    if isinstance(message, tuple | list):
        role, text = message
        message = {"role": role, "content": text}
    elif not isinstance(message, Mapping):
        message = _foreign(message)
    fields = {
        name: value
        for name, value in message.items()
        if value is not None and name not in _UNREAD
    }
    fields["role"] = _ROLES.get(fields.get("role", ""), fields.get("role"))
    content = message.get("content")
    fields["content"] = _content(message.get("refusal") if content is None else content)
    return fields


def _foreign(message: Any) -> dict[str, Any]:
    """Return the fields of a framework's message, known by its attributes."""
    role = getattr(message, "role", None) or getattr(message, "type", None)
    if role is None or not hasattr(message, "content"):
        raise TypeError(f"{shown_type(message)} has no role or no content")
    role = str(getattr(role, "value", role))
    # LlamaIndex's content is the text among its blocks; the others are then refused.
    blocks = getattr(message, "blocks", None) or ()
    has_text = all(hasattr(block, "text") for block in blocks)
    more = getattr(message, "additional_kwargs", None) or {}
    calls = getattr(message, "tool_calls", None) or more.get("tool_calls")
    named = ("tool_call_id", "name")
    return {
        "role": role.removesuffix("MessageChunk").lower(),
        "content": message.content if has_text else blocks,
        "tool_calls": [_call(call) for call in calls or ()] or None,
    } | {name: getattr(message, name, None) or more.get(name) for name in named}


def _call(call: Any) -> Any:
    """Return a tool call in OpenAI's form, from that or LangChain's."""
    if not isinstance(call, Mapping):
        return call.model_dump() if hasattr(call, "model_dump") else call
    if "function" in call or "args" not in call:
        return call
    function = {"name": call.get("name"), "arguments": call["args"]}
    return {"id": call.get("id"), "type": "function", "function": function}


def _content(content: Any) -> Any:
    """Return a message's content as OpenAI's clients write it: null, or typed parts."""
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        return content
    return [
        part["text"] if isinstance(part, Mapping) and "text" in part else part
        for part in content
    ]
