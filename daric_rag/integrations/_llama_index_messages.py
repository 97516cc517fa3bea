"""LlamaIndex's messages as a prompt: texts, documents and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    DocumentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from daric_rag import engine
from daric_rag.engine import ChatPrompt, DocumentPart
from daric_rag.errors import PromptError
from daric_rag.prompt_types import Role

__all__ = ["chat_prompt", "document_block"]

_ROLES: dict[MessageRole, Role] = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}

# No template reads an earlier turn's thoughts, and every chunk is cached as it is.
_UNREAD = (ThinkingBlock, CachePoint)

# LlamaIndex's title of a `DocumentBlock` that was given none.
_NO_TITLE = "input_document"


def chat_prompt(
    messages: Sequence[ChatMessage], tools: Sequence[Any] = ()
) -> ChatPrompt:
    """Return a conversation whose documents are chunks of their own.

    Args:
        messages: Of any role. A `DocumentBlock` of text or a `CitableBlock` is a
            document; texts that follow each other are joined by a newline, as in
            `ChatMessage.content`.
        tools: Tools of LlamaIndex, or their descriptions in OpenAI's form.

    Raises:
        PromptError: A block is neither text nor document, or the conversation cannot
            be answered.
    """
    described = [_description(tool) for tool in tools]
    return ChatPrompt([_message(i, m) for i, m in enumerate(messages)], described)


def document_block(part: DocumentPart) -> CitableBlock:
    """Return the block that `chat_prompt` makes that very document of."""
    return CitableBlock(
        title=part.title, source="", content=[TextBlock(text=part.text)]
    )


def _message(index: int, message: ChatMessage) -> engine.ChatMessage:
    if not isinstance(message, ChatMessage):
        raise PromptError(
            f"message {index} is a {type(message).__name__}; pass LlamaIndex's "
            f"ChatMessage"
        )
    parts: list[str | DocumentPart] = []
    calls: list[Mapping[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            _append_text(parts, block.text)
        elif isinstance(block, DocumentBlock | CitableBlock):
            parts.append(_document(f"message {index}", block))
        elif isinstance(block, ToolCallBlock):
            calls.append(_call(block))
        elif not isinstance(block, _UNREAD):
            raise _unreadable(f"message {index}", block)
    more = message.additional_kwargs
    return engine.ChatMessage(
        _ROLES[message.role],
        parts,
        tool_calls=calls or [_plain(call) for call in more.get("tool_calls") or ()],
        tool_call_id=more.get("tool_call_id"),
        name=more.get("name"),
    )


def _append_text(parts: list[str | DocumentPart], text: str) -> None:
    last = parts[-1] if parts else None
    if isinstance(last, str):
        parts[-1] = f"{last}\n{text}"
    else:
        parts.append(text)


def _document(name: str, block: DocumentBlock | CitableBlock) -> DocumentPart:
    if isinstance(block, DocumentBlock):
        title = "" if block.title in (None, _NO_TITLE) else str(block.title)
        return DocumentPart(_text_of(name, block), title)
    texts = []
    for inner in block.content:
        if isinstance(inner, TextBlock):
            texts.append(inner.text)
        elif isinstance(inner, DocumentBlock):
            texts.append(_text_of(name, inner))
        else:
            raise _unreadable(name, inner)
    return DocumentPart("\n".join(texts), block.title)


def _text_of(name: str, block: DocumentBlock) -> str:
    """Return a document's text; nothing is fetched and no format is parsed."""
    kind = block.document_mimetype
    if block.url is not None or (kind is not None and not kind.startswith("text/")):
        raise PromptError(
            f"{name} has a DocumentBlock that is no local text; read its text with a "
            f"reader of LlamaIndex, and pass that"
        )
    try:
        return block.resolve_document().read().decode()
    except (ValueError, OSError) as error:
        raise PromptError(
            f"{name} has a DocumentBlock that cannot be read as UTF-8 text ({error}); "
            f"read its text with a reader of LlamaIndex, and pass that"
        ) from error


def _unreadable(name: str, block: object) -> PromptError:
    return PromptError(
        f"{name} has a {type(block).__name__}; the engine reads text, documents and "
        f"tool calls only"
    )


def _call(block: ToolCallBlock) -> dict[str, Any]:
    function = {"name": block.tool_name, "arguments": block.tool_kwargs}
    return {"id": block.tool_call_id, "type": "function", "function": function}


def _plain(call: Any) -> Any:
    """Return a tool call as a mapping, also that of OpenAI's client."""
    return call.model_dump() if hasattr(call, "model_dump") else call


def _description(tool: Any) -> Any:
    metadata = getattr(tool, "metadata", None)
    if metadata is None:
        return tool
    # The limit on a description's length is OpenAI's.
    return metadata.to_openai_tool(skip_length_check=True)
