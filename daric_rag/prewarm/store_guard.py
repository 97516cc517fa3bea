"""What a store has room for, and whether it took what it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from daric_rag.errors import ConfigError

if TYPE_CHECKING:
    from daric_rag.storage import StoreStats, TierStats

__all__ = ["StoreGuard"]

_MOST_FAILING = 3


class StoreGuard:
    """Keeps a job from evicting what it just made. For one thread.

    Args:
        stats: Of the store that the engine writes to; None where it cannot be seen, as
            on a server: then there is no budget, and nothing is known to be lost.
        budget_bytes: What the store may hold in all; None for the store's own limit.

    Raises:
        ConfigError: There is a budget and the store cannot be seen.
    """

    def __init__(
        self, stats: Callable[[], StoreStats] | None, budget_bytes: int | None = None
    ) -> None:
        if stats is None and budget_bytes is not None:
            raise ConfigError(
                "a budget needs a store on this machine, and this engine's is on a "
                "server: leave the budget out, or give the server --disk-bytes"
            )
        self._stats, self._budget = stats, budget_bytes
        self._held_bytes = self._limit_bytes = self._num_lost = 0
        self._written_bytes = 0
        self._promised_tokens = 0
        self._num_failed = self._num_failing = 0
        self._has_failed = False
        self.look(0)
        self._has_failed = False
        self._start_bytes, self._known_lost = self._written_bytes, self._num_lost
        self._num_tokens = 0
        self._bytes_per_token = 0.0

    @property
    def is_measuring(self) -> bool:
        """Whether it is still to be seen how much a token takes up."""
        return self._stats is not None and not self._num_tokens

    @property
    def bytes_per_token(self) -> float:
        """Of records on disk, as measured; 0 while unknown."""
        return self._bytes_per_token

    def look(self, waiting_tokens: int) -> None:
        """Look at the store, which may have to wait for the engine's step.

        Args:
            waiting_tokens: Of what is under way, and may or may not be there yet.
        """
        self._promised_tokens = waiting_tokens
        if self._stats is None:
            return
        stats = self._stats()
        tier = _tier(stats)
        dropped = stats.dropped_writes if stats.disk is not None else 0
        num_failed = tier.failed_writes + tier.failed_syncs
        self._num_lost = num_failed + tier.evicted + dropped
        self._has_failed |= num_failed > self._num_failed
        self._num_failed = num_failed
        self._held_bytes, self._written_bytes = tier.nbytes, tier.written_bytes
        self._limit_bytes = min(
            self._budget or tier.capacity_bytes, tier.capacity_bytes
        )

    def has_room(self, num_tokens: int, waiting_tokens: int) -> bool:
        """Whether so many more tokens fit beside what is there and under way.

        They count as under way then. The store is looked at only if what it held when
        last seen leaves a doubt.
        """
        if self._stats is None:
            return True
        if not self._fits(self._promised_tokens + num_tokens):
            self.look(waiting_tokens)
            if not self._fits(waiting_tokens + num_tokens):
                return False
        self._promised_tokens += num_tokens
        return True

    def learn(self, num_tokens: int, *, all_told: bool) -> None:
        """Take notice of tokens that the store had on disk when it was last seen.

        Args:
            num_tokens: Of documents that were computed.
            all_told: Whether nothing else is under way, so that what was written is
                theirs.
        """
        self._num_tokens += num_tokens
        if self._num_tokens and all_told:
            # Not what the store grew by: others may write to it, or make room.
            written_bytes = self._written_bytes - self._start_bytes
            self._bytes_per_token = written_bytes / self._num_tokens

    def took_all(self) -> bool:
        """Whether, since this was last asked, the store kept all it was given."""
        before, self._known_lost = self._known_lost, self._num_lost
        self._num_failing = self._num_failing + 1 if self._has_failed else 0
        self._has_failed = False
        return self._num_lost == before

    @property
    def keeps_failing(self) -> bool:
        """Whether writing failed before each of the last times this was asked of.

        After a failure a store pauses for a minute: what is computed meanwhile is
        computed for nothing.
        """
        return self._num_failing >= _MOST_FAILING

    def _fits(self, num_tokens: int) -> bool:
        needed = max(self._bytes_per_token * num_tokens, 1.0)
        return self._held_bytes + needed <= self._limit_bytes


def _tier(stats: StoreStats) -> TierStats:
    return stats.host if stats.disk is None else stats.disk
