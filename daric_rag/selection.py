"""Which tokens are recomputed: Algorithm 1 behind a small protocol (section 3.2.2).

A policy is a pure function from chunk spans to half-open windows; no other module
knows which one is in use. The same function runs on the client, to show what will be
recomputed, and on the scheduler side, which decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from daric_rag.allocation import solve
from daric_rag.config import DaricConfig, PolicyName
from daric_rag.errors import ConfigError, PromptError

__all__ = [
    "DaricPolicy",
    "EqualPolicy",
    "ReuseMode",
    "SelectionPolicy",
    "Span",
    "merge",
    "policy_for",
    "recompute_set",
    "subtract",
    "total_len",
]

Span = tuple[int, int]
"""Token positions [start, end)."""

ReuseMode = Literal["daric", "full_reuse"]

# Line 9 of Algorithm 1.
_MAX_COMPENSATIONS = 3


class SelectionPolicy(Protocol):
    """Chooses the tokens of cached chunks whose KV is computed again.

    Attributes:
        name: The value of `DaricConfig.policy` that selects it.
    """

    name: str

    def select(
        self,
        spans: Sequence[Span],
        config: DaricConfig,
        side_data: Sequence[object] | None = None,
    ) -> tuple[Span, ...]:
        """Return windows to recompute; mutates nothing.

        Args:
            spans: Every chunk's [start, end), a partition of the prompt, [M].
            config: The budget and the policy's own settings.
            side_data: What the store keeps beside each chunk's KV, or None, [M].

        Returns:
            Sorted, disjoint, non-touching windows outside the first chunk (an exact
            prefix), at most ``M * config.avg_chunk_budget`` tokens together. There may
            be many, and they may be short.
        """
        ...


class DaricPolicy:
    """Algorithm 1: heads that grow with the chunk's index, and the latest window."""

    name = "daric"

    def select(
        self,
        spans: Sequence[Span],
        config: DaricConfig,
        side_data: Sequence[object] | None = None,
    ) -> tuple[Span, ...]:
        """Return Algorithm 1's windows; see `SelectionPolicy.select`."""
        if len(spans) < 2:
            return ()
        allocation = solve(
            len(spans), config.avg_chunk_budget, config.initial_ratio, config.mtaf
        )
        windows = _windows(spans, allocation.head_lens, allocation.latest_len)
        return _compensate(
            windows,
            total_budget=len(spans) * config.avg_chunk_budget,
            floor=spans[0][1],
        )


class EqualPolicy:
    """Equal heads, as EPIC selects them, within DARIC's budget.

    n_avg tokens at the head of every chunk but the first, and the n_avg latest ones.
    What overlap or short chunks lose is not given back: compensation is DARIC's.
    """

    name = "equal"

    def select(
        self,
        spans: Sequence[Span],
        config: DaricConfig,
        side_data: Sequence[object] | None = None,
    ) -> tuple[Span, ...]:
        """Return equal heads and the latest window; see `SelectionPolicy.select`."""
        if len(spans) < 2:
            return ()
        budget = config.avg_chunk_budget
        return _windows(spans, [budget] * (len(spans) - 1), budget)


_POLICIES: dict[PolicyName, SelectionPolicy] = {
    "daric": DaricPolicy(),
    "equal": EqualPolicy(),
}


def policy_for(config: DaricConfig) -> SelectionPolicy:
    """Return the policy that `config.policy` names. Policies have no state."""
    return _POLICIES[config.policy]


def recompute_set(
    spans: Sequence[Span],
    reusable: Sequence[bool],
    config: DaricConfig,
    *,
    mode: ReuseMode = "daric",
    side_data: Sequence[object] | None = None,
) -> tuple[Span, ...]:
    """Return everything that must be computed in full context.

    That is the policy's windows (none with ``mode="full_reuse"``), every chunk that is
    not reusable, and the last token, whose output starts the answer.

    Args:
        spans: Every chunk's [start, end), a partition of [0, L), [M].
        reusable: Whether each chunk's KV may come from the store, [M].
        config: Selection settings.
        mode: ``"daric"`` or ``"full_reuse"``.
        side_data: Passed on to the policy, [M].

    Returns:
        Sorted, disjoint, non-touching windows; never empty.

    Raises:
        PromptError: There is no token, or the two sequences differ in length.
        ConfigError: The mode is unknown.
    """
    if mode not in ("daric", "full_reuse"):
        raise ConfigError(f'mode is {mode!r}; it must be "daric" or "full_reuse"')
    if not spans or spans[-1][1] < 1:
        raise PromptError("the prompt has no token; pass at least the question")
    if len(spans) != len(reusable):
        raise PromptError(
            f"{len(spans)} spans and {len(reusable)} reusable flags; give one per chunk"
        )
    prompt_len = spans[-1][1]
    windows: list[Span] = [(prompt_len - 1, prompt_len)]
    windows += [span for span, keep in zip(spans, reusable, strict=True) if not keep]
    if mode == "daric":
        windows += policy_for(config).select(spans, config, side_data)
    return merge(windows)


def merge(windows: Iterable[Span]) -> tuple[Span, ...]:
    """Sort windows and unite those that overlap or touch; empty ones vanish."""
    merged: list[Span] = []
    for start, end in sorted(windows):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def subtract(windows: Iterable[Span], prefix_len: int) -> tuple[Span, ...]:
    """Drop what lies in [0, prefix_len): the refinement of section 3.3.2.

    Windows keep their order; one that straddles the prefix's end is cut there.
    """
    return tuple(
        (max(start, prefix_len), end) for start, end in windows if end > prefix_len
    )


def total_len(windows: Iterable[Span]) -> int:
    """Return the tokens in disjoint windows."""
    return sum(end - start for start, end in windows)


def _windows(
    spans: Sequence[Span], head_lens: Sequence[int], latest_len: int
) -> tuple[Span, ...]:
    # Lines 2-7. A head is clamped to its own chunk (the paper's would run on into the
    # next one) and the latest window stops at the first chunk, an exact prefix.
    prompt_len = spans[-1][1]
    heads = [
        (start, min(start + head_len, end))
        for (start, end), head_len in zip(spans[1:], head_lens, strict=True)
    ]
    latest = (max(prompt_len - latest_len, spans[0][1]), prompt_len)
    return merge([*heads, latest])


def _compensate(
    windows: tuple[Span, ...], *, total_budget: int, floor: int
) -> tuple[Span, ...]:
    # Lines 8-16. The paper reuses the name n_avg for the shortfall within the loop
    # that also tests it; the text (section 3.3.1) says that the target stays M*n_avg.
    # Its pseudocode could also prepend tokens of the first chunk, or negative ones.
    # The first chunk is exact as it is, so prepending ends where it ends and whatever
    # is left of the shortfall stays unspent.
    for _ in range(_MAX_COMPENSATIONS):
        shortfall = total_budget - total_len(windows)
        if shortfall <= 0 or not windows or windows[-1][0] <= floor:
            break
        start, end = windows[-1]
        windows = merge([*windows[:-1], (max(start - shortfall, floor), end)])
    return windows
