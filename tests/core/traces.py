"""Request traces over documents, replayed through a `SegmentIndex` with a budget."""

import heapq
import itertools
import random
from dataclasses import dataclass, field

from daric_rag.index import SegmentIndex
from daric_rag.keys import ModelFingerprint, SegmentKey

ROOT = ModelFingerprint(b"root")
SEGMENT_BYTES = 100


@dataclass
class Trace:
    """Documents in the order of their requests, and each one's number of segments."""

    requests: list[int] = field(default_factory=list)
    num_segments: list[int] = field(default_factory=list)

    def new_documents(self, count, rng):
        """Sizes from 1 to 20 segments, most of them small."""
        first = len(self.num_segments)
        self.num_segments += (
            min(20, max(1, round(rng.lognormvariate(1, 0.8)))) for _ in range(count)
        )
        return range(first, first + count)

    def zipf(self, documents, num_requests, rng, alpha=0.9):
        """Request `documents`, the first ones most often."""
        weights = ((rank + 1) ** -alpha for rank in range(len(documents)))
        self.requests += rng.choices(
            documents, cum_weights=list(itertools.accumulate(weights)), k=num_requests
        )

    def flood(self, nbytes, rng):
        """Request new documents once each, `nbytes` or a little more of them."""
        while nbytes > 0:
            (document,) = self.new_documents(1, rng)
            self.requests.append(document)
            nbytes -= self.nbytes(document)

    def nbytes(self, document):
        return self.num_segments[document] * SEGMENT_BYTES

    def keys(self, document):
        return tuple(
            SegmentKey(b"%d/%d" % (document, i))
            for i in range(self.num_segments[document])
        )


def flooded_zipf(seed, capacity_share=0.1, num_turnovers=3):
    """A Zipf trace with a flood in its middle; returns it and the capacity, bytes."""
    rng = random.Random(seed)
    trace = Trace()
    documents = trace.new_documents(1500, rng)
    capacity = round(capacity_share * sum(map(trace.nbytes, documents)))
    trace.zipf(documents, 6000, rng)
    trace.flood(num_turnovers * capacity, rng)
    trace.zipf(documents, 6000, rng)
    return trace, capacity


@dataclass
class Store:
    """The account of a store with a budget, in bytes."""

    index: SegmentIndex
    capacity: int
    peak: int = 0

    def request(self, trace, document):
        """Count a use, store what is missing; return the bytes that were there."""
        keys = trace.keys(document)
        num_hits = self.index.match(ROOT, keys)
        self.index.touch(ROOT, keys)
        missing = keys[num_hits:]
        if missing:
            self.index.hold(keys)
            needed = len(missing) * SEGMENT_BYTES
            self.index.evict(self.index.nbytes + needed - self.capacity)
            self.index.insert(
                ROOT, keys, [256] * len(keys), [SEGMENT_BYTES] * len(keys)
            )
            self.index.release(keys)
        self.peak = max(self.peak, self.index.nbytes)
        return num_hits * SEGMENT_BYTES

    def replay(self, trace):
        """Return the share of the requested bytes that were there."""
        hit = sum(self.request(trace, document) for document in trace.requests)
        return hit / sum(map(trace.nbytes, trace.requests))


def farthest_next_use(trace, capacity):
    """Return the hit rate in bytes of evicting what is needed last (Belady).

    The optimum for documents of equal size, and a good bound for others.
    """
    never = len(trace.requests)
    next_use, upcoming = [never] * never, {}
    for time in reversed(range(never)):
        next_use[time] = upcoming.get(trace.requests[time], never)
        upcoming[trace.requests[time]] = time
    stored, heap, used, hit = {}, [], 0, 0
    for time, document in enumerate(trace.requests):
        if document in stored:
            hit += trace.nbytes(document)
        else:
            used += trace.nbytes(document)
        stored[document] = next_use[time]
        heapq.heappush(heap, (-next_use[time], document))
        while used > capacity:
            when, victim = heapq.heappop(heap)
            if stored.get(victim) == -when:
                del stored[victim]
                used -= trace.nbytes(victim)
    return hit / sum(map(trace.nbytes, trace.requests))
