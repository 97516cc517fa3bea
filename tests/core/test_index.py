"""The radix tree against a flat dict that knows each segment's whole chain."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from daric_rag.index import SegmentIndex, SegmentInfo
from daric_rag.keys import model_fingerprint, segment_keys

ROOT_A = model_fingerprint({"model": "a"})
ROOT_B = model_fingerprint({"model": "b"})


class Ticks:
    """A clock that moves by 1 at each reading."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def chain(*token_ids, root=ROOT_A):
    """One segment per token."""
    return segment_keys(root, token_ids, 1)


def filled(*chains, nbytes=10):
    index = SegmentIndex(Ticks())
    for keys in chains:
        index.insert(ROOT_A, keys, [1] * len(keys), [nbytes] * len(keys))
    return index


def test_match_counts_leading_segments_of_the_right_model():
    keys = chain(1, 2, 3)
    index = filled(keys[:2])
    assert index.match(ROOT_A, keys) == 2
    assert index.match(ROOT_A, chain(1, 9)) == 1
    assert index.match(ROOT_A, chain(2)) == 0
    assert index.match(ROOT_A, keys[1:]) == 0  # a segment without its parent
    assert index.match(ROOT_B, keys) == 0
    assert index.match(ROOT_A, ()) == 0


def test_match_changes_nothing():
    first, second = chain(1), chain(2)
    index = filled(first, second)
    before = index.info(first[0])
    assert index.match(ROOT_A, first) == 1
    assert index.info(first[0]) == before
    assert index.evict(1) == [first[0]]


def test_touch_counts_hits_and_protects_from_eviction():
    first, second = chain(1), chain(2)
    index = filled(first, second)
    index.touch(ROOT_A, [*first, *chain(1, 2)[1:]])  # the second one is absent
    assert index.info(first[0]) == SegmentInfo(1, 10, 3.0, 1, 0)
    assert index.info(second[0]) == SegmentInfo(1, 10, 2.0, 0, 0)
    assert index.evict(1) == [second[0]]


def test_insert_is_idempotent():
    keys = chain(1, 2)
    index = filled(keys, keys)
    assert (len(index), index.nbytes) == (2, 20)
    assert index.info(keys[0]).hits == 0
    assert list(index) == [keys[1], keys[0]]


def test_documents_share_leading_segments():
    index = filled(chain(1, 2, 3), chain(1, 2, 4))
    assert (len(index), index.nbytes) == (4, 40)


def test_evict_takes_a_documents_last_segment_first():
    old, new = chain(1, 2, 3), chain(4, 5)
    index = filled(old, new)
    assert index.evict(11) == [old[2], old[1]]
    assert index.match(ROOT_A, old) == 1
    assert index.evict(1000) == [old[0], new[1], new[0]]
    assert (len(index), index.nbytes) == (0, 0)
    assert index.evict(1) == []


def test_evict_nothing():
    index = filled(chain(1))
    assert index.evict(0) == []
    assert len(index) == 1


def test_evict_keeps_a_shared_stem_while_a_branch_is_pinned():
    left, right = chain(1, 2), chain(1, 3)
    index = filled(left, right)
    index.pin(ROOT_A, left)
    assert index.evict(1000) == [right[1]]
    index.unpin(ROOT_A, left)
    assert index.evict(1000) == [left[1], left[0]]


def test_a_pin_anywhere_keeps_what_it_hangs_on():
    keys = chain(1, 2)
    index = filled(keys)
    index.pin(ROOT_A, keys[1:])
    assert index.evict(1000) == []


def test_remove_takes_the_subtree_and_ignores_pins():
    keys = chain(1, 2, 3)
    index = filled(keys, chain(1, 4), chain(5))
    index.pin(ROOT_A, keys)
    removed = index.remove(keys[0])
    assert set(removed) == {*keys, chain(1, 4)[1]}
    assert removed.index(keys[2]) < removed.index(keys[1]) < removed.index(keys[0])
    assert (len(index), index.nbytes) == (1, 10)
    assert index.remove(keys[0]) == ()


def test_a_pin_outlives_removal_and_returns_with_the_segment():
    keys = chain(1)
    index = filled(keys)
    index.pin(ROOT_A, keys)
    index.remove(keys[0])
    index.insert(ROOT_A, keys, [1], [10])
    assert index.info(keys[0]).pins == 1
    assert index.evict(1) == []
    index.unpin(ROOT_A, keys)
    assert index.evict(1) == [keys[0]]


def test_a_pin_may_come_before_its_segment():
    keys = chain(1)
    index = SegmentIndex()
    index.pin(ROOT_A, keys)
    index.pin(ROOT_A, keys)
    index.unpin(ROOT_A, keys)
    index.insert(ROOT_A, keys, [1], [10])
    assert index.evict(1) == []


def test_unpin_without_pin_is_refused_and_changes_nothing():
    keys = chain(1, 2)
    index = filled(keys)
    index.pin(ROOT_A, keys[:1])
    with pytest.raises(ValueError, match="is not pinned"):
        index.unpin(ROOT_A, keys)
    assert index.info(keys[0]).pins == 1


def test_insert_refuses_what_is_no_chain_and_changes_nothing():
    keys = chain(1, 2)
    index = filled(keys)
    for bad in [(keys[1],), (keys[0], chain(7)[0], keys[1]), chain(8) * 2]:
        with pytest.raises(ValueError, match="two parents"):
            index.insert(ROOT_A, bad, [1] * len(bad), [10] * len(bad))
    with pytest.raises(ValueError, match="two parents"):
        index.insert(ROOT_B, keys, [1, 1], [10, 10])
    with pytest.raises(ValueError, match="1 token counts"):
        index.insert(ROOT_A, chain(8, 9), [1], [10, 10])
    assert list(index) == [keys[1], keys[0]]


def test_absent_segments_have_no_info():
    index = SegmentIndex()
    assert index.info(chain(1)[0]) is None
    assert chain(1)[0] not in index


@dataclass
class Entry:
    """A segment of the model: its chain names its ancestors."""

    chain: tuple
    nbytes: int
    last_used: float = 0.0
    hits: int = 0


# Short chains over two tokens and two roots: they share stems often.
chains = st.builds(
    lambda root, ids: (root, segment_keys(root, ids, 1)),
    st.sampled_from([ROOT_A, ROOT_B]),
    st.lists(st.integers(0, 1), max_size=4),
)


class IndexMachine(RuleBasedStateMachine):
    """Drives `SegmentIndex` and a naive dict model through the same operations."""

    def __init__(self):
        super().__init__()
        self.clock = Ticks()
        self.index = SegmentIndex(self.clock)
        self.entries = {}
        self.pins = Counter()

    def present(self, keys):
        return next((i for i, k in enumerate(keys) if k not in self.entries), len(keys))

    def drop(self, key):
        del self.entries[key]

    @rule(what=chains, nbytes=st.integers(0, 20))
    def insert(self, what, nbytes):
        root, keys = what
        sizes = [nbytes + i for i in range(len(keys))]
        self.index.insert(root, keys, [1] * len(keys), sizes)
        for i, key in enumerate(keys):
            entry = self.entries.setdefault(key, Entry(keys[: i + 1], sizes[i]))
            entry.last_used = self.clock.now

    @rule(what=chains)
    def touch(self, what):
        root, keys = what
        self.index.touch(root, keys)
        for key in keys[: self.present(keys)]:
            self.entries[key].hits += 1
            self.entries[key].last_used = self.clock.now

    @rule(what=chains)
    def match(self, what):
        root, keys = what
        assert self.index.match(root, keys) == self.present(keys)

    @rule(what=chains)
    def pin(self, what):
        self.index.pin(*what)
        self.pins.update(what[1])

    @rule(what=chains)
    def unpin(self, what):
        if all(self.pins[key] > 0 for key in what[1]):
            self.index.unpin(*what)
            self.pins.subtract(what[1])
        else:
            with pytest.raises(ValueError, match="is not pinned"):
                self.index.unpin(*what)

    @rule(what=chains)
    def remove(self, what):
        for key in what[1][-1:]:
            expected = {k for k, e in self.entries.items() if key in e.chain}
            removed = self.index.remove(key)
            assert len(removed) == len(expected)
            assert set(removed) == expected
            for i, gone in enumerate(removed):
                assert not set(self.entries[gone].chain[:-1]) & set(removed[:i])
            for gone in removed:
                self.drop(gone)

    @rule(nbytes=st.integers(0, 60))
    def evict(self, nbytes):
        expected, freed = [], 0
        while freed < nbytes:
            stems = {k for e in self.entries.values() for k in e.chain[:-1]}
            leaves = [k for k in self.entries if k not in stems and not self.pins[k]]
            if not leaves:
                break
            victim = min(leaves, key=lambda k: self.entries[k].last_used)
            freed += self.entries[victim].nbytes
            expected.append(victim)
            self.drop(victim)
        assert self.index.evict(nbytes) == expected

    @invariant()
    def agrees(self):
        assert set(self.index) == set(self.entries)
        assert len(self.index) == len(self.entries)
        assert self.index.nbytes == sum(e.nbytes for e in self.entries.values())
        for key, entry in self.entries.items():
            assert self.index.info(key) == SegmentInfo(
                1, entry.nbytes, entry.last_used, entry.hits, self.pins[key]
            )


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
