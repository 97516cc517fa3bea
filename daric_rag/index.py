"""Scheduler process. Which segments the store holds: the radix tree of section 3.3.2.

Keys are chained digests, so an edge needs no token ids: a node is its segment's key,
below its parent segment's key, below the root of its `ModelFingerprint`. Pure
bookkeeping: whoever calls `evict` or `remove` deletes the records from the store, and
whoever calls `insert` has seen the record committed.

Not thread-safe: the scheduler side is its only caller.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from daric_rag.keys import ModelFingerprint, SegmentKey

__all__ = ["SegmentIndex", "SegmentInfo"]


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What the index knows of one segment; a snapshot.

    Attributes:
        num_tokens: Its length, in tokens.
        nbytes: Its record's length in the store, in bytes.
        last_used: The clock's reading when it was last inserted or touched, in s.
        hits: How often it was touched.
        pins: How many holders protect it from eviction.
    """

    num_tokens: int
    nbytes: int
    last_used: float
    hits: int
    pins: int


class _Node:
    """A segment, or a root (no parent, no segment of its own)."""

    __slots__ = (
        "children",
        "hits",
        "key",
        "last_used",
        "nbytes",
        "num_tokens",
        "parent",
        "pins",
    )

    def __init__(
        self, key: bytes, parent: _Node | None, num_tokens: int, nbytes: int
    ) -> None:
        self.key = key
        self.parent = parent
        self.num_tokens = num_tokens
        self.nbytes = nbytes
        self.last_used = 0.0
        self.hits = 0
        self.pins = 0
        self.children: dict[SegmentKey, _Node] = {}


class SegmentIndex:
    """Scheduler process. Radix tree over the segments in the store.

    Every `keys` argument is a chain from a chunk's first segment on, as
    `keys.segment_keys` returns it, or the first part of one.

    Order of eviction: `_by_recency` holds all nodes, least recently used first, and
    using a chain moves its deepest segment first. In that order a segment comes after
    all its descendants, so one walk from the front meets leaves before what they hang
    on, and a segment whose children are all evicted has become a leaf itself.

    Args:
        clock: Seconds; only `SegmentInfo.last_used` depends on it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty."""
        self._clock = clock
        self._roots: dict[ModelFingerprint, _Node] = {}
        self._by_recency: OrderedDict[SegmentKey, _Node] = OrderedDict()
        # Pins of segments that were removed while pinned, or pinned before they came.
        # They return to the node on insert, so that every unpin finds its pin.
        self._absent_pins: dict[SegmentKey, int] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        """Return the number of segments."""
        return len(self._by_recency)

    def __contains__(self, key: object) -> bool:
        """Return whether the segment is present."""
        return key in self._by_recency

    def __iter__(self) -> Iterator[SegmentKey]:
        """Iterate over all segments, least recently used first."""
        return iter(self._by_recency)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments' records."""
        return self._nbytes

    def info(self, key: SegmentKey) -> SegmentInfo | None:
        """Return what is known of a segment, or None when it is absent."""
        node = self._by_recency.get(key)
        if node is None:
            return None
        return SegmentInfo(
            node.num_tokens, node.nbytes, node.last_used, node.hits, node.pins
        )

    def match(self, root: ModelFingerprint, keys: Sequence[SegmentKey]) -> int:
        """Return how many leading segments are present. Changes nothing."""
        return len(self._path(root, keys))

    def touch(self, root: ModelFingerprint, keys: Sequence[SegmentKey]) -> None:
        """Count one use of every leading segment that is present."""
        path = self._path(root, keys)
        for node in path:
            node.hits += 1
        self._refresh(path)

    def insert(
        self,
        root: ModelFingerprint,
        keys: Sequence[SegmentKey],
        num_tokens: Sequence[int],
        nbytes: Sequence[int],
    ) -> None:
        """Add a chain of segments; those already present only become recent.

        Args:
            root: The model whose KV it is.
            keys: The chain, from the chunk's first segment on, [n].
            num_tokens: Tokens per segment, [n].
            nbytes: Record length per segment, in bytes, [n].

        Raises:
            ValueError: The lengths differ, or a key is already known elsewhere in the
                tree (it is not a chain). Nothing was changed then.
        """
        if not len(keys) == len(num_tokens) == len(nbytes):
            raise ValueError(
                f"{len(keys)} keys, {len(num_tokens)} token counts and {len(nbytes)} "
                f"byte counts; give one of each per segment"
            )
        path = self._path(root, keys)
        new = keys[len(path) :]
        if len(set(new)) != len(new) or any(key in self._by_recency for key in new):
            raise ValueError(
                "a segment would have two parents; pass the keys of one chunk, in "
                "order, as segment_keys returns them"
            )
        parent = path[-1] if path else self._roots.setdefault(root, _root(root))
        for key, tokens, size in zip(
            new, num_tokens[len(path) :], nbytes[len(path) :], strict=True
        ):
            node = _Node(key, parent, tokens, size)
            node.pins = self._absent_pins.pop(key, 0)
            parent.children[key] = node
            self._by_recency[key] = node
            self._nbytes += size
            path.append(node)
            parent = node
        self._refresh(path)

    def remove(self, key: SegmentKey) -> tuple[SegmentKey, ...]:
        """Forget a segment and all below it, which could never be matched again.

        Pins do not protect from this: it reports that a record is gone or damaged.

        Returns:
            The removed keys, a segment after its descendants; empty if it was absent.
        """
        node = self._by_recency.get(key)
        if node is None:
            return ()
        subtree = [node]
        for member in subtree:  # grows while it is walked: breadth first
            subtree.extend(member.children.values())
        return tuple(self._drop(member) for member in reversed(subtree))

    def pin(self, root: ModelFingerprint, keys: Sequence[SegmentKey]) -> None:
        """Protect a chain from eviction until a matching `unpin`.

        Absent segments are protected from the moment they are inserted.
        """
        for key in keys:
            node = self._by_recency.get(key)
            if node is not None:
                node.pins += 1
            else:
                self._absent_pins[key] = self._absent_pins.get(key, 0) + 1

    def unpin(self, root: ModelFingerprint, keys: Sequence[SegmentKey]) -> None:
        """Undo one `pin` of the same chain, whatever was removed in between.

        Raises:
            ValueError: A segment has no pin left. Nothing was changed then.
        """
        for key in keys:
            node = self._by_recency.get(key)
            if (node.pins if node else self._absent_pins.get(key, 0)) < 1:
                raise ValueError(
                    f"segment {key.hex()} is not pinned; unpin each chain exactly as "
                    f"often as it was pinned"
                )
        for key in keys:
            node = self._by_recency.get(key)
            if node is not None:
                node.pins -= 1
            elif self._absent_pins[key] == 1:
                del self._absent_pins[key]
            else:
                self._absent_pins[key] -= 1

    def evict(self, nbytes: int) -> list[SegmentKey]:
        """Forget unpinned segments, least recently used leaves first.

        A document therefore loses its last segments first, and what is left of it
        still matches.

        Args:
            nbytes: Bytes to free.

        Returns:
            The evicted keys in order. They free at least `nbytes` unless everything
            that is left is pinned.
        """
        victims: dict[SegmentKey, None] = {}
        freed = 0
        for key, node in self._by_recency.items():
            if freed >= nbytes:
                break
            if node.pins == 0 and node.children.keys() <= victims.keys():
                victims[key] = None
                freed += node.nbytes
        for key in victims:
            self._drop(self._by_recency[key])
        return list(victims)

    def _path(self, root: ModelFingerprint, keys: Sequence[SegmentKey]) -> list[_Node]:
        path: list[_Node] = []
        node = self._roots.get(root)
        for key in keys:
            node = node.children.get(key) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def _refresh(self, path: Sequence[_Node]) -> None:
        now = self._clock()
        for node in reversed(path):
            node.last_used = now
            self._by_recency.move_to_end(SegmentKey(node.key))

    def _drop(self, node: _Node) -> SegmentKey:
        # Only ever called on a leaf: callers drop descendants first.
        key = SegmentKey(node.key)
        del self._by_recency[key]
        self._nbytes -= node.nbytes
        if node.pins:
            self._absent_pins[key] = node.pins
        if node.parent is not None:
            del node.parent.children[key]
        return key


def _root(fingerprint: ModelFingerprint) -> _Node:
    return _Node(fingerprint, None, 0, 0)
