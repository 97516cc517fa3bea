"""Which segments a store holds: the radix tree of section 3.3.2, and who goes first.

Keys are chained digests: a key stands for its whole path from the root of its
`ModelFingerprint` on, so one flat table finds any segment, and edges need no token
ids. Pure bookkeeping: whoever calls `evict` or `remove` deletes the records; whoever
calls `insert` or `add` has seen them committed. Not thread-safe: callers lock.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from daric_rag.eviction import EvictionPolicy, LeastRecentlyUsed, VictimQueue
from daric_rag.keys import SegmentKey
from daric_rag.segment_table import ParentKey, SegmentInfo, SegmentTable

__all__ = ["SegmentIndex", "SegmentInfo"]


class SegmentIndex:
    """Forest of the segments in a store, with the order of their eviction.

    A `keys` argument beside a `root` is a chain from a chunk's first segment on, as
    `keys.segment_keys` returns it, or the first part of one. Its segments share one
    reading of the logical clock, so that a document is evicted as a whole.

    Args:
        policy: What uses are worth; least recently used if None.
        clock: Wall-clock seconds; only `SegmentInfo.last_used` depends on it.
    """

    def __init__(
        self,
        *,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._policy = LeastRecentlyUsed() if policy is None else policy
        self._clock = clock
        self._table = SegmentTable()
        self._queue = VictimQueue(self._table.priority, self._table.is_evictable)
        self._now = 0

    def __len__(self) -> int:
        return self._table.num_present

    def __contains__(self, key: object) -> bool:
        return self._table.find(key) >= 0

    def __iter__(self) -> Iterator[SegmentKey]:
        """Iterate over all segments, in no particular order."""
        table = self._table
        return (SegmentKey(k) for k, s in table.slot_of.items() if table.is_present(s))

    @property
    def nbytes(self) -> int:
        """Bytes of all segments' records."""
        return self._table.present_bytes

    @property
    def now(self) -> int:
        """The logical clock: bytes ever inserted, and 1 for each insertion or use."""
        return self._now

    def advance(self, now: int) -> None:
        """Follow another process's logical clock; never backwards."""
        self._now = max(self._now, now)

    def info(self, key: SegmentKey) -> SegmentInfo | None:
        """Return what is known of a segment, or None when it is absent."""
        slot = self._table.find(key)
        return self._table.info(slot) if slot >= 0 else None

    def match(self, root: ParentKey, keys: Sequence[SegmentKey]) -> int:
        """Return how many leading segments are present. Changes nothing."""
        return len(self._table.path(root, keys))

    def touch(self, root: ParentKey, keys: Sequence[SegmentKey]) -> None:
        """Count one use of every leading segment that is present."""
        self._use(self._table.path(root, keys))

    def use(self, key: SegmentKey) -> None:
        """Count one use of one segment; nothing if it is absent."""
        slot = self._table.find(key)
        if slot >= 0:
            self._use([slot])

    def set_use(
        self, key: SegmentKey, *, priority: int, last_used: float, uses: int, pins: int
    ) -> bool:
        """Replace what is known of a segment's use; return whether it is present."""
        table, slot = self._table, self._table.find(key)
        if slot < 0:
            return False
        table.priority[slot], table.last_used[slot] = priority, last_used
        table.uses[slot], table.pins[slot] = uses, pins
        self._offer(slot)
        return True

    def insert(
        self,
        root: ParentKey,
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
            ValueError: The lengths differ, one is negative, or a key is already known
                elsewhere in the tree (it is not a chain). Nothing was changed then.
        """
        if not len(keys) == len(num_tokens) == len(nbytes):
            raise ValueError(
                f"{len(keys)} keys, {len(num_tokens)} token counts and {len(nbytes)} "
                f"byte counts; give one of each per segment"
            )
        table = self._table
        table.check_chain(root, keys, num_tokens, nbytes)
        if not keys:
            return
        missing = [key not in self for key in keys]
        self._now += 1 + sum(itertools.compress(nbytes, missing))
        priority, last_used = self._policy.first(self._now), self._clock()
        parent = table.obtain(root)
        for key, tokens, size in zip(keys, num_tokens, nbytes, strict=True):
            slot = table.obtain(key)
            self._make_recent(slot, priority, last_used)
            if not table.is_present(slot):
                table.uses[slot] = 1
                table.attach(slot, parent, tokens, size)
            parent = slot
        self._offer(parent)

    def add(
        self,
        key: SegmentKey,
        parent: ParentKey,
        num_tokens: int,
        nbytes: int,
        *,
        priority: int | None = None,
        last_used: float | None = None,
        uses: int = 1,
        pins: int = 0,
    ) -> None:
        """Add one segment, in any order: its parent may be absent, or come later.

        Of a segment that is present, the size is replaced and the priority and the
        time can only rise; its uses and pins stay.

        Args:
            key: The segment.
            parent: The segment before it, or its root.
            num_tokens: Its length, in tokens.
            nbytes: Its record's length, in bytes.
            priority: None for a record that is new. One that is given comes from a
                record of old, which does not move the logical clock.
            last_used: Seconds; the clock's reading if None.
            uses: Number of uses.
            pins: Number of pins, beside those that were waiting for it.

        Raises:
            ValueError: A size is negative, or the key is known below another parent.
                Nothing was changed then.
        """
        self._table.check_chain(parent, (key,), (num_tokens,), (nbytes,))
        table, new = self._table, key not in self
        if priority is None:
            self._now += 1 + (nbytes if new else 0)
            priority = self._policy.first(self._now)
        slot = table.obtain(key)
        self._make_recent(
            slot, priority, self._clock() if last_used is None else last_used
        )
        if new:
            table.uses[slot] = uses
            table.pins[slot] += pins
            table.attach(slot, table.obtain(parent), num_tokens, nbytes)
        else:
            table.resize(slot, num_tokens, nbytes)
        self._offer(slot)

    def discard(self, key: SegmentKey) -> bool:
        """Forget one segment; return whether it was present.

        What is below it stays, unmatched until it returns. Pins do not protect.
        """
        slot = self._table.find(key)
        if slot >= 0:
            self._drop(slot)
        return slot >= 0

    def remove(self, key: SegmentKey) -> tuple[SegmentKey, ...]:
        """Forget a segment, if it is present, and all below it.

        Pins do not protect from this: it reports that a record is gone or damaged.

        Returns:
            The removed keys, a segment after its descendants.
        """
        table = self._table
        subtree = [table.slot_of[key]] if key in table.slot_of else []
        for slot in subtree:  # grows while it is walked: breadth first
            subtree.extend(table.children(slot))
        present = [slot for slot in reversed(subtree) if table.is_present(slot)]
        return tuple(self._drop(slot) for slot in present)

    def pin(self, keys: Iterable[SegmentKey]) -> None:
        """Protect segments from eviction until `unpin`; absent ones once they come."""
        self._table.protect(self._table.pins, keys)

    def unpin(self, keys: Sequence[SegmentKey]) -> None:
        """Undo one `pin` of the same segments, whatever was removed in between.

        Raises:
            ValueError: A segment has no pin left. Nothing was changed then.
        """
        for slot in self._table.unprotect(self._table.pins, keys, "pin"):
            self._offer(slot)

    def hold(self, keys: Iterable[SegmentKey]) -> None:
        """Protect segments while they are in use; as `pin`, but never stored."""
        self._table.protect(self._table.holds, keys)

    def release(self, keys: Sequence[SegmentKey]) -> None:
        """Undo one `hold` of the same segments.

        Raises:
            ValueError: A segment is not held. Nothing was changed then.
        """
        for slot in self._table.unprotect(self._table.holds, keys, "hold"):
            self._offer(slot)

    def victims(self) -> tuple[SegmentKey, ...]:
        """Return the next document to evict, last segment first. Removes nothing.

        It is the leaf of smallest priority and what it hangs on, up to the first
        segment that has another child, is protected, or is worth more than the leaf.

        Returns:
            Keys in the order of their eviction; empty if nothing may be evicted.
        """
        table, tail = self._table, self._queue.first()
        slots = table.document(tail) if tail >= 0 else ()
        return tuple(SegmentKey(table.keys[slot]) for slot in slots)

    def evict(self, nbytes: int) -> list[SegmentKey]:
        """Forget documents of smallest priority, each from its last segment on.

        Args:
            nbytes: Bytes to free.

        Returns:
            The evicted keys in order. They free at least `nbytes` unless all that is
            left is protected. What is left of the last document still matches.
        """
        table, evicted = self._table, list[SegmentKey]()
        enough = table.present_bytes - nbytes
        while table.present_bytes > enough and (document := self.victims()):
            for key in document:
                evicted.append(self._drop(table.slot_of[key]))
                if table.present_bytes <= enough:
                    break
        return evicted

    def _use(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        table, last_used = self._table, self._clock()
        self._now += 1
        for slot in slots:
            table.uses[slot] += 1
            table.last_used[slot] = last_used
            table.priority[slot] = self._policy.used(table.priority[slot], self._now)

    def _make_recent(self, slot: int, priority: int, last_used: float) -> None:
        table = self._table
        if table.is_present(slot):
            priority = max(priority, table.priority[slot])
            last_used = max(last_used, table.last_used[slot])
        table.priority[slot], table.last_used[slot] = priority, last_used

    def _drop(self, slot: int) -> SegmentKey:
        key = SegmentKey(self._table.keys[slot])
        self._offer(self._table.detach(slot))
        return key

    def _offer(self, slot: int) -> None:
        if self._table.is_evictable(slot):
            self._queue.offer(slot)
