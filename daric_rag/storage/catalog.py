"""What the disk tier knows of its records without asking: a replica of the index."""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from daric_rag.eviction import EvictionPolicy
from daric_rag.index import SegmentIndex
from daric_rag.keys import SegmentKey
from daric_rag.segment_table import SegmentInfo
from daric_rag.storage.base import TierStats
from daric_rag.storage.database import SegmentRow
from daric_rag.storage.names import name_of, token_of

__all__ = ["Catalog", "Count", "Uses"]

Count = Literal[
    "hits",
    "misses",
    "corrupt",
    "evicted",
    "failed_writes",
    "failed_syncs",
    "written_bytes",
]

# Keys of which nobody was told that they are gone; beyond it the oldest are forgotten,
# and whoever asks for such a record meets a miss.
_MAX_EVICTED: Final = 1 << 17


@dataclass(slots=True)
class Uses:
    """Uses of a record that its row does not show yet.

    Attributes:
        num_uses: How many.
        last_used: The last one, seconds since 1970.
        priority: What they are worth on their own.
    """

    num_uses: int
    last_used: float
    priority: int


class Catalog:
    """A thread-safe map of records, in the order of their eviction, with the counters.

    Args:
        policy: What uses are worth.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._index = SegmentIndex(policy=policy)
        # Half the memory of the names themselves.
        self._files: dict[bytes, bytes] = {}
        self._uses: dict[bytes, Uses] = {}
        self._held: Counter[bytes] = Counter()
        self._evicted: deque[bytes] = deque(maxlen=_MAX_EVICTED)
        self._counts: Final[dict[Count, int]] = dict.fromkeys(get_args(Count), 0)
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self._index.nbytes

    def find(self, key: bytes) -> str | None:
        """Return a record's file name, relative to the folder; touches nothing."""
        token = self._files.get(key)
        return None if token is None else name_of(token)

    def use(self, keys: Iterable[bytes]) -> None:
        """Count one use of each record that is here, to be saved by `take_uses`."""
        with self._lock:
            for key in keys:
                if key in self._files:
                    self._use(SegmentKey(key))

    def take_uses(self, limit: int) -> dict[bytes, Uses]:
        """Return uses that no row shows yet; they count as saved."""
        with self._lock:
            taken: dict[bytes, Uses] = {}
            while self._uses and len(taken) < limit:
                key, uses = self._uses.popitem()
                taken[key] = uses
            return taken

    def put_back(self, taken: dict[bytes, Uses]) -> None:
        """Undo `take_uses`."""
        with self._lock:
            for key, uses in taken.items():
                self._uses[key] = self._joined(uses, self._uses.get(key))

    def joined(self, row: SegmentRow, uses: Uses | None) -> SegmentRow:
        """A row with more uses than it shows."""
        if uses is None:
            return row
        return replace(
            row,
            uses=row.uses + uses.num_uses,
            last_used=max(row.last_used, uses.last_used),
            priority=self._policy.combine(row.priority, uses.priority),
        )

    def put(self, row: SegmentRow) -> bool:
        """Add a record, or learn what its row says now; False if it cannot be one."""
        with self._lock:
            return self._put(row, self._index, self._files)

    def replace(self, rows: Iterable[SegmentRow], clock: int) -> list[SegmentRow]:
        """Forget everything but counters, uses and holds, and learn these rows.

        Others are not kept waiting meanwhile, and see the old records until the end.

        Returns:
            Rows that contradict the others.
        """
        index = SegmentIndex(policy=self._policy)
        index.advance(clock)
        files: dict[bytes, bytes] = {}
        refused = [row for row in rows if not self._put(row, index, files)]
        with self._lock:
            index.advance(self._index.now)
            index.hold(SegmentKey(key) for key in self._held.elements())
            self._evicted.extend(key for key in self._files if key not in files)
            self._uses = {k: u for k, u in self._uses.items() if k in files}
            self._index, self._files = index, files
        return refused

    def discard(self, key: bytes, *, is_evicted: bool = True) -> None:
        """Forget a record; harmless if it is absent."""
        with self._lock:
            if self._files.pop(key, None) is not None:
                # A pin goes with its row, for every process.
                if (info := self._index.info(SegmentKey(key))) and info.pins:
                    self._index.unpin([SegmentKey(key)])
                self._index.discard(SegmentKey(key))
                self._uses.pop(key, None)
                if is_evicted:
                    self._evicted.append(key)

    def choose_victims(
        self, nbytes: int, limit: int = sys.maxsize
    ) -> list[bytes] | None:
        """Choose whole documents to evict, each from its last segment on.

        Returns:
            Keys that free at least `nbytes`, still here, or the first `limit` of
            them; None if there is not as much that is neither pinned nor held.
        """
        with self._lock:
            chosen: list[tuple[SegmentKey, SegmentInfo]] = []
            while nbytes > 0 and len(chosen) < limit:
                if not (document := self._index.victims()):
                    break
                for key in document:
                    info = self._index.info(key)
                    assert info is not None
                    chosen.append((key, info))
                    self._index.discard(key)
                    nbytes -= info.nbytes
                    if nbytes <= 0 or len(chosen) == limit:
                        break
            for key, info in reversed(chosen):
                self._index.add(
                    key,
                    info.parent,
                    info.num_tokens,
                    info.nbytes,
                    priority=info.priority,
                    last_used=info.last_used,
                    uses=info.uses,
                    pins=info.pins,
                )
            is_all = nbytes <= 0 or len(chosen) == limit
            return [key for key, _ in chosen] if is_all else None

    def tails_first(self, keys: Iterable[bytes]) -> list[bytes]:
        """Order keys so that no segment comes before one that hangs on it."""
        wanted = dict.fromkeys(keys)
        ordered: dict[bytes, None] = {}
        with self._lock:
            for key in wanted:
                chain = []
                while key in wanted and key not in ordered and key not in chain:
                    chain.append(key)
                    info = self._index.info(SegmentKey(key))
                    key = info.parent if info else b""
                ordered.update(dict.fromkeys(reversed(chain)))
        return list(reversed(ordered))

    def advance(self, clock: int) -> int:
        """Follow the shared logical clock; returns the time."""
        with self._lock:
            self._index.advance(clock)
            return self._index.now

    def hold(self, keys: Sequence[bytes]) -> None:
        """Protect records from eviction by this process, until `release`."""
        with self._lock:
            self._held.update(keys)
            self._index.hold(SegmentKey(key) for key in keys)

    def release(self, keys: Sequence[bytes]) -> None:
        """Undo one `hold` of the same records."""
        with self._lock:
            self._index.release([SegmentKey(key) for key in keys])
            self._held -= Counter(keys)

    def take_evicted(self) -> list[bytes]:
        """Keys that went since this was last called and are not back."""
        with self._lock:
            gone = [key for key in self._evicted if key not in self._files]
            self._evicted.clear()
            return gone

    def keys(self) -> list[bytes]:
        """All keys, first to be evicted first (documents aside)."""
        with self._lock:
            infos = ((self._index.info(key), key) for key in self._index)
            order = sorted((info.priority, key) for info, key in infos if info)
            return [key for _, key in order]

    def filenames(self) -> dict[str, bytes]:
        """All file names, with their keys."""
        with self._lock:
            return {name_of(token): key for key, token in self._files.items()}

    def count(self, what: Count, number: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[what] += number

    def stats(self, capacity_bytes: int) -> TierStats:
        """A consistent snapshot."""
        with self._lock:
            return TierStats(
                **self._counts,
                num_records=len(self._index),
                nbytes=self._index.nbytes,
                capacity_bytes=capacity_bytes,
            )

    def _use(self, key: SegmentKey) -> None:
        self._index.use(key)
        now = self._index.now
        uses = self._uses.get(key)
        if uses is None:
            self._uses[key] = Uses(1, time.time(), self._policy.first(now))
        else:
            uses.num_uses += 1
            uses.last_used = time.time()
            uses.priority = self._policy.used(uses.priority, now)

    def _joined(self, uses: Uses, more: Uses | None) -> Uses:
        if more is None:
            return uses
        return Uses(
            uses.num_uses + more.num_uses,
            max(uses.last_used, more.last_used),
            self._policy.combine(uses.priority, more.priority),
        )

    def _put(
        self, row: SegmentRow, index: SegmentIndex, files: dict[bytes, bytes]
    ) -> bool:
        key = SegmentKey(row.key)
        if self._uses:
            row = self.joined(row, self._uses.get(key))
        known = index.info(key) if key in files else None
        if known is not None and (known.parent, known.nbytes) == (
            row.parent,
            row.nbytes,
        ):
            index.set_use(
                key,
                priority=row.priority,
                last_used=row.last_used,
                uses=row.uses,
                pins=int(row.pinned),
            )
        else:
            if known is not None:
                index.discard(key)
            try:
                index.add(
                    key,
                    SegmentKey(row.parent),
                    row.num_tokens,
                    row.nbytes,
                    priority=row.priority,
                    last_used=row.last_used,
                    uses=row.uses,
                    pins=int(row.pinned),
                )
            except ValueError:
                files.pop(key, None)
                return False  # A circle of parents.
        files[key] = token_of(row.filename)
        return True
