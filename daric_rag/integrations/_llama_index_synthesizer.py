"""`DaricSynthesizer`: retrieved nodes to an answer, every node a chunk of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    MessageRole,
    TextBlock,
)
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer, QueryTextType
from llama_index.core.schema import BaseNode, NodeWithScore
from llama_index.core.types import RESPONSE_TEXT_TYPE, TokenAsyncGen, TokenGen

from daric_rag.errors import ConfigError
from daric_rag.integrations._llama_index_llm import DaricLLM
from daric_rag.integrations._llama_index_messages import document_block
from daric_rag.integrations._llama_index_structured import guided, read
from daric_rag.prompt import BuiltPrompt, PromptBuilder

__all__ = ["REPORT_KEY", "DaricSynthesizer"]

REPORT_KEY = "daric"
"""Of a response's metadata: what became of its nodes, and where their KV came from."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of `synthesize`: its nodes, and what is to be said of them."""

    nodes: Sequence[NodeWithScore]
    report: dict[str, Any] = field(default_factory=dict)


# LlamaIndex hands over texts alone, with volatile metadata in them. The nodes pass by
# it here, so that calls of several threads and tasks do not meet.
_call: ContextVar[_Call | None] = ContextVar("daric_synthesis", default=None)


@contextmanager
def _calling(nodes: Sequence[NodeWithScore]) -> Iterator[None]:
    token = _call.set(_Call(nodes))
    try:
        yield
    finally:
        _call.reset(token)


class DaricSynthesizer(BaseSynthesizer):
    """Answers in one call, with every node a chunk that is cached and found again.

    LlamaIndex's own modes join nodes and split them anew, so that hardly a text comes
    twice. Here a node's text is what `builder` makes of it: scores and other metadata
    stay out, or a prompt would hold another text for every query.

    Nodes that do not fit into the context are dropped, lowest score first. The
    response's ``metadata["daric"]`` has ``kept`` and ``dropped`` nodes, and, once the
    answer is there, ``usage`` and ``reuse``.

    Args:
        llm: Answers. At most half of its context is kept free for ``max_tokens``.
        builder: Writes the prompt; its ``system`` comes before the model's
            ``system_prompt``. None: the nodes' bare texts, and the question.
        streaming: Whether responses stream.
        output_cls: A class of pydantic that answers are objects of, by guided
            decoding: responses are then `PydanticResponse`.
        empty_response: Answer where there are no nodes.
        callback_manager: Also for the model.

    Raises:
        ConfigError: `llm` is no `DaricLLM`, or a class is to be streamed.
    """

    _llm: DaricLLM

    def __init__(
        self,
        llm: DaricLLM,
        *,
        builder: PromptBuilder | None = None,
        streaming: bool = False,
        output_cls: type[BaseModel] | None = None,
        empty_response: str | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        """Open nothing yet."""
        if streaming and output_cls is not None:
            raise ConfigError(
                "output_cls with streaming=True: an object is there when it is whole; "
                "drop one of them, or use llm.stream_structured_predict"
            )
        if not isinstance(llm, DaricLLM):
            raise ConfigError(
                f"llm is a {type(llm).__name__}; DaricSynthesizer needs a DaricLLM, "
                f"which keeps documents apart"
            )
        super().__init__(
            llm,
            callback_manager=callback_manager,
            # Unused: tokens are counted by the engine. Those of the base class would
            # open it here.
            prompt_helper=PromptHelper(),
            chat_prompt_helper=ChatPromptHelper(),
            streaming=streaming,
            output_cls=output_cls,
            empty_response=empty_response,
        )
        builder = builder or PromptBuilder()
        if builder.system is None:
            builder = replace(builder, system=llm.system_prompt)
        self._builder = builder

    @property
    def builder(self) -> PromptBuilder:
        """What writes the prompts; pre-warm by the same."""
        return self._builder

    def synthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a query from nodes.

        Args:
            query: The question.
            nodes: In prompt order.
            additional_source_nodes: Listed as sources too; not in the prompt.
            **response_kwargs: Generation options, as in `DaricLLM.chat`.

        Raises:
            DaricError: As in `DaricLLM.chat`.
        """
        with _calling(nodes):
            return super().synthesize(
                query, nodes, additional_source_nodes, **response_kwargs
            )

    async def asynthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a query from nodes, concurrently with others."""
        with _calling(nodes):
            return await super().asynthesize(
                query, nodes, additional_source_nodes, **response_kwargs
            )

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer a query from texts, each a chunk.

        Args:
            query_str: The question.
            text_chunks: Documents; within `synthesize` its nodes are used instead.
            **response_kwargs: Generation options, as in `DaricLLM.chat`.

        Raises:
            DaricError: As in `DaricLLM.chat`.
        """
        options = self._guided(response_kwargs)
        messages, report = self._written(query_str, text_chunks, options)
        if self._streaming:
            return _tokens(self._llm.stream_chat(messages, **options), report)
        return self._read(self._llm.chat(messages, **options), report)

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer a query from texts, each a chunk, concurrently with others."""
        options = self._guided(response_kwargs)
        # Counting tokens may ask a server, or open the engine.
        messages, report = await asyncio.to_thread(
            self._written, query_str, text_chunks, options
        )
        if self._streaming:
            answers = await self._llm.astream_chat(messages, **options)
            return _atokens(answers, report)
        return self._read(await self._llm.achat(messages, **options), report)

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise ConfigError(
                f"{', '.join(prompts)}: DaricSynthesizer has no such template; give it "
                f"a PromptBuilder(system=, document_template=, question_template=)"
            )

    def _get_metadata_for_response(self, nodes: list[BaseNode]) -> dict[str, Any]:
        metadata = super()._get_metadata_for_response(nodes) or {}
        call = _call.get()
        return metadata if call is None else metadata | {REPORT_KEY: call.report}

    def _guided(self, options: dict[str, Any]) -> dict[str, Any]:
        cls = self._output_cls
        return options if cls is None else guided(cls, options)

    def _read(self, answer: ChatResponse, report: dict[str, Any]) -> str | BaseModel:
        _note(answer, report)
        text = answer.message.content or ""
        if self._output_cls is None:
            return text
        finish_reason = answer.additional_kwargs["finish_reason"]
        return read(self._output_cls, text, finish_reason)

    def _written(
        self, question: str, texts: Sequence[str], options: dict[str, Any]
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        """Return the conversation to be answered, and what is to be reported."""
        call = _call.get()
        documents: Sequence[Any] = texts if call is None else call.nodes
        report = {} if call is None else call.report
        num_answer = self._llm.checked_options(options).max_tokens
        layout, window = self._llm.engine.layout, self._llm.metadata.context_window
        num_answer = min(num_answer, window // 2)
        built = self._builder.fit(
            documents, question, window - num_answer, lambda p: layout(p).prompt_len
        )
        report |= _fate(documents, built)
        return self._messages(built), report

    def _messages(self, built: BuiltPrompt) -> list[ChatMessage]:
        """Return a built prompt for the model, which makes the very same prompt of it.

        It goes through the model's chat, so that whoever observes that sees it.
        """
        blocks = [
            TextBlock(text=part) if isinstance(part, str) else document_block(part)
            for part in built.turn.parts()
        ]
        messages = [ChatMessage(blocks, role=MessageRole.USER)]
        if self._builder.system is not None:
            system = ChatMessage(self._builder.system, role=MessageRole.SYSTEM)
            messages.insert(0, system)
        return messages


def _fate(documents: Sequence[Any], built: BuiltPrompt) -> dict[str, Any]:
    """Return which nodes are in the prompt, and why others are not."""
    names = [getattr(doc, "node_id", index) for index, doc in enumerate(documents)]
    return {
        "kept": [names[index] for index in built.kept],
        "dropped": [
            {"node": names[drop.index], "title": drop.title, "reason": drop.reason}
            for drop in built.dropped
        ],
    }


def _tokens(answers: ChatResponseGen, report: dict[str, Any]) -> TokenGen:
    for answer in answers:
        _note(answer, report)
        yield answer.delta or ""


async def _atokens(
    answers: ChatResponseAsyncGen, report: dict[str, Any]
) -> TokenAsyncGen:
    async for answer in answers:
        _note(answer, report)
        yield answer.delta or ""


def _note(response: ChatResponse, report: dict[str, Any]) -> None:
    """Take over the usage of an answer that is there."""
    if response.raw is not None:
        names = ("finish_reason", "ttft_s", "usage", "reuse")
        report |= {name: response.raw[name] for name in names}
