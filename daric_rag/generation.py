"""How a request is answered: the options that every engine takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

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
        for name in ("ignore_eos", "trace"):
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
