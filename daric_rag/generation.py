"""How a request is answered: the options that every engine takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from daric_rag.config import shown
from daric_rag.errors import ConfigError

__all__ = ["GenerationOptions", "Reuse"]

Reuse = Literal["daric", "full_reuse", "off"]
"""``daric``: reuse and partial recomputation; ``full_reuse``: reuse, recompute nothing
but the question; ``off``: an ordinary request, exactly as vLLM alone would run it."""

_REUSE = ("daric", "full_reuse", "off")

# Integers travel to the engine's process as 64 bits.
_INT_END = 2**63

# vLLM takes temperatures below this for greedy.
_GREEDY_END = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to generate, checked before any work.

    Attributes:
        max_tokens: Most tokens to generate, at least 1.
        temperature: At least 0; 0 is greedy.
        top_p: Nucleus, in (0, 1].
        top_k: Only so many most likely tokens are drawn from; 0: all.
        min_p: Only tokens at least so likely as this share of the likeliest one's
            probability, in [0, 1].
        presence_penalty: Taken from the logit of every token of the answer so far, in
            [-2, 2].
        frequency_penalty: The same, once per occurrence, in [-2, 2].
        repetition_penalty: Divides the logit of every token of prompt and answer, above
            0; 1 is none.
        stop: Strings that end the answer and are cut from it.
        seed: Of this request's sampling; None is unseeded. Answer i of several is
            drawn with ``seed + i``, counted from 0.
        logprobs: Log-probabilities of this many most likely tokens per generated
            token, beside the generated one; None for none.
        reuse: See `Reuse`.
        ignore_eos: Go on after the end-of-turn token, for benchmarks.
        conversation: Id of a conversation whose prompts grow by whole chunks, so that
            a longer prompt takes its earlier blocks from vLLM's prefix cache.
        namespace: Tenant of this request; None is the configuration's.
        trace: Have the engine tell what became of every chunk, and when.
        n: Answers to draw, at least 1. They share the prompt's KV; several need a
            temperature above 0.
        priority: Requests of a lower one are scheduled first. Other than 0 only with
            an engine opened with ``scheduling_policy="priority"``.
        json_schema: The answer is JSON of this schema. This and the next four are
            guided decoding, of which a request has one: tokens that do not fit are
            never drawn. An answer that ``max_tokens`` or ``stop`` ends is cut short all
            the same.
        json_object: Whether the answer is a JSON object, of whatever fields.
        regex: The whole answer matches it.
        choice: The answer is one of these texts.
        structural_tag: Parts of the answer follow schemas, as xgrammar's structural
            tags describe it; a mapping.
        skip_special_tokens: Leave them out of the answer's text, though not out of its
            tokens.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    stop: str | Sequence[str] | None = None
    seed: int | None = None
    logprobs: int | None = None
    reuse: Reuse = "daric"
    ignore_eos: bool = False
    conversation: str | None = None
    namespace: str | None = None
    trace: bool = False
    n: int = 1
    priority: int = 0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    structural_tag: Mapping[str, Any] | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Check every option, so that nothing is refused halfway."""
        _check_int("max_tokens", self.max_tokens, minimum=1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, minimum=0)
        _check_int("priority", self.priority, minimum=-_INT_END)
        _check_sampling(self)
        if self.reuse not in _REUSE:
            raise ConfigError(
                f"reuse is {self.reuse!r}; it must be one of {', '.join(_REUSE)}"
            )
        _check_stop(self.stop)
        _check_guide(self)
        for name in ("ignore_eos", "trace", "json_object", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {shown(value)}; it must be a bool")
        for name in ("conversation", "namespace"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(
                    f"{name} is {value!r}; it must be a non-empty str or None"
                )

    @property
    def stop_list(self) -> list[str]:
        """Stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def structured_outputs(self) -> dict[str, Any] | None:
        """What guides decoding, by vLLM's names; None if nothing does."""
        if self.json_schema is not None:
            return {"json": dict(self.json_schema)}
        if self.json_object:
            return {"json_object": True}
        if self.regex is not None:
            return {"regex": self.regex}
        if self.choice is not None:
            return {"choice": list(self.choice)}
        if self.structural_tag is not None:
            return {"structural_tag": json.dumps(self.structural_tag)}
        return None


def _check_int(name: str, value: object, *, minimum: int) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not minimum <= value < _INT_END
    ):
        raise ConfigError(
            f"{name} is {shown(value)}; it must be an int of >= {minimum} and < 2**63"
        )


def _check_sampling(options: GenerationOptions) -> None:
    _check_temperature(options.temperature)
    if not _is_number(options.top_p) or not 0 < options.top_p <= 1:
        raise ConfigError(
            f"top_p is {options.top_p!r}; it must be a number above 0 and at most 1"
        )
    _check_int("top_k", options.top_k, minimum=0)
    _check_range("min_p", options.min_p, 0, 1)
    _check_range("presence_penalty", options.presence_penalty, -2, 2)
    _check_range("frequency_penalty", options.frequency_penalty, -2, 2)
    penalty = options.repetition_penalty
    if not _is_number(penalty) or not 0 < penalty <= sys.float_info.max:
        raise ConfigError(
            f"repetition_penalty is {shown(penalty)}; it must be a finite number above "
            f"0"
        )
    if options.seed is not None:
        _check_int("seed", options.seed, minimum=0)
    _check_int("n", options.n, minimum=1)
    if options.n > 1 and options.temperature < _GREEDY_END:
        raise ConfigError(
            f"n is {options.n} and greedy answers are all the same; pass a "
            f"temperature above 0, such as 0.7, or n=1"
        )


def _check_temperature(value: object) -> None:
    # Compared with a float's largest: an int may exceed it.
    if not _is_number(value) or not 0 <= value <= sys.float_info.max:
        raise ConfigError(
            f"temperature is {shown(value)}; it must be a finite number of at least 0"
        )


def _check_range(name: str, value: object, lowest: int, highest: int) -> None:
    if not _is_number(value) or not lowest <= value <= highest:
        raise ConfigError(
            f"{name} is {shown(value)}; it must be a number in [{lowest}, {highest}]"
        )


def _check_guide(options: GenerationOptions) -> None:
    """Check what guides decoding: one thing, in a form that can be sent."""
    given = [
        name
        for name in ("json_schema", "regex", "choice", "structural_tag")
        if getattr(options, name) is not None
    ]
    if options.json_object is True:
        given.append("json_object")
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} cannot be combined; pass one of them")
    for name in ("json_schema", "structural_tag"):
        _check_json(name, getattr(options, name))
    if options.regex is not None and not isinstance(options.regex, str):
        raise ConfigError(f"regex is {shown(options.regex)}; it must be a str or None")
    choice = options.choice
    if choice is not None and not (
        isinstance(choice, Sequence)
        and not isinstance(choice, str)
        and choice
        and all(isinstance(text, str) and text for text in choice)
    ):
        raise ConfigError(
            f"choice is {shown(choice)}; it must be a non-empty list of non-empty str"
        )


def _check_json(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name} is {shown(value)}; it must be a mapping, such as what a pydantic "
            f"model's model_json_schema() returns"
        )
    try:
        json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must be plain JSON values ({error})") from error


def _check_stop(stop: object) -> None:
    texts = [stop] if isinstance(stop, str) else stop
    if texts is not None and not (
        isinstance(texts, Sequence)
        and all(isinstance(text, str) and text for text in texts)
    ):
        raise ConfigError(
            f"stop is {stop!r}; it must be a non-empty str, a list of them or None"
        )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
