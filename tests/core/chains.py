"""Small chains of segments, and an index filled with them."""

from daric_rag.index import SegmentIndex
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
    """Return the keys of a document with one segment per token."""
    return segment_keys(root, token_ids, 1)


def filled(*chains, nbytes=10):
    """Return an index that holds the chains, inserted in this order."""
    index = SegmentIndex(clock=Ticks())
    for keys in chains:
        index.insert(ROOT_A, keys, [1] * len(keys), [nbytes] * len(keys))
    return index
