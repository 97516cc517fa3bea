"""Answers as LlamaIndex's responses: text, token usage, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
)

from daric_rag.engine import Completion, Delta

__all__ = ["Answer", "GrowingAnswer", "decoder_of", "raw_of"]

Decode = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, or what there is of it so far.

    Attributes:
        text: All of it up to here.
        logprobs: Of the tokens that are new, [num_tokens][num_candidates]; the
            generated one first, then the likeliest ones. None if not asked for.
        delta: What is new of the text; None if nothing was streamed.
        completion: The whole answer, once it is there.
        model: Its name.
    """

    text: str
    logprobs: list[list[LogProb]] | None
    delta: str | None = None
    completion: Completion | None = None
    model: str = ""

    @classmethod
    def of(cls, completion: Completion, model: str, decode: Decode) -> Answer:
        """Return a whole answer."""
        logprobs = _logprobs(completion, decode)
        return cls(completion.text, logprobs, None, completion, model)

    def chat(self) -> ChatResponse:
        """Return it as a chat's response."""
        message = ChatMessage(role=MessageRole.ASSISTANT, content=self.text)
        return ChatResponse(message=message, **self._fields())

    def complete(self) -> CompletionResponse:
        """Return it as a completion's response."""
        return CompletionResponse(text=self.text, **self._fields())

    def _fields(self) -> dict[str, Any]:
        fields = {"delta": self.delta, "logprobs": self.logprobs}
        if self.completion is None:
            return fields
        raw = raw_of(self.completion, self.model)
        counts = {
            name: raw["usage"][name]
            for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        }
        cached = raw["usage"]["prompt_tokens_details"]["cached_tokens"]
        more = {"finish_reason": raw["finish_reason"], "cached_tokens": cached}
        return fields | {"raw": raw, "additional_kwargs": counts | more}


class GrowingAnswer:
    """Puts an answer together from its deltas.

    Args:
        model: Its name.
        decode: Returns a token's text.
    """

    def __init__(self, model: str, decode: Decode) -> None:
        """Begin with nothing."""
        self._text = ""
        self._model, self._decode = model, decode

    def add(self, delta: Delta) -> Answer:
        """Return the answer as it is with one more delta."""
        self._text += delta.text
        logprobs = _logprobs(delta, self._decode)
        return Answer(self._text, logprobs, delta.text, delta.completion, self._model)


def raw_of(completion: Completion, model: str) -> dict[str, Any]:
    """Return an answer's facts in plain values, its usage in OpenAI's form.

    ``cached_tokens`` are those that were not computed for this prompt: from the store
    and from vLLM's prefix cache. ``reuse`` has every count of `ReuseStats`.
    """
    reuse = completion.reuse
    num_generated = len(completion.token_ids)
    return {
        "model": model,
        "finish_reason": completion.finish_reason,
        "token_ids": list(completion.token_ids),
        "ttft_s": completion.ttft_s,
        "usage": {
            "prompt_tokens": reuse.prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": reuse.prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": reuse.reused_tokens},
        },
        "reuse": asdict(reuse) | {"hit_tokens": reuse.hit_tokens},
    } | ({} if completion.trace is None else {"trace": asdict(completion.trace)})


def decoder_of(engine: Any) -> Decode:
    """Return what tells a token's text: the engine's tokenizer, if it can.

    Without one a token is called ``token_id:N``, as vLLM's server does on request.
    """
    decode = getattr(getattr(engine, "tokenizer", None), "decode", None)
    if not callable(decode):
        return "token_id:{}".format
    return lambda token_id: str(decode([token_id]))


def _logprobs(answer: Completion | Delta, decode: Decode) -> list[list[LogProb]] | None:
    if answer.logprobs is None:
        return None
    steps: Sequence[tuple[int, dict[int, float]]]
    steps = list(zip(answer.token_ids, answer.logprobs, strict=True))
    return [
        [
            LogProb(token=decode(token_id), logprob=candidates[token_id])
            for token_id in sorted(
                candidates, key=lambda i: (i != generated, -candidates[i])
            )
        ]
        for generated, candidates in steps
    ]
