"""What the engines share: prompts become submissions, and streams become answers.

Sync and async calls are two ways to wait for the same stream of deltas, which comes
from a thread that the engine itself runs. Neither torch nor vLLM is needed.
"""

from __future__ import annotations

import asyncio
import os
import queue
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, Self

from daric_rag.config import DaricConfig
from daric_rag.document_text import text_of, title_of
from daric_rag.engine import (
    ChunkedPrompt,
    Completion,
    Delta,
    DocumentOutcome,
    Prompt,
)
from daric_rag.errors import ConfigError, EngineClosedError
from daric_rag.layout import PromptLayout
from daric_rag.runtime.document_outcomes import prewarmed_each
from daric_rag.runtime.request_stream import DeltaIterator, RequestStream, Submission
from daric_rag.runtime.submissions import SubmissionMaker
from daric_rag.runtime.tool_reading import ToolReader, tool_reader

__all__ = ["ClientEngine", "checked_config", "refuse_fork"]

_Item = Delta | BaseException

# One tokenises at a time; prompts of token ids pass it by in the others.
_NUM_LAYOUT_THREADS = 4


def refuse_fork(pid: int, engine: str) -> None:
    """Refuse a forked child, which may have copied locks that nobody gives back.

    Args:
        pid: Of the process that opened the engine.
        engine: Name of its class.

    Raises:
        EngineClosedError: This process is another one.
    """
    if os.getpid() != pid:
        raise EngineClosedError(
            f"this process was forked from the engine's, whose thread stayed there; "
            f"open a new {engine} in this process"
        )


class _Loop(Protocol):
    """The thread that an engine runs."""

    def check_process(self) -> None:
        """Raise `EngineClosedError` in a fork, where the thread is not."""
        ...

    def check_open(self) -> None:
        """Raise `EngineClosedError` there, and where the thread takes no more."""
        ...

    def stop(self) -> None:
        """Have it end, without waiting for it."""
        ...

    def close(self) -> None:
        """Have it end, and wait for it; nothing in a fork, or when repeated."""
        ...


class ClientEngine(ABC):
    """Client process. An `Engine`, but for how a request is run.

    A subclass's constructor sets `_maker` and `tokenizer`.

    Args:
        loop: Must not refer to this object, so that one which is dropped without
            close() is closed all the same, at the latest at exit.
    """

    _maker: SubmissionMaker
    tokenizer: Any

    def __init__(self, loop: _Loop) -> None:
        """Own a loop that runs."""
        self._loop = loop
        self._finalizer = weakref.finalize(self, loop.close)
        # Threads of the engine's own: a silent server may hold them for long.
        self._layouts = ThreadPoolExecutor(_NUM_LAYOUT_THREADS, "daric-layout")
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        """Return the engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return the engine itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.aclose()

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: neither closed nor failed, and no fork's copy."""
        try:
            self._loop.check_open()
        except EngineClosedError:
            return False
        return True

    def layout(self, prompt: Prompt) -> PromptLayout:
        """Return a prompt's tokens, chunks and recompute set, without running it."""
        self._loop.check_process()
        return self._maker.processor.layout(prompt)

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """Answer one prompt; options are the fields of `GenerationOptions`."""
        return self.generate_batch([prompt], **options)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], **options: Any
    ) -> list[Completion]:
        """Answer several prompts, batched by the engine; in their order."""
        self._loop.check_process()
        checked = self._maker.options(options)
        return self._complete(
            [self._maker.of_prompt(prompt, checked) for prompt in prompts]
        )

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Delta]:
        """Answer one prompt piece by piece; closing the iterator aborts."""
        self._loop.check_process()
        submission = self._maker.of_prompt(prompt, self._maker.options(options))
        sink: queue.SimpleQueue[_Item] = queue.SimpleQueue()
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
        checked = self._maker.options(options)
        # A fork has no threads to ask for.
        self._loop.check_process()
        try:
            # Tokenising takes milliseconds that others should not wait for.
            laid_out = loop.run_in_executor(
                self._layouts, self._maker.of_prompt, prompt, checked, time.time()
            )
        except RuntimeError:
            # No threads either: the engine is closed, and its loop knows why.
            self._loop.check_open()
            raise
        submission = await laid_out
        sink: asyncio.Queue[_Item] = asyncio.Queue()

        def put(item: _Item) -> None:
            # In the engine's thread, which must outlive a client's event loop. To ask
            # whether that is closed would be too early: it may close meanwhile.
            with suppress(RuntimeError):
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

    def prewarm(self, documents: Sequence[Any], *, namespace: str | None = None) -> int:
        """Compute and store documents ahead of the prompts that will hold them.

        Args:
            documents: As in `ChunkedPrompt.documents`.
            namespace: Tenant to store them for; None is the configuration's.

        Returns:
            How many documents had to be computed.

        Raises:
            PromptTooLongError: A document exceeds the model's context.
        """
        self._loop.check_process()
        titled = ChunkedPrompt(documents=documents, question="-").titled_texts()
        submissions = [
            self._maker.of_document(text, title, namespace)
            for text, title in dict(titled).items()
        ]
        completions = self._complete(submissions)
        return sum(completion.reuse.saved_tokens > 0 for completion in completions)

    def document_layout(self, document: Any) -> PromptLayout:
        """Return the tokens of a document as prompts hold it, without running.

        Args:
            document: As in `ChunkedPrompt.documents`.

        Raises:
            PromptError: It is empty or has no text.
            PromptTooLongError: It exceeds the model's context.
        """
        self._loop.check_process()
        text = text_of(0, document)
        return self._maker.of_document(text, title_of(document, text)).layout

    def prewarm_each(self, documents: Sequence[Any]) -> list[DocumentOutcome]:
        """Do the same and tell of each document; one that is refused stops none.

        Args:
            documents: As in `ChunkedPrompt.documents`.

        Returns:
            One outcome per document, in their order.

        Raises:
            EngineError: The engine failed; some documents may be stored.
        """
        self._loop.check_process()
        return prewarmed_each(documents, self._maker.of_document, self._complete)

    def tool_reader(self, name: str, tools: Sequence[Mapping[str, Any]]) -> ToolReader:
        """Return what reads the tool calls of one answer, by a parser of vLLM's.

        Args:
            name: As of vLLM's option ``--tool-call-parser``.
            tools: Those that the model was told of, in OpenAI's form.

        Raises:
            ConfigError: There is no such parser, or it cannot read this model.
            VllmVersionError: vLLM is not installed here.
        """
        return tool_reader(name, tools, self.tokenizer)

    def close(self) -> None:
        """Abort what runs and release everything; harmless when repeated."""
        self._finalizer()
        if os.getpid() == self._pid:
            self._layouts.shutdown()

    async def aclose(self) -> None:
        """Close, without keeping the event loop waiting."""
        # First, and here: whoever waits for an answer may hold all threads there are.
        self._loop.stop()
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    @abstractmethod
    def _submit(
        self, submission: Submission, put: Callable[[_Item], None]
    ) -> RequestStream:
        """Start a request whose deltas, or whose error, go to `put`."""

    def _complete(self, submissions: Sequence[Submission]) -> list[Completion]:
        """Run requests together; if one fails, or the caller leaves, none runs on."""
        sinks: list[queue.SimpleQueue[_Item]] = []
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


def checked_config(config: DaricConfig | None) -> DaricConfig:
    """Return a configuration, or the default one.

    Raises:
        ConfigError: It is something else.
    """
    if config is None:
        return DaricConfig()
    if not isinstance(config, DaricConfig):
        raise ConfigError(f"config is a {type(config).__name__}; pass a DaricConfig")
    return config


def _checked(item: _Item) -> Delta:
    if isinstance(item, BaseException):
        try:
            raise item
        finally:
            # Its traceback holds this frame and its callers', the engine among them.
            del item
    return item


def _last(sink: queue.SimpleQueue[_Item]) -> Completion:
    while True:
        delta = _checked(sink.get())
        if delta.completion is not None:
            return delta.completion
