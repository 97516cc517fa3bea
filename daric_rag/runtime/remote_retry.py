"""When to try a request again. Pure."""

from __future__ import annotations

import email.utils
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often, and how long after, a request is tried again.

    Attributes:
        max_retries: Tries after the first one.
        base_s: Seconds before the second try, doubled with every further one.
        max_s: Longest wait, in seconds; a server that asks for more is not asked again.
        jitter: Draws the share of a wait that is really waited, in [0.5, 1].
    """

    max_retries: int = 2
    base_s: float = 0.5
    max_s: float = 30.0
    jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0)

    def wait_s(self, num_tried: int, retry_after: str | None = None) -> float | None:
        """Return how long to wait before the next try; None if there is none.

        Args:
            num_tried: Tries so far, at least 1.
            retry_after: The server's header of that name.
        """
        if num_tried > self.max_retries:
            return None
        asked = _seconds(retry_after) if retry_after else None
        if asked is not None:
            return asked if asked <= self.max_s else None
        return min(self.max_s, self.base_s * 2 ** (num_tried - 1)) * self.jitter()


def _seconds(retry_after: str) -> float | None:
    """Return what a Retry-After header means; None if it is not understood."""
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        when = email.utils.parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max(0.0, when.timestamp() - time.time())
