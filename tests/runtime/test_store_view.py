"""What the scheduler side believes the store to hold, against what it holds."""

import pytest

from daric_rag.keys import ModelFingerprint, model_fingerprint, segment_keys
from daric_rag.runtime.store_view import StoreView

ROOT = model_fingerprint({"model": "tiny"})
KEYS = segment_keys(ROOT, range(12), 4)


class Store:
    """A set of keys that counts how often it is asked."""

    def __init__(self, *keys):
        self.keys, self.num_asked = set(keys), 0

    def contains(self, key):
        self.num_asked += 1
        return key in self.keys


def root_of(namespace) -> ModelFingerprint:
    return model_fingerprint({"namespace": namespace})


def view_of(store, max_bytes=1000, root_of=root_of):
    return StoreView(
        root_of,
        probe=store.contains,
        max_bytes=max_bytes,
        segment_bytes=10,
        max_segment_len=4,
    )


@pytest.mark.parametrize("num_stored", [0, 1, 2, 3])
def test_it_learns_what_is_stored_by_asking_once(num_stored):
    store = Store(*KEYS[:num_stored])
    view = view_of(store)
    assert view.match(ROOT, KEYS) == num_stored
    asked = store.num_asked
    assert view.match(ROOT, KEYS[:num_stored]) == num_stored
    assert store.num_asked == asked


def test_behind_a_hole_nothing_matches():
    assert view_of(Store(KEYS[0], KEYS[2])).match(ROOT, KEYS) == 1


def test_what_was_saved_is_known_without_asking():
    store = Store()
    view = view_of(store)
    view.learn(KEYS[0], ROOT)
    view.learn(KEYS[1], KEYS[0])
    assert view.match(ROOT, KEYS[:2]) == 2
    assert store.num_asked == 0


def test_a_segment_does_not_match_before_its_parent_is_known():
    view = view_of(Store())
    view.learn(KEYS[1], KEYS[0])
    assert view.match(ROOT, KEYS) == 0
    view.learn(KEYS[0], ROOT)
    assert view.match(ROOT, KEYS) == 2


def test_what_is_gone_takes_what_hangs_on_it_along():
    view = view_of(Store())
    for key, parent in zip(KEYS, (ROOT, *KEYS), strict=False):
        view.learn(key, parent)
    view.forget([KEYS[1], KEYS[2], b"unknown" + bytes(25)])
    assert view.match(ROOT, KEYS) == 1


def test_it_holds_no_more_than_the_store_can():
    view = view_of(Store(), max_bytes=20)
    chains = [segment_keys(ROOT, range(n, n + 4), 4) for n in range(5)]
    for (key,) in chains:
        view.learn(key, ROOT)
    known = [view.match(ROOT, chain) for chain in chains]
    assert known == [0, 0, 0, 1, 1]


def test_tenants_have_roots_of_their_own_and_many_of_them_do_no_harm(monkeypatch):
    monkeypatch.setattr("daric_rag.runtime.store_view._MAX_ROOTS", 3)
    computed = []

    def counted(namespace):
        computed.append(namespace)
        return root_of(namespace)

    view = view_of(Store(), root_of=counted)
    names = [str(n) for n in range(9)]
    assert [view.root(name) for name in names] == [root_of(name) for name in names]
    assert [view.root(name) for name in names[6:]] == [root_of(n) for n in names[6:]]
    assert computed == names  # the last three were remembered
    view.root("0")
    assert computed[-1] == "0"  # and the first ones were not
