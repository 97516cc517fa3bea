"""The radix tree: chains that come, match, are used and go."""

import pytest

from daric_rag.index import SegmentIndex, SegmentInfo
from tests.core.chains import ROOT_A, ROOT_B, chain, filled


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


def test_touch_counts_uses_and_protects_from_eviction():
    first, second = chain(1), chain(2)
    index = filled(first, second)
    index.touch(ROOT_A, [*first, *chain(1, 2)[1:]])  # the second one is absent
    assert index.info(first[0]) == SegmentInfo(ROOT_A, 1, 10, 3.0, 2, 0, index.now)
    assert index.info(second[0]) == SegmentInfo(ROOT_A, 1, 10, 2.0, 1, 0, 22)
    assert index.evict(1) == [second[0]]


def test_insert_is_idempotent():
    keys = chain(1, 2)
    index = filled(keys, keys)
    assert (len(index), index.nbytes) == (2, 20)
    assert index.info(keys[0]).uses == 1
    assert list(index) == list(keys)


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
    index.pin(left)
    assert index.evict(1000) == [right[1]]
    index.unpin(left)
    assert index.evict(1000) == [left[1], left[0]]


def test_a_pin_anywhere_keeps_what_it_hangs_on():
    keys = chain(1, 2)
    index = filled(keys)
    index.pin(keys[1:])
    assert index.evict(1000) == []


def test_remove_takes_the_subtree_and_ignores_pins():
    keys = chain(1, 2, 3)
    index = filled(keys, chain(1, 4), chain(5))
    index.pin(keys)
    removed = index.remove(keys[0])
    assert set(removed) == {*keys, chain(1, 4)[1]}
    assert removed.index(keys[2]) < removed.index(keys[1]) < removed.index(keys[0])
    assert (len(index), index.nbytes) == (1, 10)
    assert index.remove(keys[0]) == ()


def test_a_pin_outlives_removal_and_returns_with_the_segment():
    keys = chain(1)
    index = filled(keys)
    index.pin(keys)
    index.remove(keys[0])
    index.insert(ROOT_A, keys, [1], [10])
    assert index.info(keys[0]).pins == 1
    assert index.evict(1) == []
    index.unpin(keys)
    assert index.evict(1) == [keys[0]]


def test_a_pin_may_come_before_its_segment():
    keys = chain(1)
    index = SegmentIndex()
    index.pin(keys)
    index.pin(keys)
    index.unpin(keys)
    index.insert(ROOT_A, keys, [1], [10])
    assert index.evict(1) == []


def test_unpin_without_pin_is_refused_and_changes_nothing():
    keys = chain(1, 2)
    index = filled(keys)
    index.pin(keys[:1])
    with pytest.raises(ValueError, match="no pin left"):
        index.unpin(keys)
    assert index.info(keys[0]).pins == 1


def test_insert_refuses_what_is_no_chain_and_changes_nothing():
    keys = chain(1, 2)
    index = filled(keys)
    for bad in [(keys[1],), (keys[0], chain(7)[0], keys[1]), chain(8) * 2]:
        with pytest.raises(ValueError, match="two parents"):
            index.insert(ROOT_A, bad, [1] * len(bad), [10] * len(bad))
    with pytest.raises(ValueError, match="two parents"):
        index.insert(ROOT_B, keys, [1, 1], [10, 10])
    with pytest.raises(ValueError, match="two parents"):
        index.insert(ROOT_A, [ROOT_A], [1], [10])
    with pytest.raises(ValueError, match=">= 0"):
        index.insert(ROOT_A, chain(8, 9), [1, 1], [10, -1])
    with pytest.raises(ValueError, match="1 token counts"):
        index.insert(ROOT_A, chain(8, 9), [1], [10, 10])
    assert list(index) == list(keys)


def test_absent_segments_have_no_info():
    index = SegmentIndex()
    assert index.info(chain(1)[0]) is None
    assert chain(1)[0] not in index
