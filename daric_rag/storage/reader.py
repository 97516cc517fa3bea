"""Reading records from disk, side by side, and what becomes of bad ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from daric_rag.errors import StoreError
from daric_rag.storage.base import Record
from daric_rag.storage.cipher import RecordCipher
from daric_rag.storage.database import SegmentRow
from daric_rag.storage.format import KEY_LEN, RecordError
from daric_rag.storage.ledger import Ledger
from daric_rag.storage.read_pool import ReadPool
from daric_rag.storage.record_file import open_side_data, read_record_file
from daric_rag.storage.shared_index import SharedIndex

__all__ = ["Reader", "check_key"]


class Reader:
    """Finds, reads and verifies records; one that is damaged is condemned.

    Args:
        index: Where they are.
        ledger: Knows their files.
        allocate: Where payload buffers come from.
        cipher: Opens sealed ones.
        num_readers: Threads of `read_many`; by default one per core, at most four.
    """

    def __init__(
        self,
        index: SharedIndex,
        ledger: Ledger,
        *,
        allocate: Callable[[int], memoryview],
        cipher: RecordCipher | None,
        num_readers: int | None,
    ) -> None:
        self._index = index
        self._catalog = index.catalog
        self._ledger = ledger
        self._allocate = allocate
        self._cipher = cipher
        self._threads = ReadPool(num_readers)

    def read_many(
        self, keys: Sequence[bytes], fingerprint: bytes
    ) -> list[Record | None]:
        """Read records, in the keys' order; None is a miss."""

        def load(file: tuple[bytes, str]) -> Record | RecordError | OSError:
            return self.load(*file, fingerprint)

        names = self._index.find_many(keys)
        files = [(key, name) for key, name in names.items() if name is not None]
        loaded = dict(zip(files, self._threads.map(load, files), strict=True))
        records: dict[bytes, Record | None] = {}
        for key, name in names.items():
            result = None if name is None else loaded[key, name]
            if isinstance(result, FileNotFoundError):
                # Replaced or evicted by another process since its name was learnt.
                self._index.look_up([key])
                if (found := self._catalog.find(key)) != name:
                    name = found
                    result = None if name is None else load((key, name))
            records[key] = self._settle(key, name, result)
        # In this order: what a document begins with is used before what follows.
        self._catalog.use(key for key in names if records[key] is not None)
        return [records[key] for key in keys]

    def load(
        self, key: bytes, filename: str, fingerprint: bytes | None
    ) -> Record | RecordError | OSError:
        """Read one file; touches neither catalogue nor index."""
        try:
            return read_record_file(
                self._ledger.path(filename),
                key,
                fingerprint,
                allocate=self._allocate,
                cipher=self._cipher,
            )
        except (RecordError, OSError) as error:
            return error

    def with_open_side_data(self, rows: list[SegmentRow]) -> list[SegmentRow]:
        """Rows with side data that can be read."""
        cipher = self._cipher
        if cipher is None:
            return rows
        return [
            replace(row, side_data=open_side_data(row.key, row.side_data, cipher))
            for row in rows
        ]

    def close(self) -> None:
        """End the threads; they start again when needed."""
        self._threads.close()

    def _settle(
        self,
        key: bytes,
        filename: str | None,
        result: Record | RecordError | OSError | None,
    ) -> Record | None:
        """Count a read's outcome, and condemn what is damaged."""
        if isinstance(result, Record):
            self._catalog.count("hits")
            return result
        self._catalog.count("misses")
        if result is None or filename is None:
            return None
        if isinstance(result, RecordError):
            self._catalog.count("corrupt")
            if result.kind != "sealing":  # Whole, and perhaps of use with its key.
                self._condemn(key, filename)
            self._index.notices.warn(
                result.kind, "a record could not be read: %s", result
            )
        elif isinstance(result, FileNotFoundError):
            # As when another process is just evicting it: no reason for a warning.
            self._condemn(key, filename)
        else:
            self._index.notices.warn(
                type(result).__name__, "a record could not be read: %s", result
            )
        return None

    def _condemn(self, key: bytes, filename: str) -> None:
        """Have it deleted by who may wait for the index; a request may not."""
        self._index.condemned.add(key, filename)
        if self._catalog.find(key) == filename:
            self._catalog.discard(key)


def check_key(key: object) -> None:
    """Check that something is a segment's key.

    Raises:
        StoreError: If not.
    """
    if type(key) is not bytes or len(key) != KEY_LEN:
        raise StoreError(f"a key must be {KEY_LEN} bytes: pass a SegmentKey")
