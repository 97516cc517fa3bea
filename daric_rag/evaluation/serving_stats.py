"""Figures of requests that were served side by side; nothing here runs any."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from daric_rag.engine import ReuseStats

__all__ = [
    "Served",
    "intervals_within",
    "linear_fit",
    "poisson_arrivals",
    "quantile",
    "queue_growth",
    "serving_row",
]

_MAX_QUEUE_GROWTH = 1.0


@dataclass(frozen=True, slots=True)
class Served:
    """One request from its arrival on; seconds on one clock.

    Attributes:
        due_s: When the schedule has it arrive.
        token_times_s: When each piece with new tokens reached the client, [>= 1].
        reuse: Where its prompt's KV came from.
    """

    due_s: float
    token_times_s: tuple[float, ...]
    reuse: ReuseStats

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.token_times_s[0] - self.due_s

    @property
    def end_s(self) -> float:
        """When the last token arrived."""
        return self.token_times_s[-1]


def poisson_arrivals(num: int, rate_per_s: float, seed: int) -> list[float]:
    """Return ascending arrival times in seconds, [num].

    One seed gives one pattern: another rate only stretches it.
    """
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(num):
        now += rng.expovariate(1.0)
        times.append(now / rate_per_s)
    return times


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of the values do not exceed.

    Nearest rank: always a value that occurred, so p99 of few values is their maximum.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("a quantile needs at least one value")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def queue_growth(served: Sequence[Served]) -> float:
    """Return by how many requests the queue grew while the requests came.

    Every arrival meets some number of earlier requests that are unfinished. The growth
    is its mean over the later half of the arrivals less that over the earlier half.
    """
    ordered = sorted(served, key=lambda one: one.due_s)
    met = [
        sum(earlier.end_s > one.due_s for earlier in ordered[:index])
        for index, one in enumerate(ordered)
    ]
    middle = len(met) // 2
    if middle == 0:
        return 0.0
    return statistics.fmean(met[middle:]) - statistics.fmean(met[:middle])


def serving_row(served: Sequence[Served]) -> dict[str, Any]:
    """Return the figures of one stretch of requests; times in milliseconds.

    ``inter_token_*`` is None if no answer came in more than one piece.
    """
    prompt_tokens = sum(one.reuse.prompt_tokens for one in served)
    ttft_s = [one.ttft_s for one in served]
    gaps_s = [b - a for one in served for a, b in pairwise(one.token_times_s)]
    span_s = max(one.end_s for one in served) - min(one.due_s for one in served)
    growth = queue_growth(served)
    return {
        "requests": len(served),
        "prompt_tokens": prompt_tokens,
        "ttft_p50_ms": _ms(quantile(ttft_s, 0.5)),
        "ttft_p95_ms": _ms(quantile(ttft_s, 0.95)),
        "inter_token_p50_ms": _ms(quantile(gaps_s, 0.5)) if gaps_s else None,
        "inter_token_p99_ms": _ms(quantile(gaps_s, 0.99)) if gaps_s else None,
        "input_tokens_per_s": round(prompt_tokens / span_s, 1),
        "store_hit_share": _share(served, "hit_tokens", prompt_tokens),
        "prefix_hit_share": _share(served, "gpu_prefix_tokens", prompt_tokens),
        "generated_share": _share(served, "generated_tokens", prompt_tokens),
        "queue_growth_requests": round(growth, 2),
        "sustained": growth <= _MAX_QUEUE_GROWTH,
    }


def intervals_within(
    token_times_s: Sequence[float], start_s: float, end_s: float
) -> list[float]:
    """Return the intervals between a stream's tokens that touch [start_s, end_s).

    Whole ones: a token that waited for the end waited for all of it.
    """
    return [b - a for a, b in pairwise(token_times_s) if b > start_s and a < end_s]


def linear_fit(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """Return slope, intercept and R^2 of the least-squares line; R^2 is 1 if flat."""
    slope, intercept = statistics.linear_regression(xs, ys)
    mean = statistics.fmean(ys)
    total = sum((y - mean) ** 2 for y in ys)
    rest = sum((y - slope * x - intercept) ** 2 for x, y in zip(xs, ys, strict=True))
    return slope, intercept, 1.0 - rest / total if total else 1.0


def _share(served: Sequence[Served], name: str, prompt_tokens: int) -> float:
    tokens: int = sum(getattr(one.reuse, name) for one in served)
    return round(tokens / prompt_tokens, 4)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
