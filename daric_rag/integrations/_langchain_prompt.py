"""Documents and a question to messages in which every document is a chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any, Self

from langchain_core.messages import (
    BaseMessage,
    HumanMessage,
    SystemMessage,
    convert_to_messages,
)
from langchain_core.prompts.chat import BaseChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from pydantic import ConfigDict, Field, SkipValidation, model_validator

from daric_rag.engine import ChatPrompt, ChunkedPrompt
from daric_rag.errors import ConfigError
from daric_rag.integrations._langchain_messages import langchain_messages
from daric_rag.prompt import BuiltPrompt, PromptBuilder

__all__ = ["DaricPromptTemplate", "create_daric_chain"]


class DaricPromptTemplate(BaseChatPromptTemplate):
    """Writes documents and a question into messages for `ChatDaric`, always alike.

    Its input has ``"documents"``, ``"question"`` and, if wanted, ``"history"``, in any
    form that LangChain takes for messages; a system message at its front takes the
    place of the builder's. The user's message names the documents that are not in it in
    ``additional_kwargs["dropped_documents"]``, with the reasons.

    Attributes:
        builder: How everything is written.
        max_prompt_tokens: Most tokens of the prompt: documents are dropped, last ones
            first, until it fits. None: all stay.
        count_tokens: Of messages, for `max_prompt_tokens`:
            ``model.get_num_tokens_from_messages``.
    """

    input_variables: list[str] = Field(default=["documents", "question"])
    optional_variables: list[str] = Field(default=["history"])
    builder: SkipValidation[PromptBuilder] = Field(default_factory=PromptBuilder)
    max_prompt_tokens: int | None = None
    count_tokens: Callable[[list[BaseMessage]], int] | None = Field(
        default=None, exclude=True
    )

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse what no prompt could be made with.

        Raises:
            ConfigError: So it is; pydantic makes it a ValidationError.
        """
        if not isinstance(self.builder, PromptBuilder):
            raise ConfigError("builder must be a daric_rag.PromptBuilder")
        if (self.max_prompt_tokens is None) != (self.count_tokens is None):
            raise ConfigError(
                "max_prompt_tokens and count_tokens go together; pass both, such as "
                "count_tokens=model.get_num_tokens_from_messages, or neither"
            )
        return self

    def format_messages(self, **kwargs: Any) -> list[BaseMessage]:
        """Return the messages of one prompt.

        Args:
            **kwargs: The input, by the names above.

        Raises:
            PromptError: There is neither document nor question.
            PromptTooLongError: It does not fit without any document.
        """
        documents, question = kwargs["documents"], kwargs["question"]
        history = convert_to_messages(kwargs.get("history") or [])
        if self.max_prompt_tokens is None or self.count_tokens is None:
            return _messages(self.builder.build(documents, question), history)
        count_tokens = self.count_tokens

        def count(prompt: ChunkedPrompt | ChatPrompt) -> int:
            return count_tokens(_messages(BuiltPrompt(prompt, ()), history))

        limit = self.max_prompt_tokens
        return _messages(self.builder.fit(documents, question, limit, count), history)

    async def aformat_messages(self, **kwargs: Any) -> list[BaseMessage]:
        """Do the same, without keeping the event loop waiting for counts."""
        if self.count_tokens is None:
            return self.format_messages(**kwargs)
        return await asyncio.to_thread(lambda: self.format_messages(**kwargs))

    def pretty_repr(self, html: bool = False) -> str:
        """Return how a prompt is written."""
        system = self.builder.system or ""
        return f"{system}\n\n{{documents}}\n\n{self.builder.question_template}".strip()


def _messages(built: BuiltPrompt, history: list[BaseMessage]) -> list[BaseMessage]:
    prompt = built.prompt
    own = prompt.messages if isinstance(prompt, ChatPrompt) else prompt.messages()
    *system, user = langchain_messages(own)
    if history and isinstance(history[0], SystemMessage):
        system = []
    if built.dropped:
        dropped = [asdict(document) for document in built.dropped]
        user = HumanMessage(
            user.content, additional_kwargs={"dropped_documents": dropped}
        )
    return [*system, *history, user]


def create_daric_chain(
    retriever: BaseRetriever | Runnable[str, Sequence[Any]],
    model: Runnable[Any, Any],
    prompt: DaricPromptTemplate | None = None,
) -> Runnable[Any, dict[str, Any]]:
    """Return a chain that answers questions from retrieved documents.

    Args:
        retriever: Takes the question. `PrewarmRetriever` caches what it returns.
        model: A `ChatDaric`, also one with tools or structured output.
        prompt: How documents and question are written.

    Returns:
        A chain of a question, or of a mapping with ``"question"`` and ``"history"``, to
        a mapping with these, ``"documents"`` and the model's ``"answer"``.
    """
    return (
        RunnableLambda(_asked)
        | RunnablePassthrough.assign(documents=itemgetter("question") | retriever)
        | RunnablePassthrough.assign(answer=(prompt or DaricPromptTemplate()) | model)
    )


def _asked(question: Any) -> dict[str, Any]:
    return {"question": question} if isinstance(question, str) else dict(question)
