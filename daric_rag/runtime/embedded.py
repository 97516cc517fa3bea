"""An engine in this process: unmodified vLLM with our worker and connector.

vLLM's engine runs in a thread of its own, the only one that ever touches it. Clients
submit from any thread or event loop and hear back through a sink each, so that
concurrent requests meet in vLLM's scheduler and are batched there.
"""

from __future__ import annotations

import asyncio
import os
import queue
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any, Self

from daric_rag.config import DaricConfig
from daric_rag.engine import (
    ChunkedPrompt,
    Completion,
    Delta,
    GenerationOptions,
    Prompt,
)
from daric_rag.errors import ConfigError, EngineClosedError, PromptError
from daric_rag.input_processor import InputProcessor
from daric_rag.layout import PromptLayout
from daric_rag.models import resolve_model
from daric_rag.runtime.engine_loop import EngineLoop
from daric_rag.runtime.launch import build_engine, drop_engine
from daric_rag.runtime.ranks import total_stats
from daric_rag.runtime.request_stream import DeltaIterator, RequestStream, Submission
from daric_rag.storage import StoreStats

__all__ = ["EmbeddedEngine"]


class EmbeddedEngine:
    """Client process. Answers prompts with vLLM running in this process.

    Args:
        model: A local folder, a hub name, or the short name ``smollm2-135m``.
        store: Folder of the KV store; None for the user's cache folder, ``":memory:"``
            to keep documents in host memory only.
        config: Layout, selection and capacities.
        **vllm_options: Fields of vLLM's ``EngineArgs``, such as ``max_model_len``,
            ``dtype`` or ``kv_cache_memory_bytes``. With
            ``scheduling_policy="priority"`` requests may have priorities.

    Raises:
        ConfigError: An option is unknown or refused.
        ModelError: The model is missing or unsupported.
        VllmVersionError: vLLM is missing or of another version.
        StoreError: The store's folder cannot be used.
    """

    def __init__(
        self,
        model: str,
        *,
        store: str | os.PathLike[str] | None = None,
        config: DaricConfig | None = None,
        **vllm_options: Any,
    ) -> None:
        """Start the engine; takes seconds."""
        self.config = config if config is not None else DaricConfig()
        if not isinstance(self.config, DaricConfig):
            raise ConfigError(
                f"config is a {type(self.config).__name__}; pass a DaricConfig"
            )
        self.model_path = resolve_model(model)
        store_path = None if store is None else os.fspath(store)
        # Nothing that the loop holds may refer to this object, so that one which is
        # dropped without close() is closed all the same, at the latest at exit.
        start = partial(
            build_engine, str(self.model_path), store_path, self.config, vllm_options
        )
        self._loop = EngineLoop(start, drop_engine)
        self._finalizer = weakref.finalize(self, self._loop.close)
        facts = self._loop.facts
        self.tokenizer = facts.tokenizer
        self.max_model_len = facts.max_model_len
        self.block_size = facts.block_size
        self._vocab_size = facts.vocab_size
        self._scheduling_policy = facts.scheduling_policy
        try:
            self._processor = InputProcessor(
                facts.tokenizer,
                config=self.config,
                block_size=facts.block_size,
                max_model_len=facts.max_model_len,
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return the engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def layout(self, prompt: Prompt) -> PromptLayout:
        """Return a prompt's tokens, chunks and recompute set, without running it."""
        return self._processor.layout(prompt)

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """Answer one prompt; options are the fields of `GenerationOptions`."""
        return self.generate_batch([prompt], **options)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], **options: Any
    ) -> list[Completion]:
        """Answer several prompts, batched by the engine; in their order."""
        checked = self._options(options)
        return self._complete([self._submission(prompt, checked) for prompt in prompts])

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Delta]:
        """Answer one prompt piece by piece; closing the iterator aborts."""
        submission = self._submission(prompt, self._options(options))
        sink: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        return DeltaIterator(self._submit(submission, sink.put), sink.get)

    async def agenerate(self, prompt: Prompt, **options: Any) -> Completion:
        """Answer one prompt; concurrent calls are batched. Cancelling aborts."""
        async for delta in self.astream(prompt, **options):
            if delta.completion is not None:
                return delta.completion
        raise EngineClosedError("the engine closed before it answered; open a new one")

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Delta]:
        """Answer one prompt piece by piece, concurrently with others."""
        loop = asyncio.get_running_loop()
        checked = self._options(options)
        # Tokenising a long prompt takes milliseconds that others should not wait for.
        submission = await loop.run_in_executor(None, self._submission, prompt, checked)
        sink: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

        def put(item: Delta | BaseException) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(sink.put_nowait, item)

        handle = self._submit(submission, put)
        try:
            while True:
                delta = _checked(await sink.get())
                yield delta
                if delta.completion is not None:
                    return
        finally:
            handle.abort()

    def prewarm(self, documents: Sequence[Any]) -> int:
        """Compute and store documents ahead of the prompts that will hold them.

        Args:
            documents: As in `ChunkedPrompt.documents`.

        Returns:
            How many documents had to be computed.

        Raises:
            PromptTooLongError: A document exceeds the model's context.
        """
        titled = ChunkedPrompt(documents=documents, question="-").titled_texts()
        submissions = [
            self._finish(
                self._processor.document_layout(text, title),
                GenerationOptions(max_tokens=1),
                save_tail=True,
            )
            for text, title in dict(titled).items()
        ]
        completions = self._complete(submissions)
        return sum(completion.reuse.saved_tokens > 0 for completion in completions)

    def flush(self) -> None:
        """Return when everything computed so far is on disk."""
        self._loop.call(lambda engine: engine.collective_rpc("daric_flush"))

    def store_stats(self) -> StoreStats:
        """Return what the store holds and did."""
        stats: list[Any] = self._loop.call(
            lambda engine: engine.collective_rpc("daric_store_stats")
        )
        return total_stats(stats)

    def clear_host(self) -> None:
        """Drop host copies of documents that are on disk, to measure the disk tier."""
        self._loop.call(lambda engine: engine.collective_rpc("daric_clear_host"))

    def clear_prefix_cache(self) -> None:
        """Empty vLLM's own prefix cache; the store keeps what it has."""
        self._loop.call(lambda engine: engine.reset_prefix_cache())

    def close(self) -> None:
        """Flush the store, stop the engine, release memory; harmless when repeated."""
        self._finalizer()

    def _complete(self, submissions: Sequence[Submission]) -> list[Completion]:
        """Run requests together; if one fails, or the caller leaves, none runs on."""
        sinks: list[queue.SimpleQueue[Delta | BaseException]] = []
        handles: list[RequestStream] = []
        try:
            for submission in submissions:
                sinks.append(queue.SimpleQueue())
                handles.append(self._submit(submission, sinks[-1].put))
            return [_last(sink) for sink in sinks]
        except BaseException:
            for handle in handles:
                handle.abort()
            raise

    def _options(self, options: dict[str, Any]) -> GenerationOptions:
        known = GenerationOptions.__dataclass_fields__
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"{name!r} is not a generation option; known: {', '.join(known)}"
                )
        checked = GenerationOptions(**options)
        if checked.priority and self._scheduling_policy != "priority":
            raise ConfigError(
                f"priority is {checked.priority} and this engine schedules requests "
                f"as they come; open it with EmbeddedEngine(..., "
                f'scheduling_policy="priority")'
            )
        return checked

    def _submission(self, prompt: Prompt, options: GenerationOptions) -> Submission:
        return self._finish(self._processor.layout(prompt), options)

    def _finish(
        self,
        layout: PromptLayout,
        options: GenerationOptions,
        *,
        save_tail: bool = False,
    ) -> Submission:
        self._processor.check_len(layout, options.max_tokens)
        if max(layout.token_ids) >= self._vocab_size:
            raise PromptError(
                f"the prompt has token id {max(layout.token_ids)} and the model knows "
                f"[0, {self._vocab_size}); pass ids of this model's own tokenizer"
            )
        wire = None
        if options.reuse != "off":
            wire = self._processor.request_wire(
                layout,
                reuse=options.reuse,
                save_tail=save_tail,
                namespace=options.namespace,
                conversation=options.conversation,
                trace=options.trace,
            )
        return Submission(layout, wire, options)

    def _submit(self, submission: Submission, put: Any) -> RequestStream:
        stream = RequestStream(submission, put)
        self._loop.submit(stream)
        return stream


def _checked(item: Delta | BaseException) -> Delta:
    if isinstance(item, BaseException):
        raise item
    return item


def _last(sink: queue.SimpleQueue[Delta | BaseException]) -> Completion:
    while True:
        delta = _checked(sink.get())
        if delta.completion is not None:
            return delta.completion
