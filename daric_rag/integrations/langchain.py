"""daric_rag in LangChain: a chat model whose documents are cached wherever they stand.

    model = ChatDaric(model="smollm2-135m")
    prompt = DaricPromptTemplate(builder=PromptBuilder(system="Answer briefly."))
    chain = {"documents": retriever, "question": RunnablePassthrough()} | prompt | model
    chain.invoke("Who built the mill?").usage_metadata

Importing this needs neither torch nor vLLM; the engine opens with the first request.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, Literal, Self, cast

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, PrivateAttr

from daric_rag.integrations._langchain_messages import document_block
from daric_rag.integrations._langchain_prewarm import PrewarmRetriever
from daric_rag.integrations._langchain_prompt import (
    DaricPromptTemplate,
    create_daric_chain,
)
from daric_rag.integrations._langchain_requests import ChatRequests, tool_choice_of
from daric_rag.integrations._langchain_results import (
    PROVIDER,
    AnswerStream,
    chat_result,
    combined_outputs,
)
from daric_rag.integrations._langchain_structured import structured_output
from daric_rag.integrations._tool_calls import chosen_tools
from daric_rag.prewarm_queue import BackgroundPrewarm
from daric_rag.prompt import PromptBuilder

__all__ = [
    "BackgroundPrewarm",
    "ChatDaric",
    "DaricPromptTemplate",
    "PrewarmRetriever",
    "PromptBuilder",
    "create_daric_chain",
    "document_block",
]


class ChatDaric(ChatRequests):
    """A chat model that reuses documents' KV caches at any position.

    System text, earlier turns, tools' descriptions and documents in messages (see
    `document_block`) are chunks of their own. Requests of other threads and tasks are
    batched by vLLM, so that `batch` and `abatch`, which run every input concurrently,
    need no batch call of their own.

    Objects of equal engine settings share one embedded engine, of which vLLM allows
    one per process; it closes with the last of them that is closed or dropped.

    Fields of a request (from `temperature` to `conversation`, and `tool_choice`) may
    also be passed to `invoke`, `bind` and their like, as may `priority`, `ignore_eos`
    and what guides decoding, by the names of `GenerationOptions`. Other keywords are
    refused.

    Attributes:
        model: A local folder, a hub name, or ``smollm2-135m``; of a server, its name
            there, None for its only one.
        store: Folder of an embedded engine's KV store, or ``":memory:"``.
        base_url: Of a server; None for an engine in this process.
        api_key: The server's; by default from DARIC_API_KEY.
        config: `DaricConfig`, or a mapping of its fields.
        engine_options: Further keywords of `EmbeddedEngine` or `RemoteEngine`, such as
            ``{"dtype": "float32"}``. As some are secrets, they are neither shown nor
            serialised: pass them again to what is loaded. A pickle has them.
        engine: An open engine, instead of all above; its owner closes it.
        timeout: Longest silence of a server, in seconds; None is its default.
        max_retries: Further tries where no server has begun to answer.
        temperature: See `GenerationOptions`, as for what follows.
        n: Answers to draw; `invoke` returns the first, `generate` all of them. They
            cannot be streamed.
        logprobs: Most likely tokens per token, in ``response_metadata["logprobs"]``.
        streaming: Whether `invoke` streams too, for callbacks on new tokens. False:
            `stream` gives the answer in one piece. None: each does as it is called.
        reuse: ``"daric"``, ``"full_reuse"`` or ``"off"``.
        namespace: Tenant; None is the configuration's.
        conversation: Id of a growing conversation.
        tool_choice: What `bind_tools` takes where it is not told. Small models seldom
            call a tool on their own: ``"any"`` has them call one every time.
        tool_format: ``"template"``: the chat template describes tools; ``"text"``: they
            are described in the system text, and decoding keeps calls valid;
            ``"auto"``: as the template can.
        tool_parser: Name of the parser that vLLM has for the model's calls, as of
            ``vllm serve --tool-call-parser``, for templates that describe tools. It
            needs vLLM installed, with a server too. None: ``<tool_call>`` around JSON
            is read.
    """

    # Weak: whoever drops a queue need not wait for the model to be dropped.
    _queues: weakref.WeakSet[BackgroundPrewarm] = PrivateAttr(
        default_factory=weakref.WeakSet
    )

    def background_prewarm(
        self, builder: PromptBuilder | None = None, *, max_pending: int = 256
    ) -> BackgroundPrewarm:
        """Return a queue that caches documents on this engine, closed with the model.

        Args:
            builder: The prompt's own, so that it writes documents as the prompt does.
            max_pending: Most documents that wait.
        """
        queue = BackgroundPrewarm(
            self._engine_source().get,
            builder=builder,
            namespace=self.namespace,
            max_pending=max_pending,
        )
        self._queues.add(queue)
        return queue

    def close(self) -> None:
        """Give the engine back; it closes with its last user. Final."""
        for queue in list(self._queues):
            queue.close()
        self._source.close()

    async def aclose(self) -> None:
        """Close, without keeping the event loop waiting."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        """Return the model itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    @property
    def _llm_type(self) -> str:
        return "daric-chat"

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Fields that are secrets, and where they come from."""
        return {"api_key": "DARIC_API_KEY"}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Serialised by its fields, without secrets and open engines."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Return the public module's path."""
        return ["daric_rag", "integrations", "langchain"]

    def _get_invocation_params(
        self, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Name the stop that is used: a request's, else the model's own."""
        stop = self.stop if stop is None else stop
        return super()._get_invocation_params(stop=stop, **kwargs)

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """Name a request for LangChain's response cache.

        Not by what is serialised, from which defaults and open engines are missing.
        """
        params = {**self._get_invocation_params(stop=stop), **kwargs}
        return str(sorted(params.items()))

    def _get_ls_params(
        self, stop: list[str] | None = None, **kwargs: Any
    ) -> LangSmithParams:
        stop = stop if stop is not None else self.stop
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params.setdefault("ls_model_name", self._model_name())
        return params

    def _combine_llm_outputs(
        self, llm_outputs: list[dict[str, Any] | None]
    ) -> dict[str, Any]:
        return combined_outputs([output for output in llm_outputs if output])

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine = self._engine_source().get()
        prompt, options, form = self._request(engine, messages, stop, kwargs)
        return chat_result(engine.generate(prompt, **options), form)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine = await self._engine_source().aget()
        prompt, options, form = await self._arequest(engine, messages, stop, kwargs)
        return chat_result(await engine.agenerate(prompt, **options), form)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        engine = self._engine_source().get()
        prompt, options, form = self._request(
            engine, messages, stop, kwargs, is_streamed=True
        )
        answer = AnswerStream(form)
        with closing(cast(Any, engine.stream(prompt, **options))) as deltas:
            for delta in deltas:
                for chunk in answer.feed(delta):
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        engine = await self._engine_source().aget()
        prompt, options, form = await self._arequest(
            engine, messages, stop, kwargs, is_streamed=True
        )
        answer = AnswerStream(form)
        async with aclosing(cast(Any, engine.astream(prompt, **options))) as deltas:
            async for delta in deltas:
                for chunk in answer.feed(delta):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools.

        Args:
            tools: In any form that LangChain takes.
            tool_choice: ``"auto"``: the model decides; ``"any"`` (or ``"required"``,
                or True): it calls one; a tool's name, or OpenAI's mapping of one: that
                one; ``"none"``: none. None is the field `tool_choice`. Calls that are
                asked for are guided: their arguments fit the tool's schema, unless
                `max_tokens` cuts them short, when they are text.
            strict: Taken for other packages' sake; guided calls always fit.
            **kwargs: As in `invoke`.

        Raises:
            ConfigError: `tool_choice` names no tool.
        """
        described = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        choice = tool_choice_of(tool_choice, self.tool_choice)
        chosen_tools(described, choice)
        return super().bind(tools=described, tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Return a model whose answers are objects of a schema.

        Decoding is guided, so that an answer fits unless `max_tokens` cuts it short.

        Args:
            schema: A pydantic class, a TypedDict, a JSON schema or a tool in OpenAI's
                form. None only with ``method="json_mode"``: any JSON object.
            method: ``"json_schema"``: the answer is such an object;
                ``"function_calling"``: it is a call to a tool of that schema;
                ``"json_mode"``: as the first; tell the model of the fields yourself.
            include_raw: Return a dict of ``raw``, ``parsed`` and ``parsing_error``.
            strict: Taken for other packages' sake; answers always fit.
            **kwargs: As in `invoke`.

        Raises:
            ConfigError: There is no schema, or no such method.
        """
        return structured_output(
            self, schema, method=method, include_raw=include_raw, options=kwargs
        )
