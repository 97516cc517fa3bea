"""Documents cached in the background, while whoever retrieved them goes on.

A retriever's documents are known a moment before the prompt that holds them, and some
of them are in no prompt yet. `BackgroundPrewarm` takes them without waiting, and a
thread of its own has the engine compute what is not in the store::

    queue = BackgroundPrewarm(lambda: engine, builder=builder)
    queue.submit(retriever.invoke(question))
    ...
    queue.close()
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daric_rag.config import shown
from daric_rag.engine import DocumentPart, Engine
from daric_rag.errors import ConfigError
from daric_rag.prompt import PromptBuilder

__all__ = ["BackgroundPrewarm", "PrewarmStats"]

_logger = logging.getLogger(__name__)

# Few: a document behind a question's own ones should not keep that question waiting.
_BATCH_SIZE = 4

# Texts that are remembered as done, by Python's hash: one that collides is skipped. So
# is one that was evicted since. The prompt that holds it computes it then.
_NUM_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class PrewarmStats:
    """What became of the documents of a `BackgroundPrewarm`.

    Attributes:
        num_submitted: Taken into the queue.
        num_known: Not taken: queued or done already.
        num_dropped: Not taken because the queue was full or closed, or given up at
            its closing.
        num_computed: Computed and stored; others taken were in the store already.
        num_failed: Not cached because the engine raised an error, or unreadable.
    """

    num_submitted: int = 0
    num_known: int = 0
    num_dropped: int = 0
    num_computed: int = 0
    num_failed: int = 0


class BackgroundPrewarm:
    """Client process. A bounded queue of documents and the thread that caches them.

    Errors are logged and counted, never raised into the code that submits: without its
    pre-warming a document is computed by the first prompt that holds it. The thread of
    one that is dropped ends behind its batch.

    Args:
        engine_source: Returns the engine to use; called in the thread, for every batch,
            so that an engine may open lazily.
        builder: Writes the documents as prompts hold them. None: their bare texts.
        namespace: Tenant to cache for; None is the engine's configured one.
        max_pending: Most documents that wait, at least 1; what comes on top is dropped.

    Raises:
        ConfigError: `max_pending` cannot be used.
    """

    def __init__(
        self,
        engine_source: Callable[[], Engine],
        *,
        builder: PromptBuilder | None = None,
        namespace: str | None = None,
        max_pending: int = 256,
    ) -> None:
        """Start nothing yet: the thread begins with the first document."""
        if type(max_pending) is not int or max_pending < 1:
            raise ConfigError(
                f"max_pending is {shown(max_pending)}; it must be an int of at least 1"
            )
        self._builder = builder or PromptBuilder()
        self._queue = _Queue(engine_source, namespace, max_pending)
        # Its thread refers to the queue alone, so that this object can be dropped. A
        # garbage collection waits for nothing: it may run in the engine's own thread.
        self._finalizer = weakref.finalize(self, self._queue.stop)

    def submit(self, documents: Sequence[Any]) -> int:
        """Queue documents, without waiting for anything.

        Args:
            documents: As in `PromptBuilder.build`.

        Returns:
            How many were taken: not those that are queued or done already.
        """
        parts: list[DocumentPart] = []
        try:
            parts = self._builder.document_parts(documents)
        except Exception as error:
            self._queue.fail(error, num_documents=1)
        return sum(self._queue.put(part) for part in parts)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every document taken so far is done.

        Args:
            timeout_s: Longest wait, in seconds; None: as long as it takes.

        Returns:
            Whether all are.
        """
        return self._queue.wait(timeout_s)

    def close(self) -> None:
        """Give up what waits, and wait for the batch at work; harmless when repeated.

        The engine stays open.
        """
        self._finalizer()
        self._queue.join()

    @property
    def stats(self) -> PrewarmStats:
        """What became of the documents so far."""
        return self._queue.stats


_live: weakref.WeakSet[_Queue] = weakref.WeakSet()


def _abandon_all() -> None:
    for queue in list(_live):
        queue.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class _Queue:
    """The state that the thread shares with its clients."""

    def __init__(
        self,
        engine_source: Callable[[], Engine],
        namespace: str | None,
        max_pending: int,
    ) -> None:
        self._engine_source = engine_source
        self._options = {} if namespace is None else {"namespace": namespace}
        self._max_pending = max_pending
        # Reentrant, because a garbage collection under it may drop a client.
        self._changed = threading.Condition(threading.RLock())
        self._pending: OrderedDict[str, DocumentPart] = OrderedDict()
        self._running: set[str] = set()
        self._done: OrderedDict[int, None] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.stats = PrewarmStats()
        _live.add(self)

    def put(self, part: DocumentPart) -> bool:
        """Take a document unless it is known, or there is no room."""
        with self._changed:
            text = part.text
            if (
                text in self._pending
                or text in self._running
                or hash(text) in self._done
            ):
                self._count(num_known=1)
                return False
            if self._closed or len(self._pending) >= self._max_pending:
                self._count(num_dropped=1)
                return False
            self._pending[text] = part
            self._count(num_submitted=1)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="daric-prewarm", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
            return True

    def fail(self, error: BaseException, num_documents: int) -> None:
        """Log and count documents that cannot be cached."""
        _logger.warning(
            "%d retrieved documents were not pre-warmed (%s: %s); prompts that hold "
            "them compute them",
            num_documents,
            type(error).__name__,
            error,
        )
        with self._changed:
            self._count(num_failed=num_documents)

    def wait(self, timeout_s: float | None) -> bool:
        """Return whether nothing waits or runs, after at most so many seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self._pending or self._running:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def stop(self) -> None:
        """Have the thread end behind its batch."""
        with self._changed:
            self._closed = True
            self._count(num_dropped=len(self._pending))
            self._pending.clear()
            self._changed.notify_all()

    def abandon(self) -> None:
        """In a forked child: the thread is gone, and its documents are the parent's."""
        # The old one may be held for ever.
        self._changed = threading.Condition(threading.RLock())
        self._thread, self._closed = None, True
        self._pending.clear()
        self._running = set()

    def join(self) -> None:
        """Wait for the thread's end."""
        with self._changed:
            thread = self._thread
        # The engine that it asks for may close the queue.
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while batch := self._next():
            self._prewarm(batch)
            with self._changed:
                self._running.clear()
                self._changed.notify_all()

    def _next(self) -> list[DocumentPart]:
        """Wait for documents; none at the end."""
        with self._changed:
            while not self._pending and not self._closed:
                self._changed.wait()
            num_taken = min(_BATCH_SIZE, len(self._pending))
            batch = [self._pending.popitem(last=False)[1] for _ in range(num_taken)]
            self._running = {part.text for part in batch}
            return batch

    def _prewarm(self, batch: list[DocumentPart]) -> None:
        try:
            num_computed = self._engine_source().prewarm(batch, **self._options)
        except Exception as error:
            if len(batch) == 1:
                self.fail(error, num_documents=1)
                return
            # One document that does not fit must not take the others with it.
            for part in batch:
                self._prewarm([part])
            return
        with self._changed:
            self._count(num_computed=num_computed)
            for part in batch:
                self._done[hash(part.text)] = None
            while len(self._done) > _NUM_REMEMBERED:
                self._done.popitem(last=False)

    def _count(self, **added: int) -> None:
        totals = {name: getattr(self.stats, name) + n for name, n in added.items()}
        self.stats = replace(self.stats, **totals)
