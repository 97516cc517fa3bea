"""The disk tier: one file per record, found through an index that processes share.

A hit runs no SQL: names and order of use are kept in memory, and uses are written to
the index in batches.

What survives: everything written survives the end of the process, however it ends.
Record files are not synced one by one, so after a power cut a file may be short or
hold rubbish, which its length or checksum tells, and the latest rows may be missing.
`flush` returns when what was written so far survives that as well.

A forked child has none of its parent's locks, threads and connections, and SQLite
must not be used across a fork at all. There a tier that the parent opened holds
nothing and stores nothing; the child opens one of its own.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from daric_rag.errors import StoreError
from daric_rag.eviction import policy_of
from daric_rag.storage.arena import plain_buffer
from daric_rag.storage.base import Record, TierStats
from daric_rag.storage.cipher import RecordCipher
from daric_rag.storage.database import DATABASE_ERRORS, SegmentRow
from daric_rag.storage.format import RecordError
from daric_rag.storage.index_faults import reason_of
from daric_rag.storage.ledger import Ledger
from daric_rag.storage.reader import Reader, check_key
from daric_rag.storage.reclaiming import Reclaimed, reclaim
from daric_rag.storage.saver import Saver
from daric_rag.storage.shared_index import SharedIndex

__all__ = ["NO_LIMIT", "DiskTier"]

# A budget for who only looks, pins or deletes, and never has to make room.
NO_LIMIT: Final = 1 << 62


class DiskTier:
    """Records on disk under a byte budget, documents evicted as a whole.

    Processes may share the folder: each sees the others' records, uses and pins, and
    evicts down to its own budget. If the disk is full or read-only, saving pauses
    with one warning and reads go on.

    A thread that used the tier holds a database connection: it calls `close_thread`
    before it ends (`close` does so for its caller).

    Args:
        directory: A folder of ours, an empty one, or one that can be made.
        capacity_bytes: Budget for the files of records, unfinished ones included.
        allocate: Where payload buffers come from; memory of their own if None.
        num_readers: Threads of `read_many`; by default one per core, at most four.
        policy: Which documents go first: "frequency" or "lru".
        cipher: Seals payloads and side data; must be the one the store was made with.
        keeps_pages: Whether what is written stays in the system's page cache. Without,
            it goes to the disk as it comes, and takes no memory from others.

    Raises:
        StoreError: If the folder cannot be used; the text names the mend.
        ConfigError: If the policy is unknown.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        allocate: Callable[[int], memoryview] | None = None,
        num_readers: int | None = None,
        policy: Literal["frequency", "lru"] = "frequency",
        cipher: RecordCipher | None = None,
        keeps_pages: bool = True,
    ) -> None:
        self._directory = Path(directory).expanduser().absolute()
        self._capacity_bytes = capacity_bytes
        self._process = os.getpid()
        order = policy_of(policy, capacity_bytes)
        key_id = cipher.key_id if cipher else None
        self._index = SharedIndex(
            self._directory, order, key_id, sweeps=capacity_bytes < NO_LIMIT
        )
        self._catalog = self._index.catalog
        self._ledger = Ledger(self._index, capacity_bytes, order)
        self._saver = Saver(
            self._index, self._ledger, capacity_bytes, cipher, keeps_pages=keeps_pages
        )
        self._reader = Reader(
            self._index,
            self._ledger,
            allocate=allocate or plain_buffer,
            cipher=cipher,
            num_readers=num_readers,
        )

    @property
    def directory(self) -> Path:
        """The store's folder, absolute."""
        return self._directory

    @property
    def read_only(self) -> bool:
        """Whether the folder could only be opened for reading; writes fail then."""
        return self._index.read_only

    @property
    def capacity_bytes(self) -> int:
        """The budget for record files."""
        return self._capacity_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the record files that this process knows of."""
        return self._catalog.nbytes

    def contains(self, key: bytes) -> bool:
        """Whether `read` would probably hit; reads no payload, touches nothing."""
        return self._is_usable() and self._index.find(key) is not None

    def knows(self, key: bytes) -> bool:
        """`contains` as far as this process knows: no SQL, no waiting."""
        return self._is_usable() and self._catalog.find(key) is not None

    def read(self, key: bytes, fingerprint: bytes) -> Record | None:
        """Return a verified record in a buffer of its own; None is a miss."""
        return self.read_many([key], fingerprint)[0]

    def read_many(
        self, keys: Sequence[bytes], fingerprint: bytes
    ) -> list[Record | None]:
        """`read` for several keys, their files side by side, in the keys' order."""
        for key in keys:
            check_key(key)
        if not self._is_usable():
            return [None] * len(keys)
        return self._reader.read_many(keys, fingerprint)

    def write(self, record: Record) -> None:
        """Store a record in a file of its own, or count why not.

        A record that is stored already is not written again.

        Raises:
            StoreError: If the record exceeds the whole budget.
        """
        check_key(record.key)
        if self._is_usable():
            self._saver.write(record)

    def delete(self, key: bytes) -> None:
        """Delete a record's row and file; a key that is absent is no error."""
        self._remove([key])

    def keys(self) -> list[bytes]:
        """The keys this process knows of, least worth first."""
        return self._catalog.keys()

    def stats(self) -> TierStats:
        """A consistent snapshot of the counters."""
        return self._catalog.stats(self._capacity_bytes)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note a use that another tier served."""
        self._catalog.use(keys)

    def protect(self, keys: Sequence[bytes]) -> None:
        """Keep this process from evicting records, until `release`."""
        self._catalog.hold(keys)

    def release(self, keys: Sequence[bytes]) -> None:
        """Undo one `protect` of the same keys.

        Raises:
            ValueError: If a key is not protected.
        """
        self._catalog.release(keys)

    def pin(self, keys: Sequence[bytes]) -> int:
        """Keep every process from evicting records, for good.

        What a pinned segment hangs on stays as well: to pin a document, pin its last
        segment. `delete` and `evict` do not ask.

        Returns:
            How many were stored and not yet pinned.
        """
        return self._set_pinned(keys, True)

    def unpin(self, keys: Sequence[bytes]) -> int:
        """Let records be evicted again; returns how many were pinned."""
        changed = self._set_pinned(keys, False)
        self._saver.resume()
        return changed

    def evict(self, keys: Iterable[bytes]) -> int:
        """Delete records, the last segments of documents first.

        Returns:
            Bytes freed.
        """
        freed = self._remove(self._catalog.tails_first(keys))
        self._saver.resume()
        return freed

    def take_evicted(self) -> list[bytes]:
        """Keys that went since this was last called, by whichever process."""
        return self._catalog.take_evicted()

    def segments(self) -> list[SegmentRow]:
        """All records in the folder, other processes' included.

        Raises:
            StoreError: If the index cannot be read.
        """
        self.save_uses()
        try:
            rows = self._index.rows() if self._is_usable() else []
        except DATABASE_ERRORS as error:
            raise StoreError(
                f"the index in {self._directory} cannot be read ({reason_of(error)}): "
                "open the store again to make it anew"
            ) from error
        return self._reader.with_open_side_data(rows)

    def verify(self, key: bytes) -> RecordError | OSError | None:
        """Read a record and say what is wrong with it; deletes and counts nothing."""
        filename = self._index.find(key) if self._is_usable() else None
        if filename is None:
            return FileNotFoundError(f"no record of the key {key.hex()}")
        result = self._reader.load(key, filename, None)
        return None if isinstance(result, Record) else result

    def reclaim(self, *, dry_run: bool = False) -> Reclaimed:
        """Give back what dead writers, lost rows and stray files take up.

        Looks at every file; other processes may go on meanwhile.

        Args:
            dry_run: Only count.

        Raises:
            StoreError: If the store cannot be changed.
        """
        try:
            done = reclaim(self._index, self._ledger, dry_run=dry_run)
        except (OSError, *DATABASE_ERRORS) as error:
            raise self._refusal(error) from error
        self._saver.resume()
        return done

    def flush(self) -> None:
        """Return when all that was written, uses included, survives a power cut."""
        if self._is_usable() and not self.read_only:
            self._saver.flush()

    def close_thread(self) -> None:
        """Close the calling thread's database connection; it reopens when needed."""
        if self._is_usable():
            self._index.close_thread()

    def close(self) -> None:
        """End the reading threads and the caller's connection; records stay."""
        if self._is_usable():
            self.save_uses()
            self._reader.close()
            self._ledger.close()
            self._index.close()

    def _is_usable(self) -> bool:
        return os.getpid() == self._process

    def _remove(self, keys: Iterable[bytes]) -> int:
        keys = list(keys)
        if not self._is_usable() or not self._index.make_room(keys):
            return 0
        try:
            return self._ledger.remove(keys)
        except DATABASE_ERRORS:
            return 0

    def _set_pinned(self, keys: Sequence[bytes], pinned: bool) -> int:
        try:
            return self._ledger.set_pinned(keys, pinned) if self._is_usable() else 0
        except DATABASE_ERRORS as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> StoreError:
        return StoreError(
            f"the store in {self._directory} cannot be changed ({reason_of(error)}): "
            "make it writable, or try again"
        )

    def save_uses(self) -> None:
        """Let others know what was used here, and learn of them; to be called at times.

        Requests do not wait for the index, so this also deletes what they found
        damaged. Flushing and writing do as well.
        """
        if self._is_usable() and not self.read_only:
            with suppress(OSError, *DATABASE_ERRORS):
                self._ledger.save_uses()
        elif self._is_usable():
            self._index.learn()
