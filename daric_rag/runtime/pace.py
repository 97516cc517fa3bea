"""How fast the engine computes, so that a slow store is not waited for."""

from __future__ import annotations

__all__ = ["Pace"]

# Short passes are mostly overhead and say little about a token's price.
_LEAST_LEN = 64
_WEIGHT = 0.3
# Even a good disk needs so long for the first record after a pause.
_LEAST_ALLOWANCE_S = 0.25
# Before anything was computed there is nothing to compare with. A request that is
# alone reads within its step, and whoever comes meanwhile waits as well.
_FIRST_ALLOWANCE_S = 3.0


class Pace:
    """Worker process. Seconds per computed token, averaged over recent passes."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._token_s: float | None = None

    @staticmethod
    def counts(num_tokens: int) -> bool:
        """Whether a pass of so many tokens is taken into account."""
        return num_tokens >= _LEAST_LEN

    def note(self, num_tokens: int, spent_s: float) -> None:
        """Take a forward pass into account.

        Args:
            num_tokens: Of all its sequences.
            spent_s: Seconds that it took.
        """
        if not self.counts(num_tokens):
            return
        token_s = spent_s / num_tokens
        if self._token_s is None:
            self._token_s = token_s
        self._token_s += _WEIGHT * (token_s - self._token_s)

    def allowance_s(self, num_tokens: int) -> float:
        """Return seconds that reading may take before computing would be faster."""
        if self._token_s is None:
            return _FIRST_ALLOWANCE_S
        return _LEAST_ALLOWANCE_S + num_tokens * self._token_s
