"""Requests and answers as vLLM's ``/v1/completions`` writes them. Pure.

Every request is streamed, so that TTFT can be told and a closed stream aborts. vLLM
itself says nothing of ``kv_transfer_params`` in streams; the server's
`DaricMiddleware` adds an event with them, to whom asks for it by `REUSE_HEADER`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from daric_rag.engine import ReuseStats
from daric_rag.runtime.remote_errors import ServerErrors
from daric_rag.runtime.request_stream import Submission
from daric_rag.wire import encode_reuse

__all__ = [
    "MAX_COUNTED",
    "REUSE_HEADER",
    "AnswerReader",
    "EventDecoder",
    "RemoteOutput",
    "completion_body",
]

REUSE_HEADER = "x-daric-reuse"
"""Request header that asks for reuse counts in the stream, of so many answers."""

MAX_COUNTED = 64
"""Answers of one request whose counts are told: who asks must not hold engines up."""

_DONE = "[DONE]"
# Of a token in log-probabilities, which are asked for by id: texts are ambiguous.
_TOKEN = "token_id:"
# What vLLM writes for minus infinity, which JSON lacks.
_LOWEST_LOGPROB = -9999.0


def completion_body(submission: Submission, model: str, *, reuses: bool) -> bytes:
    """Return a request's body.

    Args:
        submission: The request.
        model: The model's name on the server.
        reuses: Whether the server has our connector. To any other one the layout means
            nothing, and its prefix cache needs no salt.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": submission.layout.token_ids,
        # All of them: what is left out a model's generation_config.json would decide.
        **submission.sampling_fields,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "priority": submission.options.priority,
    }
    guide = submission.options.structured_outputs
    if guide is not None:
        body["structured_outputs"] = guide
    if reuses and submission.wire is not None:
        body["kv_transfer_params"] = submission.kv_transfer_params
        body["cache_salt"] = submission.cache_salt
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


class EventDecoder:
    """Bytes of a server-sent event stream, cut anywhere, to its events' data."""

    def __init__(self) -> None:
        """Begin a stream."""
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[str]:
        """Take bytes and yield the data of every event that they complete."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data).decode(errors="replace")
                self._data.clear()


class _Logprob(NamedTuple):
    logprob: float


@dataclass(slots=True)
class _Part:
    """What is new of an answer, named as in vLLM's ``CompletionOutput``."""

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[Mapping[int, _Logprob]] | None = None
    finish_reason: str | None = None
    index: int = 0


@dataclass(slots=True)
class RemoteOutput:
    """One step of an answer, named as in vLLM's ``RequestOutput``."""

    outputs: list[_Part]
    finished: bool = False
    kv_transfer_params: Mapping[str, Any] | None = None
    num_cached_tokens: int | None = None


class AnswerReader:
    """Client process. A stream's events to what `RequestStream.feed` takes.

    Answers end with an output of their own each, for their counts come behind the last
    token of all.

    Args:
        submission: The request.
        errors: Of the server.
        unknown_reason: What to say of reuse where the server says nothing.

    Attributes:
        is_over: Whether the outputs that end the answers were made.
    """

    def __init__(
        self, submission: Submission, errors: ServerErrors, unknown_reason: str
    ) -> None:
        """Wait for the first event."""
        self._prompt_len = submission.layout.prompt_len
        self._num_answers = submission.options.n
        self._errors, self._unknown_reason = errors, unknown_reason
        # Parts without a token, which have log-probabilities all the same if asked for.
        wanted = submission.options.logprobs is not None
        self._logprobs: tuple[()] | None = () if wanted else None
        self._reasons: dict[int, str] = {}
        self._params: dict[int, Mapping[str, Any]] = {}
        self._num_cached_tokens: int | None = None
        self.is_over = False

    @property
    def is_complete(self) -> bool:
        """Whether the last token of every answer has arrived."""
        return len(self._reasons) == self._num_answers

    def take(self, data: str) -> Iterator[RemoteOutput]:
        """Take an event's data and yield what it means.

        Raises:
            DaricError: The event is an error, or is not vLLM's.
        """
        if self.is_over:
            return
        if data == _DONE:
            yield from self.end()
            return
        try:
            event = json.loads(data)
            error = event.get("error")
        except (ValueError, AttributeError):
            raise self._errors.of_protocol("sent an event that is no JSON") from None
        if error is not None:
            raise self._errors.of_event(error)
        try:
            self._note(event)
            outputs = [self._output(choice) for choice in event.get("choices", ())]
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise self._errors.of_protocol(
                f"sent an event of another form ({problem!r})"
            ) from problem
        yield from outputs

    def end(self) -> Iterator[RemoteOutput]:
        """Yield the outputs that end the answers; nothing when repeated.

        Raises:
            EngineError: They are not complete.
        """
        if self.is_over:
            return
        if not self.is_complete:
            raise self._errors.of_protocol("ended a stream without an answer")
        self.is_over = True
        for num_ended, index in enumerate(sorted(self._reasons), start=1):
            yield RemoteOutput(
                [_Part("", (), self._logprobs, self._reasons[index], index)],
                finished=num_ended == self._num_answers,
                kv_transfer_params=self._params.get(index, self._without_counts()),
                num_cached_tokens=self._num_cached_tokens,
            )

    def _output(self, choice: Mapping[str, Any]) -> RemoteOutput:
        index = choice["index"]
        if not 0 <= index < self._num_answers:
            raise ValueError(f"answer {index} of {self._num_answers}")
        if choice.get("finish_reason") is not None:
            self._reasons[index] = choice["finish_reason"]
        logprobs = choice.get("logprobs")
        part = _Part(
            text=choice["text"],
            token_ids=choice.get("token_ids") or (),
            logprobs=None if logprobs is None else _logprobs(logprobs["top_logprobs"]),
            index=index,
        )
        return RemoteOutput([part])

    def _note(self, event: Mapping[str, Any]) -> None:
        """Keep what an event says of a whole answer, or of all."""
        params = event.get("kv_transfer_params")
        if isinstance(params, Mapping):
            self._params[event.get("index", 0)] = params
        usage = event.get("usage")
        details = usage.get("prompt_tokens_details") if usage else None
        if details:
            self._num_cached_tokens = details.get("cached_tokens")

    def _without_counts(self) -> dict[str, Any]:
        cached = self._num_cached_tokens or 0
        stats = ReuseStats(
            prompt_tokens=self._prompt_len,
            gpu_prefix_tokens=cached,
            recomputed_tokens=self._prompt_len - cached,
            reason=self._unknown_reason,
        )
        return encode_reuse(stats)


def _logprobs(positions: Sequence[Mapping[str, float]]) -> list[dict[int, _Logprob]]:
    return [
        {
            int(token.removeprefix(_TOKEN)): _Logprob(
                -math.inf if value <= _LOWEST_LOGPROB else value
            )
            for token, value in position.items()
        }
        for position in positions
    ]
