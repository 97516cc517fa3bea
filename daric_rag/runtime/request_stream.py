"""One request's way back to its client: vLLM's outputs become deltas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from daric_rag.engine import Completion, Delta, GenerationOptions, ReuseStats
from daric_rag.errors import EngineError
from daric_rag.layout import PromptLayout
from daric_rag.trace import RequestTrace
from daric_rag.wire import (
    RequestWire,
    decode_reuse,
    decode_trace,
    encode_request,
    salt_of,
)

__all__ = ["DeltaIterator", "RequestStream", "Submission"]


@dataclass(frozen=True, slots=True)
class Submission:
    """A request, checked and laid out, ready for the engine.

    Attributes:
        layout: Its tokens and chunks.
        wire: Its entry for the scheduler side; None for an ordinary request.
        options: How to generate; ``max_tokens`` fits into the model's context.
        arrival_time: When its client came with it, by `time.time`: of equal priority,
            who came first is first, whoever is laid out first. None for now.
    """

    layout: PromptLayout
    wire: RequestWire | None
    options: GenerationOptions
    arrival_time: float | None = None

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What vLLM hands to the connector, unread."""
        return None if self.wire is None else encode_request(self.wire)

    @property
    def cache_salt(self) -> str | None:
        """What keeps its blocks in vLLM's prefix cache apart from others'."""
        return None if self.wire is None else salt_of(self.wire)

    @property
    def sampling_fields(self) -> dict[str, Any]:
        """How to sample, by the names that vLLM's engine and HTTP API share."""
        options = self.options
        return {
            "n": options.n,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "min_p": options.min_p,
            "presence_penalty": options.presence_penalty,
            "frequency_penalty": options.frequency_penalty,
            "repetition_penalty": options.repetition_penalty,
            "stop": options.stop_list,
            "seed": options.seed,
            "logprobs": options.logprobs,
            "ignore_eos": options.ignore_eos,
            "skip_special_tokens": options.skip_special_tokens,
        }


@dataclass(slots=True)
class _Answer:
    """One answer to a request, as far as it has come; the fields are `Completion`'s."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    ttft_s: float = 0.0
    completion: Completion | None = None


class RequestStream:
    """Client process. Collects answers; `feed` runs in the engine's thread.

    Args:
        submission: The request.
        put: Takes deltas, or the error that ends them; called from the engine's
            thread, must not block.
    """

    def __init__(
        self, submission: Submission, put: Callable[[Delta | BaseException], None]
    ) -> None:
        """Start the clock of TTFT: a request counts from its submission."""
        self.submission = submission
        self._put = put
        self._submitted_s = time.perf_counter()
        self._answers = [_Answer() for _ in range(submission.options.n)]
        self.done = False
        self.engine_request_id = ""
        self._abort: Callable[[], None] = lambda: None

    def on_abort(self, abort: Callable[[], None]) -> None:
        """Say how the engine is told; called once, at submission."""
        self._abort = abort

    def abort(self) -> None:
        """Stop generating; harmless after the end."""
        if not self.done:
            self._abort()

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        if not self.done:
            self.done = True
            self._put(error)

    def feed(self, output: Any) -> None:
        """Take one of vLLM's delta outputs.

        Each continues one answer. Its counts come with its own last output, and
        ``finished`` is true once all answers are.
        """
        if self.done:
            return
        part = output.outputs[0]
        if part.finish_reason == "error":
            self.abort()
            self.fail(
                EngineError(
                    "vLLM gave the request up, such as where it cannot compile what "
                    "guides decoding; its log says why"
                )
            )
            return
        answer = self._answers[part.index]
        if not answer.token_ids and part.token_ids:
            # TTFT ends where the first token reaches the client process.
            answer.ttft_s = time.perf_counter() - self._submitted_s
        logprobs = _logprobs(part.logprobs)
        answer.text.append(part.text)
        answer.token_ids.extend(part.token_ids)
        answer.logprobs.extend(logprobs or ())
        if part.finish_reason is not None:
            answer.completion = self._completion(answer, output)
        self.done = output.finished
        completion = self._all_answers() if output.finished else None
        self._put(
            Delta(part.text, tuple(part.token_ids), logprobs, completion, part.index)
        )

    def _completion(self, answer: _Answer, output: Any) -> Completion:
        wanted = self.submission.options.logprobs is not None
        return Completion(
            text="".join(answer.text),
            token_ids=tuple(answer.token_ids),
            finish_reason=output.outputs[0].finish_reason,
            logprobs=tuple(answer.logprobs) if wanted else None,
            ttft_s=answer.ttft_s,
            reuse=self._reuse(output),
            trace=self._trace(output),
        )

    def _all_answers(self) -> Completion:
        """Return the first answer with the others as its alternatives."""
        done = [answer.completion for answer in self._answers]
        first, *others = [completion for completion in done if completion is not None]
        return replace(first, alternatives=tuple(others))

    def _trace(self, output: Any) -> RequestTrace | None:
        wire = self.submission.wire
        if wire is None or not wire.trace:
            return None
        return decode_trace(output.kv_transfer_params)

    def _reuse(self, output: Any) -> ReuseStats:
        layout = self.submission.layout
        if self.submission.wire is None:
            cached = output.num_cached_tokens or 0
            return ReuseStats(
                prompt_tokens=layout.prompt_len,
                padding_tokens=layout.padding_len,
                num_chunks=layout.num_chunks,
                gpu_prefix_tokens=cached,
                recomputed_tokens=layout.prompt_len - cached,
                reason='reuse="off"',
            )
        stats = decode_reuse(output.kv_transfer_params, ReuseStats)
        if stats is None:
            stats = ReuseStats(
                prompt_tokens=layout.prompt_len,
                reason="the engine runs without daric_rag's connector",
            )
        return replace(
            stats, padding_tokens=layout.padding_len, num_chunks=layout.num_chunks
        )


class DeltaIterator(Iterator[Delta]):
    """Client process. An answer's deltas; closing or dropping it ends the request.

    Not a generator: one that was never started would not notice its end, and the
    request would run on for nobody.

    Args:
        stream: The request, submitted.
        take: Waits for what the stream puts.
    """

    def __init__(
        self, stream: RequestStream, take: Callable[[], Delta | BaseException]
    ) -> None:
        """Wait for nothing yet."""
        self._stream, self._take = stream, take
        self._ended = False

    def __next__(self) -> Delta:
        """Return the next delta; raises what ended the request."""
        if self._ended:
            raise StopIteration
        item = self._take()
        if self._ended:  # closed by another thread meanwhile
            raise StopIteration
        if isinstance(item, BaseException):
            self._ended = True
            try:
                raise item
            finally:
                # Its traceback holds this frame and its callers'.
                del item
        self._ended = item.completion is not None
        return item

    def close(self) -> None:
        """End the request; harmless after its end."""
        self._ended = True
        self._stream.abort()

    def __del__(self) -> None:
        """Close."""
        self.close()


def _logprobs(entries: Any) -> tuple[dict[int, float], ...] | None:
    if entries is None:
        return None
    return tuple(
        {int(token): float(entry.logprob) for token, entry in position.items()}
        for position in entries
    )
