"""The radix tree: whole documents go, and single segments come in any order."""

import gc
import tracemalloc

import pytest

from daric_rag.index import SegmentIndex, SegmentInfo
from daric_rag.keys import model_fingerprint
from tests.core.chains import ROOT_A, chain, filled


def test_a_whole_document_goes_together_and_its_shared_stem_stays():
    index = filled(chain(1, 2, 3, 4), chain(1, 2, 5))
    assert index.victims() == (chain(1, 2, 3, 4)[3], chain(1, 2, 3, 4)[2])
    assert len(index) == 5


def test_a_stem_is_not_taken_with_one_of_two_tails_whichever_goes_first():
    left, right = chain(1, 2), chain(1, 3)
    for first, second in [(left, right), (right, left)]:
        index = filled(left, right)
        for priority, key in enumerate([left[0], first[1], second[1]]):
            index.set_use(key, priority=priority, last_used=0.0, uses=1, pins=0)
        assert index.victims() == first[1:]
        assert index.evict(30) == [first[1], second[1], left[0]]


def test_a_stem_that_is_used_alone_outlives_its_tail():
    keys = chain(1, 2, 3)
    index = filled(keys, chain(4))
    index.touch(ROOT_A, keys[:1])
    assert index.victims() == (keys[2], keys[1])
    assert index.evict(30) == [keys[2], keys[1], chain(4)[0]]


def test_segments_used_one_by_one_still_go_as_one_document():
    first, second = chain(1, 2, 3), chain(4, 5)
    index = filled(first, second)
    for key in first:
        index.use(key)
    assert index.evict(30) == [second[1], second[0], first[2]]
    assert index.victims() == (first[1], first[0])


def test_a_stem_that_is_pinned_or_held_is_not_taken_with_its_tail():
    keys = chain(1, 2, 3)
    index = filled(keys)
    index.hold(keys[:2])
    assert index.victims() == keys[2:]
    index.pin(keys[:1])
    index.release(keys[:2])
    assert index.victims() == (keys[2], keys[1])


def test_a_hold_may_come_before_its_segment_and_outlive_it():
    keys = chain(1)
    index = SegmentIndex()
    index.hold([*keys, *keys])
    index.insert(ROOT_A, keys, [1], [10])
    index.release(keys)
    index.remove(keys[0])
    index.insert(ROOT_A, keys, [1], [10])
    assert index.victims() == ()
    assert index.info(keys[0]).pins == 0
    with pytest.raises(ValueError, match="no hold left"):
        index.release([*keys, *keys])
    index.release(keys)
    assert index.victims() == keys


def test_rows_may_come_in_any_order():
    keys = chain(1, 2, 3)
    index = SegmentIndex()
    for i in (2, 0, 1):
        index.add(keys[i], (ROOT_A, *keys)[i], 1, 10, priority=5 + i, uses=4)
    assert index.match(ROOT_A, keys) == 3
    assert index.info(keys[1]).parent == keys[0]
    assert index.now == 0  # rows that are read back are not new bytes
    assert index.victims() == keys[::-1]


def test_what_is_below_a_discarded_segment_waits_for_it():
    keys = chain(1, 2, 3)
    index = filled(keys)
    assert index.discard(keys[1])
    assert not index.discard(keys[1])
    assert index.match(ROOT_A, keys) == 1
    assert index.info(keys[2]).parent == keys[1]
    assert set(index.evict(20)) == {keys[0], keys[2]}
    index.add(keys[2], keys[1], 1, 10)
    index.insert(ROOT_A, keys, [1, 1, 1], [10, 10, 10])
    assert index.match(ROOT_A, keys) == 3
    assert index.victims() == keys[::-1]


def test_remove_takes_what_waits_below_an_absent_segment():
    keys = chain(1, 2, 3)
    index = filled(keys)
    index.discard(keys[1])
    assert index.remove(keys[1]) == keys[2:]
    assert list(index) == [keys[0]]


def test_add_replaces_the_size_of_a_present_segment_and_keeps_its_uses():
    keys = chain(1)
    index = filled(keys)
    index.use(keys[0])
    index.add(keys[0], ROOT_A, 2, 25, priority=1, last_used=0.0, uses=9, pins=9)
    assert index.nbytes == 25
    assert index.info(keys[0]) == SegmentInfo(ROOT_A, 2, 25, 2.0, 2, 0, 12)


def test_add_refuses_a_second_parent_and_a_cycle():
    a, b, c = chain(1, 2, 3)
    index = SegmentIndex()
    index.add(c, b, 1, 10)
    index.add(b, a, 1, 10)
    for key, parent in [(c, a), (a, c), (a, a)]:
        with pytest.raises(ValueError, match="two parents"):
            index.add(key, parent, 1, 10)
    with pytest.raises(ValueError, match="two parents"):
        index.insert(c, [a], [1], [10])
    assert set(index) == {b, c}
    index.add(a, ROOT_A, 1, 10)
    assert index.match(ROOT_A, (a, b, c)) == 3


def test_another_processs_knowledge_reorders_both_ways():
    first, second, third = chain(1), chain(2), chain(3)
    index = filled(first, second, third)
    assert index.set_use(first[0], priority=99, last_used=50.0, uses=7, pins=0)
    assert index.set_use(third[0], priority=-1, last_used=1.0, uses=1, pins=0)
    assert not index.set_use(chain(4)[0], priority=1, last_used=1.0, uses=1, pins=0)
    assert index.evict(30) == [*third, *second, *first]


def test_the_logical_clock_counts_bytes_and_follows_others():
    index = filled(chain(1, 2))
    assert index.now == 21
    index.use(chain(1)[0])
    index.insert(ROOT_A, chain(1), [1], [10])  # nothing new
    assert index.now == 23
    index.advance(5)
    assert index.now == 23
    index.advance(100)
    assert index.now == 100


def test_models_that_hold_nothing_leave_nothing_behind():
    def come_and_go(name):
        root = model_fingerprint({"model": name})
        keys = chain(1, 2, root=root)
        index.pin(keys)
        index.insert(root, keys, [1, 1], [10, 10])
        index.unpin(keys)
        index.touch(model_fingerprint({"other": name}), keys)
        assert index.evict(20) == list(keys[::-1])

    index = SegmentIndex()
    tracemalloc.start()
    try:
        come_and_go(-1)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for name in range(2000):
            come_and_go(name)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 30_000  # 15 bytes each; one root alone would be over 100
