"""How many tokens of each chunk are recomputed: MTAFs and equation 4 (section 3.2.2).

Equation 4 asks for a, b and n_l such that, with n_i = a * f(i) + b,

    n_2 = r * n_avg        n_M = n_l        n_2 + ... + n_M + n_l = M * n_avg.

With h(i) = f(i) - f(2) its solution is

    n_i = r * n_avg + M * n_avg * (1 - r) * h(i) / (h(2) + ... + h(M) + h(M)).

Adding a constant to f or scaling it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from daric_rag.config import MtafName
from daric_rag.errors import ConfigError

__all__ = ["MTAFS", "Allocation", "Mtaf", "exp", "linear", "log", "solve"]

# f(chunk index i in 2..M, num_chunks M); strictly increasing in i.
Mtaf = Callable[[int, int], float]

# Values of f become integers in units of 2**-64, which makes all that follows exact:
# floors then neither lose a token to 31.999999999 nor sum to more than the budget.
_FIXED_POINT_BITS = 64


def linear(index: int, num_chunks: int) -> float:
    """Grow at a constant rate, f(x) = x: the paper's default."""
    return float(index)


def log(index: int, num_chunks: int) -> float:
    """Grow ever more slowly: f(x) is the natural logarithm of x."""
    return math.log(index)


def exp(index: int, num_chunks: int) -> float:
    """Favour the latest chunks, f(x) = e^x over e^M, which cancels: no overflow."""
    return math.exp(index - num_chunks)


MTAFS: dict[MtafName, Mtaf] = {"linear": linear, "log": log, "exp": exp}


@dataclass(frozen=True)
class Allocation:
    """Tokens to recompute, before windows are clamped to what exists.

    Attributes:
        head_lens: n_2 .. n_M in tokens, one per chunk but the first. A small budget
            can make the first ones 0.
        latest_len: n_l, the last tokens of the prompt.
    """

    head_lens: tuple[int, ...]
    latest_len: int


@lru_cache(maxsize=256)
def solve(
    num_chunks: int, avg_chunk_budget: int, initial_ratio: float, mtaf: MtafName
) -> Allocation:
    """Solve equation 4 and round every window down to whole tokens.

    Two corners the paper leaves open: one chunk has no head windows and only its last
    token is computed; with two chunks equation 4 is inconsistent for r != 1, and both
    windows get n_avg.

    Args:
        num_chunks: M, the question included.
        avg_chunk_budget: n_avg, in tokens.
        initial_ratio: r, in (0, 1).
        mtaf: f.

    Returns:
        Windows whose lengths sum to at most ``num_chunks * avg_chunk_budget``.

    Raises:
        ConfigError: An argument lies outside its range.
    """
    _check(num_chunks, avg_chunk_budget, initial_ratio, mtaf)
    if num_chunks == 1:
        return Allocation((), 1)
    if num_chunks == 2:
        return Allocation((avg_chunk_budget,), avg_chunk_budget)

    f = MTAFS[mtaf]
    fixed = [
        int(math.ldexp(f(index, num_chunks), _FIXED_POINT_BITS))
        for index in range(2, num_chunks + 1)
    ]
    heights = [value - fixed[0] for value in fixed]  # h(2) = 0 .. h(M), [M - 1]
    height_sum = sum(heights) + heights[-1]
    # r as the decimal that was written: 0.7 * 10 is then 7, not 6.999999999999999556.
    ratio = Fraction(repr(float(initial_ratio)))
    p, q = ratio.numerator, ratio.denominator
    first = p * avg_chunk_budget * height_sum
    slope = (q - p) * num_chunks * avg_chunk_budget
    head_lens = tuple(
        (first + slope * height) // (q * height_sum) for height in heights
    )
    return Allocation(head_lens, head_lens[-1])


def _check(
    num_chunks: int, avg_chunk_budget: int, initial_ratio: float, mtaf: str
) -> None:
    if num_chunks < 1 or avg_chunk_budget < 1:
        raise ConfigError(
            f"num_chunks is {num_chunks} and avg_chunk_budget {avg_chunk_budget}; "
            f"both must be at least 1"
        )
    if not 0.0 < initial_ratio < 1.0:
        raise ConfigError(
            f"initial_ratio is {initial_ratio}; it must be above 0 and below 1"
        )
    if mtaf not in MTAFS:
        raise ConfigError(f"mtaf is {mtaf!r}; it must be one of {', '.join(MTAFS)}")
