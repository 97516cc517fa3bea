"""`DaricLLM`: a model of LlamaIndex whose documents are cached chunks."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import aclosing, closing
from typing import Any, TypeVar, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from daric_rag.engine import ChatMessage as EngineMessage
from daric_rag.engine import ChatPrompt, Completion, Delta, Prompt
from daric_rag.integrations._llama_index_answers import (
    Answer,
    GrowingAnswer,
    decoder_of,
)
from daric_rag.integrations._llama_index_messages import chat_prompt
from daric_rag.integrations._llama_index_structured import StructuredLLM

__all__ = ["DaricLLM"]

_Response = TypeVar("_Response")


class DaricLLM(StructuredLLM):
    """A chat model whose documents, system prompt and earlier turns are cached chunks.

    The engine opens on first use, embedded in this process or, with `base_url`, on a
    server. Objects with equal settings share one. Every generation option can also be
    given per call, as a keyword argument.

    Attributes:
        model: A local folder, a hub name or ``smollm2-135m``; on a server the name it
            goes by there, None for its only one.
        store: Folder of the KV store; None for the user's cache folder, ``":memory:"``
            for host memory only. The embedded engine's.
        base_url: Of a server, as ``http://host:8000``; None: embedded.
        api_key: The server's; by default ``DARIC_API_KEY`` of the environment. Never
            serialised.
        config: Layout, selection and capacities; a mapping of its fields will do.
        engine_options: Further keyword arguments of `EmbeddedEngine` (vLLM's, such as
            ``max_model_len`` or ``dtype``) or `RemoteEngine`. Never serialised, as
            they may hold secrets. A pickle has them, and is refused if they do.
        context_window: Tokens that prompt and answer may have together; None: the
            engine is asked, and opened for that.
        max_tokens: As in `GenerationOptions`, like the following ones.
        temperature: At least 0; 0 is greedy.
        top_p: Nucleus, in (0, 1].
        stop: Strings that end the answer and are cut from it.
        seed: Of the sampling; None is unseeded.
        logprobs: Log-probabilities of this many likeliest tokens.
        reuse: ``"daric"``, ``"full_reuse"`` or ``"off"``.
        namespace: Tenant; None is the configuration's.
        conversation: Id of a conversation whose prompts grow by whole chunks.
        additional_kwargs: Further fields of `GenerationOptions`.

    Args:
        engine: An open engine to be used instead; whoever opened it closes it.

    Raises:
        ConfigError: A setting cannot be used.
        ValidationError: A field is unknown or of the wrong type.
    """

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex serialises it by."""
        return "DaricLLM"

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation.

        Args:
            messages: Their documents (`DocumentBlock`, `CitableBlock`) are chunks.
            **kwargs: Fields of `GenerationOptions`, and ``tools``.

        Raises:
            DaricError: The messages or an option cannot be used, or the engine failed.
        """
        prompt, options = self._chat_request(messages, **kwargs)
        return self._answer(self.engine.generate(prompt, **options)).chat()

    @llm_chat_callback()
    async def achat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponse:
        """Answer a conversation; concurrent calls are batched by the engine."""
        prompt, options = self._chat_request(messages, **kwargs)
        engine = await self._engine_source().aget()
        return self._answer(await engine.agenerate(prompt, **options)).chat()

    @llm_chat_callback()
    def stream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseGen:
        """Answer a conversation piece by piece; the last piece has the usage."""
        prompt, options = self._chat_request(messages, **kwargs)
        return self._streamed(self.engine.stream(prompt, **options), Answer.chat)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Answer a conversation piece by piece, concurrently with others."""
        prompt, options = self._chat_request(messages, **kwargs)
        engine = await self._engine_source().aget()
        return self._astreamed(engine.astream(prompt, **options), Answer.chat)

    @llm_completion_callback()
    def complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Answer a text.

        Args:
            prompt: A user's message.
            formatted: Whether it is ready for the model, with the template it needs;
                it is then split at the configuration's delimiter, if that has one.
            **kwargs: Fields of `GenerationOptions`.

        Raises:
            DaricError: As in `chat`.
        """
        text, options = _text_prompt(prompt, formatted), self._options(kwargs)
        return self._answer(self.engine.generate(text, **options)).complete()

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Answer a text; concurrent calls are batched by the engine."""
        text, options = _text_prompt(prompt, formatted), self._options(kwargs)
        engine = await self._engine_source().aget()
        return self._answer(await engine.agenerate(text, **options)).complete()

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Answer a text piece by piece; the last piece has the usage."""
        text, options = _text_prompt(prompt, formatted), self._options(kwargs)
        return self._streamed(self.engine.stream(text, **options), Answer.complete)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Answer a text piece by piece, concurrently with others."""
        text, options = _text_prompt(prompt, formatted), self._options(kwargs)
        engine = await self._engine_source().aget()
        return self._astreamed(engine.astream(text, **options), Answer.complete)

    def _chat_request(
        self, messages: Sequence[ChatMessage], tools: Sequence[Any] = (), **options: Any
    ) -> tuple[ChatPrompt, dict[str, Any]]:
        return chat_prompt(messages, tools), self._options(options)

    def _answer(self, completion: Completion) -> Answer:
        return Answer.of(completion, self.model_name, decoder_of(self.engine))

    def _growing(self) -> GrowingAnswer:
        return GrowingAnswer(self.model_name, decoder_of(self.engine))

    def _streamed(
        self, deltas: Iterator[Delta], render: Callable[[Answer], _Response]
    ) -> Generator[_Response, None, None]:
        growing = self._growing()
        # The engine's iterator aborts where it is closed.
        with closing(cast("Generator[Delta]", deltas)):
            for delta in deltas:
                yield render(growing.add(delta))

    async def _astreamed(
        self, deltas: AsyncIterator[Delta], render: Callable[[Answer], _Response]
    ) -> AsyncGenerator[_Response, None]:
        growing = self._growing()
        async with aclosing(cast("AsyncGenerator[Delta]", deltas)):
            async for delta in deltas:
                yield render(growing.add(delta))


def _text_prompt(text: str, formatted: bool) -> Prompt:
    if formatted:
        # Engines take raw text too, for delimited prompts.
        return cast("Prompt", text)
    return ChatPrompt([EngineMessage("user", text)])
