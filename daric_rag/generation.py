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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to generate, checked before any work.

    Attributes:
        max_tokens: Most tokens to generate, at least 1.
        temperature: At least 0; 0 is greedy.
        top_p: Nucleus, in (0, 1].
        stop: Strings that end the answer and are cut from it.
        seed: Of this request's sampling; None is unseeded.
        logprobs: Log-probabilities of this many most likely tokens per generated
            token, beside the generated one; None for none.
        reuse: See `Reuse`.
        ignore_eos: Go on after the end-of-turn token, for benchmarks.
        conversation: Id of a conversation whose prompts grow by whole chunks, so that
            a longer prompt takes its earlier blocks from vLLM's prefix cache.
        namespace: Tenant of this request; None is the configuration's.
        trace: Have the engine tell what became of every chunk, and when.
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

    def __post_init__(self) -> None:
        """Check every option, so that nothing is refused halfway."""
        _check_int("max_tokens", self.max_tokens, minimum=1)
        _check_temperature(self.temperature)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p is {self.top_p!r}; it must be a number above 0 and at most 1"
            )
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, minimum=0)
        if self.seed is not None:
            _check_int("seed", self.seed, minimum=0)
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
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} is {value!r}; it must be an int of >= {minimum}")


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
