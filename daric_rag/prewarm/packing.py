"""Documents to batches of about as many tokens, before anything is tokenised."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["Packer"]

_Item = TypeVar("_Item")

# Of English text with most vocabularies. Corrected by what the engine reports.
_CHARS_PER_TOKEN = 4.0


class Packer(Generic[_Item]):
    """Collects documents until a batch is full; order is kept.

    The first batch is one document alone: its outcome says how many characters make
    a token and how many bytes that is.

    Args:
        batch_tokens: About how many tokens make a batch. A longer document is a batch
            of its own.
        max_documents: Most documents in a batch.
    """

    def __init__(self, batch_tokens: int, max_documents: int) -> None:
        self._batch_tokens, self._max_documents = batch_tokens, max_documents
        self._items: list[_Item] = []
        self._num_chars = 0
        self._is_first = True
        self._chars_per_token = _CHARS_PER_TOKEN

    def tokens_of(self, num_chars: int) -> int:
        """Return about how many tokens a text has, at least 1."""
        return max(1, round(num_chars / self._chars_per_token))

    def learn(self, num_chars: int, num_tokens: int) -> None:
        """Take notice of how long texts turned out to be."""
        if num_chars > 0 and num_tokens > 0:
            self._chars_per_token = num_chars / num_tokens

    def add(self, item: _Item, num_chars: int) -> list[list[_Item]]:
        """Take a document in; returns the batches that are full now."""
        full = []
        if self._items and self.tokens_of(self._num_chars + num_chars) > (
            self._batch_tokens
        ):
            full.append(self.take())
        self._items.append(item)
        self._num_chars += num_chars
        if self._is_first or len(self._items) >= self._max_documents:
            self._is_first = False
            full.append(self.take())
        return full

    def take(self) -> list[_Item]:
        """Return what is there, a batch or nothing; it is empty then."""
        items, self._items, self._num_chars = self._items, [], 0
        return items
