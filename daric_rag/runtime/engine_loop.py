"""vLLM's engine in a thread of its own, which is the only one to touch it."""

from __future__ import annotations

import gc
import itertools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from daric_rag.errors import ConfigError, DaricError, EngineClosedError, EngineError
from daric_rag.runtime.client import refuse_fork
from daric_rag.runtime.request_ids import answer_request_id
from daric_rag.runtime.request_stream import RequestStream, Submission
from daric_rag.runtime.vllm_api import (
    RequestOutputKind,
    SamplingParams,
    VLLMClientError,
    has_cleanup,
    reuse_of_aborted,
    structured_outputs_params,
    tokens_input,
)

__all__ = ["EngineFacts", "EngineLoop"]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What clients need to know of a running engine.

    Attributes:
        engine: vLLM's engine; for the loop's thread only.
        tokenizer: The model's tokenizer.
        max_model_len: Most tokens of prompt and answer together.
        block_size: Tokens per KV block.
        vocab_size: Token ids lie below it.
        scheduling_policy: ``"fcfs"`` or ``"priority"``.
    """

    engine: Any
    tokenizer: Any
    max_model_len: int
    block_size: int
    vocab_size: int
    scheduling_policy: str


_Command = Callable[[], None]


class EngineLoop:
    """Client process. Feeds requests to vLLM and its outputs back to them.

    Args:
        start: Builds the engine; runs in the loop's thread.
        stop: Takes it down; runs there too.

    Raises:
        DaricError: What `start` raised.
    """

    def __init__(
        self, start: Callable[[], EngineFacts], stop: Callable[[Any], None]
    ) -> None:
        """Start the thread and wait until the engine is up."""
        self._start, self._stop = start, stop
        self._pid = os.getpid()
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._ids = itertools.count()
        # Reentrant, because a garbage collection under it may close a dropped engine.
        self._lock = threading.RLock()
        self._closing = False
        self._failure: BaseException | None = None
        started: Future[EngineFacts] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="daric-engine", daemon=True
        )
        self._thread.start()
        self.facts = started.result()

    def check_process(self) -> None:
        """See `client.refuse_fork`."""
        refuse_fork(self._pid, "EmbeddedEngine")

    def check_open(self) -> None:
        """Raise `EngineClosedError` unless commands are still taken."""
        self.check_process()
        if self._closing:
            raise EngineClosedError(
                f"the engine is closed{self._why()}; open a new EmbeddedEngine"
            )

    def submit(self, stream: RequestStream) -> None:
        """Hand a request over; its stream hears back.

        Raises:
            EngineClosedError: The engine is closed or has failed.
        """
        request_id = f"daric-{next(self._ids)}"
        stream.on_abort(lambda: self._post(lambda: self._abort(request_id), quiet=True))
        self._post(lambda: self._add(request_id, stream))

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Run `function(engine)` in the loop's thread, between steps.

        Raises:
            EngineClosedError: The engine is closed or has failed.
        """
        result: Future[Any] = Future()

        def command() -> None:
            try:
                result.set_result(function(self.facts.engine))
            except BaseException as error:
                result.set_exception(error)

        self._post(command)
        return result.result()

    def stop(self) -> None:
        """Have running requests and the engine end, without waiting for it."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closing = True
            self._inbox.put(lambda: None)

    def close(self) -> None:
        """End running requests, stop the engine, and wait for its thread.

        In a forked child, where there is neither, it does nothing.
        """
        if os.getpid() != self._pid:
            return
        self.stop()
        # A garbage collection in the loop's own thread may end up here.
        if self._thread is not threading.current_thread():
            self._thread.join()
            # Not before: the thread's own frames hold vLLM's engine to their end.
            gc.collect()

    def _post(self, command: _Command, *, quiet: bool = False) -> None:
        if quiet and os.getpid() != self._pid:
            return
        self.check_process()
        # Under the lock, so that no command arrives behind the last look at the inbox.
        with self._lock:
            if not self._closing:
                self._inbox.put(command)
                return
        if not quiet:
            self.check_open()

    def _why(self) -> str:
        return f" after a failure ({self._failure})" if self._failure else ""

    def _run(self, started: Future[EngineFacts]) -> None:
        try:
            facts = self._start()
        except BaseException as error:
            started.set_exception(error)
            return
        self.facts = facts
        started.set_result(facts)
        try:
            self._serve(facts.engine)
        except BaseException as error:
            self._failure = error
        try:
            with self._lock:
                self._closing = True
            self._end_streams()
            self._drain()
        finally:
            # Whoever still holds the closed engine must not hold vLLM's memory by it.
            self.facts = replace(facts, engine=None)
            self._stop(facts.engine)

    def _serve(self, engine: Any) -> None:
        while not self._closing:
            idle = not self._has_work(engine)
            try:
                while True:
                    self._inbox.get(block=idle)()
                    idle = False
            except queue.Empty:
                pass
            if self._closing or not self._has_work(engine):
                continue
            for output in engine.step():
                self._deliver(output)

    def _has_work(self, engine: Any) -> bool:
        """Whether a step has anything to do: requests, or the clean-up after them."""
        return engine.has_unfinished_requests() or has_cleanup(engine)

    def _deliver(self, output: Any) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        part = output.outputs[0]
        if part.finish_reason is not None and output.kv_transfer_params is None:
            # Ended by a stop string: vLLM's front end saw it, told its core to abort,
            # and has nothing of what the core says at an ordinary end.
            num_answers = stream.submission.options.n
            output.kv_transfer_params = reuse_of_aborted(
                self.facts.engine,
                answer_request_id(stream.engine_request_id, part.index, num_answers),
            )
        stream.feed(output)
        if output.finished:
            del self._streams[output.request_id]

    def _add(self, request_id: str, stream: RequestStream) -> None:
        if stream.done:
            return
        submission = stream.submission
        try:
            stream.engine_request_id = self._add_to_vllm(request_id, submission)
        except (ValueError, VLLMClientError) as error:
            stream.fail(ConfigError(f"vLLM refused the request: {error}"))
        except Exception as error:
            # One client's request must not end the others'.
            failure = EngineError(f"the request could not be started: {error!r}")
            failure.__cause__ = error
            stream.fail(failure)
        else:
            self._streams[request_id] = stream

    def _add_to_vllm(self, request_id: str, submission: Submission) -> str:
        params = SamplingParams(
            **submission.sampling_fields, output_kind=RequestOutputKind.DELTA
        )
        guide = submission.options.structured_outputs
        if guide is not None:
            params.structured_outputs = structured_outputs_params(guide)
        transfer = submission.kv_transfer_params
        if transfer is not None:
            params.extra_args = {"kv_transfer_params": transfer}
        prompt = tokens_input(
            list(submission.layout.token_ids), cache_salt=submission.cache_salt
        )
        return str(
            self.facts.engine.add_request(
                request_id,
                prompt,
                params,
                arrival_time=submission.arrival_time,
                priority=submission.options.priority,
            )
        )

    def _abort(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            # Somebody may wait for it in another thread.
            stream.fail(EngineClosedError("the request was aborted by its client"))
            # By vLLM's own id: by ours, it would keep what ties several answers
            # together for good.
            self.facts.engine.abort_request([stream.engine_request_id], internal=True)

    def _end_streams(self) -> None:
        error: DaricError = EngineClosedError(
            "the engine was closed before it answered; open a new EmbeddedEngine"
        )
        if self._failure is not None:
            error = EngineError(
                f"the engine failed: {self._failure!r}; open a new EmbeddedEngine"
            )
            error.__cause__ = self._failure
        for stream in self._streams.values():
            # One that fails must not keep the others' callers waiting.
            with suppress(Exception):
                stream.fail(error)
        self._streams.clear()

    def _drain(self) -> None:
        """Answer what arrived while the loop was ending."""
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                break
            # One that fails must not keep the others' callers waiting.
            with suppress(Exception):
                command()
        self._end_streams()
