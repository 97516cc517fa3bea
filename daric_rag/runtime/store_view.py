"""What the scheduler side believes the store to hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from daric_rag.index import SegmentIndex
from daric_rag.keys import ModelFingerprint, SegmentKey
from daric_rag.segment_table import ParentKey

__all__ = ["StoreView"]

Probe = Callable[[SegmentKey], bool]
"""Whether the store has a segment that the view does not know, as when another
process saved it, or this one before a restart."""

_MAX_ROOTS = 4096
# Keys of records in memory; 256 tokens each, so that no host memory holds more.
_MAX_NEAR = 1 << 18


class StoreView:
    """Scheduler process. An index of segments, learnt from reports and by probing.

    It decides nothing about eviction: the store's own tiers do, and report it. A view
    that is behind costs time and never correctness, because a record that turns out
    to be missing is generated where it is wanted.

    Args:
        root_of: From a namespace to its root.
        probe: Asks the store about segments that the view does not know.
        max_bytes: Of records that the store can hold: what the view knows beyond that
            is long gone.
        segment_bytes: Of a full segment's record, for that account.
        max_segment_len: Tokens of a full segment.
    """

    def __init__(
        self,
        root_of: Callable[[str], ModelFingerprint],
        *,
        probe: Probe,
        max_bytes: int,
        segment_bytes: int,
        max_segment_len: int,
    ) -> None:
        self._root_of, self._probe = root_of, probe
        self._max_bytes, self._segment_bytes = max_bytes, segment_bytes
        self._max_segment_len = max_segment_len
        self._index = SegmentIndex()
        self._roots: OrderedDict[str, ModelFingerprint] = OrderedDict()
        self._near: OrderedDict[SegmentKey, None] = OrderedDict()

    def root(self, namespace: str) -> ModelFingerprint:
        """Return the parent of every first segment of a tenant's chunks."""
        if namespace not in self._roots:
            self._roots[namespace] = self._root_of(namespace)
            # Clients choose the names, and may choose a new one each time.
            if len(self._roots) > _MAX_ROOTS:
                self._roots.popitem(last=False)
        return self._roots[namespace]

    def match(self, root: ModelFingerprint, keys: Sequence[SegmentKey]) -> int:
        """Return how many leading segments of a chunk the store has."""
        known = self._index.match(root, keys)
        while known < len(keys) and self._probe(keys[known]):
            self.learn(keys[known], keys[known - 1] if known else root)
            known += 1
        return known

    def touch(self, root: ModelFingerprint, keys: Sequence[SegmentKey]) -> None:
        """Count a use of a chain of segments."""
        self._index.touch(root, keys)

    def learn(self, key: SegmentKey, parent: ParentKey) -> None:
        """Take notice of a record.

        Args:
            key: The segment's.
            parent: Of the segment before it in its chunk, or the root. While the view
                does not know the parent, it does not match the segment either.
        """
        self._index.add(key, parent, self._max_segment_len, self._segment_bytes)
        excess = self._index.nbytes - self._max_bytes
        if excess > 0:
            self._index.evict(excess)

    def forget(self, keys: Iterable[SegmentKey]) -> None:
        """Records are gone, and what hangs on them cannot be matched."""
        for key in keys:
            self._index.remove(key)
            self._near.pop(key, None)

    def is_near(self, keys: Iterable[SegmentKey]) -> bool:
        """Whether all of some records are in the store's memory, as far as is known."""
        return all(key in self._near for key in keys)

    def promote(self, keys: Iterable[SegmentKey]) -> None:
        """Records have come to the store's memory."""
        for key in keys:
            self._near[key] = None
            if len(self._near) > _MAX_NEAR:
                self._near.popitem(last=False)

    def demote(self, keys: Iterable[SegmentKey]) -> None:
        """Records have left the store's memory."""
        for key in keys:
            self._near.pop(key, None)
