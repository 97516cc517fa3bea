"""What a prompt is made of: documents and a question, a conversation, or token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from daric_rag.config import shown
from daric_rag.document_text import text_of, title_of
from daric_rag.errors import PromptError

__all__ = [
    "ChatMessage",
    "ChatPrompt",
    "ChunkedPrompt",
    "DocumentPart",
    "Prompt",
    "Role",
    "TokenPrompt",
    "shown_type",
]

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A document: a chunk of its own wherever it stands.

    Attributes:
        text: Kept to the letter.
        title: What the store's listing calls it; "": how the text begins.

    Raises:
        PromptError: One of them is no str.
    """

    text: str
    title: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no text."""
        for name in ("text", "title"):
            _check_str(f"DocumentPart.{name}", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedPrompt:
    """Retrieved documents and a question, each document a chunk of its own.

    Attributes:
        system: System text; it goes into the first chunk with the chat template's
            opening. None: the template's own default, if it has one.
        documents: Texts, or anything that `document_text.text_of` finds one in, such
            as documents of LangChain and nodes of LlamaIndex, in prompt order. Empty
            ones are dropped.
        question: The fresh end of the prompt, always computed in full context.

    Raises:
        PromptError: There is neither a document nor a question, or an entry is no
            text.
    """

    system: str | None = None
    documents: Sequence[Any] = ()
    question: str = ""

    def __post_init__(self) -> None:
        """Refuse what no prompt can be made of."""
        # A str is a sequence of letters, and an iterator is empty the second time.
        if isinstance(self.documents, str) or not isinstance(self.documents, Sequence):
            raise PromptError(
                f"documents is a {type(self.documents).__name__}; pass a list of "
                f"documents"
            )
        if self.system is not None:
            _check_str("system", self.system)
        _check_str("question", self.question)
        texts = self.texts()
        if not self.question.strip() and not texts:
            raise PromptError(
                "the prompt is empty: it has neither documents nor a question; pass "
                "at least a question"
            )

    def texts(self) -> list[str]:
        """Return the non-empty documents' texts, in order."""
        return [text for text, _ in self.titled_texts()]

    def titled_texts(self) -> list[tuple[str, str]]:
        """Return the non-empty documents' texts and titles, in order.

        A title is for people who look at the store: what the document's metadata say,
        else how its text begins.
        """
        texts = [text_of(index, doc) for index, doc in enumerate(self.documents)]
        return [
            (text, title_of(document, text))
            for text, document in zip(texts, self.documents, strict=True)
            if text.strip()
        ]

    def messages(self) -> tuple[ChatMessage, ...]:
        """Return the prompt as a conversation of one question."""
        parts = [DocumentPart(text, title) for text, title in self.titled_texts()]
        user = ChatMessage("user", [*parts, self.question])
        if self.system is None:
            return (user,)
        return ChatMessage("system", self.system), user

    def named_texts(self) -> Iterator[tuple[str, str]]:
        """Yield every text with a name for it."""
        yield from (("system", self.system or ""), ("question", self.question))
        for index, text in enumerate(self.texts()):
            yield f"document {index}", text


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: Who speaks; ``"tool"`` is a tool's result.
        content: Text, or parts in order: each a str or a `DocumentPart`. A part is set
            apart from the next one by a blank line, unless it ends in white space.
        tool_calls: Of an assistant, in OpenAI's form: mappings with ``"id"`` and
            ``"function"``, which has ``"name"`` and ``"arguments"``.
        tool_call_id: Of a tool's result: the call it answers.
        name: Of a tool or speaker, for templates that write it.

    Raises:
        PromptError: A field has the wrong type, or the role does not go with it.
    """

    role: Role
    content: str | Sequence[str | DocumentPart] = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no template could render as it is meant."""
        if self.role not in get_args(Role):
            raise PromptError(
                f"role is {shown(self.role)}; it must be one of "
                f"{', '.join(get_args(Role))}"
            )
        for part in self.parts():
            if not isinstance(part, str | DocumentPart):
                raise PromptError(
                    f"content holds a {type(part).__name__}; pass texts and "
                    f"DocumentPart(text, title)"
                )
        for name in ("tool_call_id", "name"):
            if getattr(self, name) is not None:
                _check_str(name, getattr(self, name))
        if self.tool_calls and self.role != "assistant":
            raise PromptError(
                f"a {self.role} message has tool_calls; they belong to the assistant's"
            )
        _check_functions("tool_calls", self.tool_calls)
        if self.role == "assistant" and self.has_documents:
            raise PromptError(
                "an assistant message holds a DocumentPart; put documents into user, "
                "tool or system messages"
            )

    def parts(self) -> tuple[str | DocumentPart, ...]:
        """Return the content as parts; empty texts and blank documents are dropped."""
        if isinstance(self.content, str):
            return (self.content,) if self.content else ()
        if not isinstance(self.content, Sequence):
            raise PromptError(
                f"content is a {type(self.content).__name__}; pass a str or a list of "
                f"texts and documents"
            )
        return tuple(part for part in self.content if not _is_blank(part))

    @property
    def has_documents(self) -> bool:
        """Whether a part is a document."""
        return any(isinstance(part, DocumentPart) for part in self.parts())


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, each document, tool description and earlier turn a chunk.

    Attributes:
        messages: In order; the last one is the user's or a tool's result. Its text
            behind the documents is the fresh end, always computed in full context.
        tools: Descriptions in OpenAI's form: mappings with ``"type": "function"`` and
            ``"function"``, which has ``"name"``, ``"description"``, ``"parameters"``.

    Raises:
        PromptError: There is no message, the last one is not to be answered, or a
            field has the wrong type.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        """Refuse what no prompt can be made of."""
        if isinstance(self.messages, str) or not isinstance(self.messages, Sequence):
            raise PromptError(
                f"messages is a {type(self.messages).__name__}; pass a list of "
                f"ChatMessage"
            )
        for index, message in enumerate(self.messages):
            if not isinstance(message, ChatMessage):
                raise PromptError(
                    f"message {index} is a {shown_type(message)}; pass "
                    f"daric_rag.ChatMessage, or leave messages of other libraries to "
                    f"PromptBuilder.build(history=)"
                )
        last = self.messages[-1].role if self.messages else None
        if last not in ("user", "tool"):
            raise PromptError(
                "the conversation must end with a message to answer; put a user "
                "message, or a tool's result, at its end"
            )
        for index, message in enumerate(self.messages):
            if message.role == "user" and not _says_something(message):
                raise PromptError(f"message {index} (user) is empty; drop it")
        _check_functions("tools", self.tools)

    def named_texts(self) -> Iterator[tuple[str, str]]:
        """Yield every text with a name for it."""
        for index, message in enumerate(self.messages):
            for part in message.parts():
                text = part.text if isinstance(part, DocumentPart) else part
                yield f"message {index}", text
            yield f"message {index}", message.name or ""
            yield f"message {index}", message.tool_call_id or ""
            calls = json.dumps(list(message.tool_calls), ensure_ascii=False)
            yield f"message {index}", calls
        yield "tools", json.dumps(list(self.tools), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Chunks of token ids, for callers with their own tokenisation.

    Attributes:
        chunks: Ids per chunk; the last chunk is the question. With exact alignment
            the model sees precisely their concatenation.
    """

    chunks: Sequence[Sequence[int]]


Prompt = ChunkedPrompt | ChatPrompt | TokenPrompt


def shown_type(value: object) -> str:
    """Return the name of a value's type, with its module: names alone may be alike."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _check_str(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise PromptError(f"{name} is a {type(value).__name__}; pass a str")


def _is_blank(part: str | DocumentPart) -> bool:
    if isinstance(part, DocumentPart):
        return not part.text.strip()
    return part == ""


def _says_something(message: ChatMessage) -> bool:
    return any(
        isinstance(part, DocumentPart) or part.strip() for part in message.parts()
    )


def _check_functions(name: str, functions: object) -> None:
    """Check tools or tool calls: plain JSON, each a function with a name."""
    if isinstance(functions, str) or not isinstance(functions, Sequence):
        raise PromptError(f"{name} is a {type(functions).__name__}; pass a list")
    for index, entry in enumerate(functions):
        function = entry.get("function") if isinstance(entry, Mapping) else None
        called = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(called, str) or not called:
            raise PromptError(
                f"{name}[{index}] is not in OpenAI's form; pass "
                f'{{"type": "function", "function": {{"name": ..., ...}}}}'
            )
    try:
        json.dumps(functions)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"{name} must be plain JSON values ({error})") from error
