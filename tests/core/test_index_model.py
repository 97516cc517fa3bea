"""The radix tree against a plain dict, through the same operations."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from daric_rag.eviction import FrequencyRecency
from daric_rag.index import SegmentIndex, SegmentInfo
from daric_rag.keys import segment_keys
from tests.core.chains import ROOT_A, ROOT_B, Ticks


@dataclass(frozen=True)
class Entry:
    """A segment of the model."""

    parent: bytes
    nbytes: int
    last_used: float
    priority: int
    uses: int = 1


# Short chains over two tokens and two roots: they share stems often.
chains = st.builds(
    lambda root, ids: (root, segment_keys(root, ids, 1)),
    st.sampled_from([ROOT_A, ROOT_B]),
    st.lists(st.integers(0, 1), max_size=4),
)
segments = chains.filter(lambda what: what[1]).map(
    lambda what: (what[1][-1], (what[0], *what[1])[-2])
)  # (key, parent)
POLICY = FrequencyRecency(40)


class IndexMachine(RuleBasedStateMachine):
    """Drives `SegmentIndex` and a naive dict model through the same operations."""

    def __init__(self):
        super().__init__()
        self.clock = Ticks()
        self.index = SegmentIndex(policy=POLICY, clock=self.clock)
        self.entries = {}
        self.pins, self.holds = Counter(), Counter()
        self.now = 0

    def present(self, keys):
        return next((i for i, k in enumerate(keys) if k not in self.entries), len(keys))

    def make_recent(self, key, priority, last_used):
        entry = self.entries[key]
        self.entries[key] = replace(
            entry,
            priority=max(entry.priority, priority),
            last_used=max(entry.last_used, last_used),
        )

    def count_use(self, keys):
        if keys:
            self.now += 1
        for key in keys:
            entry = self.entries[key]
            self.entries[key] = replace(
                entry,
                last_used=self.clock.now,
                uses=entry.uses + 1,
                priority=POLICY.used(entry.priority, self.now),
            )

    def may_go(self, key):
        return key in self.entries and not self.pins[key] and not self.holds[key]

    def check_document(self, victims):
        """`victims` is one document that may go next, or a part from its tail on."""
        stems = [e.parent for e in self.entries.values()]
        leaves = [k for k in self.entries if k not in stems and self.may_go(k)]
        if not leaves:
            assert not victims
            return 0
        tail = victims[0]
        assert tail in leaves
        worth = self.entries[tail].priority
        assert worth == min(self.entries[k].priority for k in leaves)
        document = [tail]
        parent = self.entries[tail].parent
        while (
            self.may_go(parent)
            and stems.count(parent) == 1
            and self.entries[parent].priority <= worth
        ):
            document.append(parent)
            parent = self.entries[parent].parent
        num_taken = min(len(victims), len(document))
        assert list(victims[:num_taken]) == document[:num_taken]
        return len(document)

    @rule(what=chains, nbytes=st.integers(0, 20))
    def insert(self, what, nbytes):
        root, keys = what
        sizes = [nbytes + i for i in range(len(keys))]
        self.index.insert(root, keys, [1] * len(keys), sizes)
        new = {k: n for k, n in zip(keys, sizes, strict=True) if k not in self.entries}
        self.now += bool(keys) + sum(new.values())
        for parent, key in zip((root, *keys), keys, strict=False):
            if key in new:
                self.entries[key] = Entry(parent, new[key], self.clock.now, self.now)
            self.make_recent(key, self.now, self.clock.now)

    @rule(
        what=segments,
        nbytes=st.integers(0, 20),
        priority=st.none() | st.integers(-5, 200),
    )
    def add(self, what, nbytes, priority):
        key, parent = what
        self.index.add(key, parent, 1, nbytes, priority=priority)
        new = key not in self.entries
        if priority is None:
            self.now += 1 + nbytes * new
            priority = self.now
        if new:
            self.entries[key] = Entry(parent, nbytes, self.clock.now, priority)
        self.entries[key] = replace(self.entries[key], nbytes=nbytes)
        self.make_recent(key, priority, self.clock.now)

    @rule(what=segments, priority=st.integers(-5, 200), pins=st.integers(0, 1))
    def set_use(self, what, priority, pins):
        key = what[0]
        known = self.index.set_use(
            key, priority=priority, last_used=0.5, uses=3, pins=pins
        )
        assert known == (key in self.entries)
        if known:
            self.pins[key] = pins
            self.entries[key] = replace(
                self.entries[key], priority=priority, last_used=0.5, uses=3
            )

    @rule(what=chains)
    def touch(self, what):
        self.index.touch(*what)
        self.count_use(what[1][: self.present(what[1])])

    @rule(what=segments)
    def use(self, what):
        self.index.use(what[0])
        self.count_use([key for key in what[:1] if key in self.entries])

    @rule(what=chains)
    def match(self, what):
        assert self.index.match(*what) == self.present(what[1])

    @rule(what=chains)
    def pin(self, what):
        self.index.pin(what[1])
        self.pins.update(what[1])

    @rule(what=chains)
    def hold(self, what):
        self.index.hold(what[1])
        self.holds.update(what[1])

    @rule(what=chains)
    def unpin(self, what):
        if all(self.pins[key] > 0 for key in what[1]):
            self.index.unpin(what[1])
            self.pins.subtract(what[1])
        else:
            with pytest.raises(ValueError, match="no pin left"):
                self.index.unpin(what[1])

    @rule(what=chains)
    def release(self, what):
        if all(self.holds[key] > 0 for key in what[1]):
            self.index.release(what[1])
            self.holds.subtract(what[1])
        else:
            with pytest.raises(ValueError, match="no hold left"):
                self.index.release(what[1])

    @rule(what=segments)
    def discard(self, what):
        known = self.entries.pop(what[0], None) is not None
        assert self.index.discard(what[0]) == known

    @rule(what=segments)
    def remove(self, what):
        expected, level = set(), {what[0]}
        while level:
            expected |= level
            level = {k for k, e in self.entries.items() if e.parent in level}
        expected &= set(self.entries)
        removed = self.index.remove(what[0])
        assert len(removed) == len(expected)
        assert set(removed) == expected
        for i, gone in enumerate(removed):
            assert self.entries[gone].parent not in removed[:i]
        for gone in removed:
            del self.entries[gone]

    @rule()
    def victims(self):
        victims = self.index.victims()
        assert self.check_document(victims) == len(victims)

    @rule(nbytes=st.integers(0, 60))
    def evict(self, nbytes):
        evicted = self.index.evict(nbytes)
        freed = 0
        while freed < nbytes:
            document_len = self.check_document(evicted)
            if not document_len:
                break
            for key in evicted[:document_len]:
                assert freed < nbytes
                freed += self.entries.pop(key).nbytes
            del evicted[:document_len]
        assert evicted == []

    @rule(now=st.integers(0, 300))
    def advance(self, now):
        self.index.advance(now)
        self.now = max(self.now, now)

    @invariant()
    def agrees(self):
        assert set(self.index) == set(self.entries)
        assert len(self.index) == len(self.entries)
        assert self.index.nbytes == sum(e.nbytes for e in self.entries.values())
        assert self.index.now == self.now
        for key, e in self.entries.items():
            assert self.index.info(key) == SegmentInfo(
                e.parent, 1, e.nbytes, e.last_used, e.uses, self.pins[key], e.priority
            )


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
