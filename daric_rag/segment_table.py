"""Rows of the segment index, as columns of numbers.

A million Python objects would cost several hundred bytes each, and every full garbage
collection would walk them while the engine waits. Here a segment is a slot number, and
what is known of it stands in arrays, which the collector does not look into.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from daric_rag.keys import ModelFingerprint, SegmentKey

__all__ = ["NO_SLOT", "ParentKey", "SegmentInfo", "SegmentTable"]

NO_SLOT = -1

_ABSENT = -1  # in `num_tokens`

ParentKey = SegmentKey | ModelFingerprint


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What the index knows of one segment; a snapshot.

    Attributes:
        parent: Key of the segment before it, or its root. It may be absent.
        num_tokens: Its length, in tokens.
        nbytes: Its record's length in the store, in bytes.
        last_used: The clock's reading when it last came or was used, in s.
        uses: How often it was used; that it came counts as the first time.
        pins: How many holders protect it from eviction.
        priority: What its uses are worth; the smallest is evicted first.
    """

    parent: ParentKey
    num_tokens: int
    nbytes: int
    last_used: float
    uses: int
    pins: int
    priority: int


class SegmentTable:
    """Slots of a forest, found by key.

    A slot is *present* when it holds a segment. Otherwise it is a placeholder for a
    key that something refers to: a root or a missing parent that has children, or a
    segment that is protected before it came or after it went. A placeholder has no
    parent, and is freed as soon as nothing refers to it any more.

    Attributes:
        slot_of: Slot by key, placeholders included.
        keys: Key by slot; ``b""`` in a free one.
        parent: Slot above, or `NO_SLOT` for placeholders.
        first_child, next_sibling, previous_sibling: The list of the slots just below,
            `NO_SLOT` where it ends.
        num_tokens, nbytes, last_used, uses, priority: As in `SegmentInfo`.
        pins, holds: Counts of the two kinds of protection, of placeholders too.
        num_present: Number of present slots.
        present_bytes: Sum of their `nbytes`.
    """

    def __init__(self) -> None:
        self.slot_of: dict[bytes, int] = {}
        self.keys: list[bytes] = []
        self.parent = array("i")
        self.first_child = array("i")
        self.next_sibling = array("i")
        self.previous_sibling = array("i")
        self.num_tokens = array("i")
        self.nbytes = array("q")
        self.last_used = array("d")
        self.uses = array("q")
        self.pins = array("i")
        self.holds = array("i")
        self.priority = array("q")
        self.num_present = self.present_bytes = 0
        self._free = array("i")

    def find(self, key: object) -> int:
        """Return the slot of a present segment, or `NO_SLOT`."""
        slot = self.slot_of.get(key, NO_SLOT)  # type: ignore[call-overload]
        return slot if slot >= 0 and self.num_tokens[slot] >= 0 else NO_SLOT

    def obtain(self, key: bytes) -> int:
        """Return the slot of a key, a new placeholder if it has none."""
        slot = self.slot_of.get(key)
        if slot is not None:
            return slot
        if self._free:
            slot = self._free.pop()
            self.keys[slot] = key
        else:
            slot = len(self.keys)
            self._append(key)
        self.slot_of[key] = slot
        return slot

    def resize(self, slot: int, num_tokens: int, nbytes: int) -> None:
        """Replace a present segment's size."""
        self.present_bytes += nbytes - self.nbytes[slot]
        self.num_tokens[slot], self.nbytes[slot] = num_tokens, nbytes

    def is_present(self, slot: int) -> bool:
        """Return whether the slot holds a segment."""
        return self.num_tokens[slot] >= 0

    def may_go(self, slot: int) -> bool:
        """Return whether the slot holds an unprotected segment."""
        return (
            self.num_tokens[slot] >= 0 and not self.pins[slot] and not self.holds[slot]
        )

    def is_evictable(self, slot: int) -> bool:
        """Return whether the slot may go and nothing hangs on it."""
        return self.first_child[slot] < 0 and self.may_go(slot)

    def info(self, slot: int) -> SegmentInfo:
        """Return what is known of a present segment."""
        return SegmentInfo(
            SegmentKey(self.keys[self.parent[slot]]),
            self.num_tokens[slot],
            self.nbytes[slot],
            self.last_used[slot],
            self.uses[slot],
            self.pins[slot],
            self.priority[slot],
        )

    def path(self, root: ParentKey, keys: Iterable[SegmentKey]) -> list[int]:
        """Return the slots of the leading keys that are present below `root`."""
        slot_of, parents = self.slot_of, self.parent
        path: list[int] = []
        above = slot_of.get(root)
        for key in keys if above is not None else ():
            slot = slot_of.get(key)
            # A placeholder has no parent, so this is about presence too.
            if slot is None or parents[slot] != above:
                break
            path.append(slot)
            above = slot
        return path

    def check_chain(
        self,
        root: ParentKey,
        keys: Sequence[SegmentKey],
        num_tokens: Iterable[int],
        nbytes: Iterable[int],
    ) -> None:
        """Refuse to attach what would not leave a forest.

        Raises:
            ValueError: A size is negative, or a key stands elsewhere already.
        """
        if any(size < 0 for sizes in (num_tokens, nbytes) for size in sizes):
            raise ValueError("token and byte counts must be >= 0")
        seen: set[bytes] = {root}
        parent: bytes = root
        for key in keys:
            slot = self.slot_of.get(key, NO_SLOT)
            if slot < 0:
                elsewhere = False
            elif self.is_present(slot):
                elsewhere = self.keys[self.parent[slot]] != parent
            else:  # it may have children, and the root may hang on one of them
                elsewhere = slot in self.lineage(self.slot_of.get(root, NO_SLOT))
            if elsewhere or key in seen:
                raise ValueError(
                    "a segment would have two parents; pass the keys of one chunk, in "
                    "order, as segment_keys returns them"
                )
            seen.add(key)
            parent = key

    def protect(self, counts: array[int], keys: Iterable[SegmentKey]) -> None:
        """Count each key once more in `pins` or `holds`, absent ones too."""
        for key in keys:
            slot = self.obtain(key)  # before `counts` is looked up: it may grow
            counts[slot] += 1

    def unprotect(
        self, counts: array[int], keys: Sequence[SegmentKey], word: str
    ) -> list[int]:
        """Undo `protect`.

        Returns:
            The keys' slots; those of idle placeholders have been freed.

        Raises:
            ValueError: A count would fall below 0. Nothing was changed then.
        """
        for key, wanted in Counter(keys).items():
            slot = self.slot_of.get(key, NO_SLOT)
            if slot < 0 or counts[slot] < wanted:
                raise ValueError(
                    f"segment {key.hex()} has no {word} left; undo each {word} once, "
                    f"with the same segments"
                )
        slots = [self.slot_of[key] for key in keys]
        for slot in slots:
            counts[slot] -= 1
        for slot in set(slots):
            self.free_if_idle(slot)
        return slots

    def document(self, slot: int) -> Iterator[int]:
        """Iterate upwards over what goes together with a leaf, the leaf included."""
        worth = self.priority[slot]
        while self.may_go(slot) and self.priority[slot] <= worth:
            yield slot
            if self.next_sibling[slot] >= 0 or self.previous_sibling[slot] >= 0:
                break
            slot = self.parent[slot]

    def lineage(self, slot: int) -> list[int]:
        """Return the slot and all above it, upwards; empty for `NO_SLOT`."""
        slots = []
        while slot >= 0:
            slots.append(slot)
            slot = self.parent[slot]
        return slots

    def children(self, slot: int) -> Iterator[int]:
        """Iterate over the slots just below. The forest must not change meanwhile."""
        child = self.first_child[slot]
        while child >= 0:
            yield child
            child = self.next_sibling[child]

    def attach(self, slot: int, parent: int, num_tokens: int, nbytes: int) -> None:
        """Make a placeholder a present segment, below `parent`."""
        self.nbytes[slot] = nbytes
        self.num_tokens[slot] = num_tokens
        self.parent[slot] = parent
        sibling = self.first_child[parent]
        self.next_sibling[slot] = sibling
        if sibling >= 0:
            self.previous_sibling[sibling] = slot
        self.first_child[parent] = slot
        self.num_present += 1
        self.present_bytes += nbytes

    def detach(self, slot: int) -> int:
        """Make a present segment a placeholder; it is freed unless it is needed.

        Returns:
            The slot that was its parent. It may have been freed as well.
        """
        parent = self.parent[slot]
        before, after = self.previous_sibling[slot], self.next_sibling[slot]
        if before >= 0:
            self.next_sibling[before] = after
        else:
            self.first_child[parent] = after
        if after >= 0:
            self.previous_sibling[after] = before
        self.parent[slot] = NO_SLOT
        self.previous_sibling[slot] = self.next_sibling[slot] = NO_SLOT
        self.num_tokens[slot] = _ABSENT
        self.num_present -= 1
        self.present_bytes -= self.nbytes[slot]
        self.free_if_idle(slot)
        self.free_if_idle(parent)
        return parent

    def free_if_idle(self, slot: int) -> None:
        """Free a placeholder that nothing refers to; anything else stays."""
        if (
            self.num_tokens[slot] < 0
            and self.first_child[slot] < 0
            and not self.pins[slot]
            and not self.holds[slot]
        ):
            del self.slot_of[self.keys[slot]]
            self.keys[slot] = b""
            self._free.append(slot)

    def _append(self, key: bytes) -> None:
        self.keys.append(key)
        for links in (self.parent, self.first_child):
            links.append(NO_SLOT)
        for links in (self.next_sibling, self.previous_sibling):
            links.append(NO_SLOT)
        self.num_tokens.append(_ABSENT)
        self.last_used.append(0.0)
        for numbers in (self.nbytes, self.uses, self.pins, self.holds, self.priority):
            numbers.append(0)
