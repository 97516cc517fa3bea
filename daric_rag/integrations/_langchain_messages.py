"""LangChain's messages to a conversation of daric_rag, and documents in them.

A document inside a message is a chunk of its own. It comes as LangChain's plain-text
block (`document_block`), or whole in ``additional_kwargs={"documents": [...]}``, in
front of the message's text, or as a piece of text between delimiters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages import ChatMessage as RoleMessage

from daric_rag.engine import ChatMessage, DocumentPart
from daric_rag.errors import PromptError
from daric_rag.layout import split_delimited
from daric_rag.prompt import PromptBuilder

__all__ = ["as_user", "conversation_of", "document_block", "langchain_messages"]

_ROLES = {"human": "user", "ai": "assistant", "developer": "system"}

# Calls are in `tool_calls` too, and no template reads an earlier turn's thoughts.
_UNREAD = (
    *("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call"),
    *("reasoning", "thinking", "redacted_thinking", "input_json_delta"),
)

_DOCUMENTS = "documents"


def document_block(text: str, title: str = "") -> dict[str, Any]:
    """Return a content block that is a chunk of its own.

    Args:
        text: Kept to the letter.
        title: What the store's listing calls it; "": how the text begins.
    """
    block = {"type": "text-plain", "mime_type": "text/plain", "text": text}
    return {**block, "title": title} if title else block


def conversation_of(
    messages: Sequence[BaseMessage], delimiter: str | None
) -> list[ChatMessage]:
    """Return LangChain's messages as those of a `ChatPrompt`.

    Args:
        messages: The conversation.
        delimiter: Splits the text of other than the model's own messages; each piece
            but the last one is a document.

    Raises:
        PromptError: A message holds something that is no text.
    """
    return [_message(index, m, delimiter) for index, m in enumerate(messages)]


def langchain_messages(messages: Sequence[ChatMessage]) -> list[BaseMessage]:
    """Return what `conversation_of` reads again; of prompts without tool calls."""
    kinds = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
    return [
        ToolMessage(_blocks(message), tool_call_id=message.tool_call_id or "")
        if message.role == "tool"
        else kinds[message.role](_blocks(message))
        for message in messages
    ]


def _blocks(message: ChatMessage) -> Any:
    if not message.has_documents:
        return "\n\n".join(str(part) for part in message.parts())
    return [
        document_block(part.text, part.title)
        if isinstance(part, DocumentPart)
        else {"type": "text", "text": part}
        for part in message.parts()
    ]


def _message(index: int, message: BaseMessage, delimiter: str | None) -> ChatMessage:
    role = message.role if isinstance(message, RoleMessage) else message.type
    role = role.removesuffix("MessageChunk").lower()
    role = _ROLES.get(role, role)
    parts: list[str | DocumentPart] = []
    documents = message.additional_kwargs.get(_DOCUMENTS)
    if documents:
        parts += PromptBuilder(dedupe=False).document_parts(documents)
    for part in _parts(index, message.content):
        if delimiter is None or role == "assistant" or isinstance(part, DocumentPart):
            parts.append(part)
        else:
            *pieces, last = split_delimited(part, delimiter) or [""]
            parts += [*map(DocumentPart, pieces), last]
    try:
        return ChatMessage(
            role,  # type: ignore[arg-type]
            parts,
            tool_calls=_calls(message),
            tool_call_id=getattr(message, "tool_call_id", None),
            name=message.name,
        )
    except PromptError as error:
        raise PromptError(f"message {index}: {error}") from error


def _parts(index: int, content: Any) -> Iterator[str | DocumentPart]:
    for block in [content] if isinstance(content, str) else content:
        if isinstance(block, str):
            yield block
            continue
        kind = block.get("type") if isinstance(block, Mapping) else None
        text = block.get("text") if isinstance(block, Mapping) else None
        if kind == "text" and isinstance(text, str):
            yield text
        elif kind == "text-plain" and isinstance(text, str):
            yield DocumentPart(text, block.get("title") or "")
        elif kind not in _UNREAD:
            raise PromptError(
                f"message {index} holds a block of type {kind!r}, and the model "
                f"reads text only; pass blocks of type text, and documents as "
                f"document_block()"
            )


def _calls(message: BaseMessage) -> tuple[dict[str, Any], ...]:
    calls = message.tool_calls if isinstance(message, AIMessage) else []
    return tuple(
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["args"]},
        }
        for call in calls
    )


def as_user(message: BaseMessage) -> HumanMessage:
    """Return a message's content as a user's; calls in it as the text they are."""
    content: list[Any] = []
    if isinstance(message.content, str):
        content += [message.content] if message.content else []
    else:
        content += message.content
    calls = getattr(message, "tool_calls", ())
    content += [
        json.dumps({"name": call["name"], "arguments": call["args"]}) for call in calls
    ]
    documents = message.additional_kwargs.get("documents")
    carried = {"documents": documents} if documents else {}
    return HumanMessage(content, additional_kwargs=carried)
