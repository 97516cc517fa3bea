"""Reading records from disk, side by side, and what becomes of bad ones."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from daric_rag.storage.base import Record
from daric_rag.storage.cipher import RecordCipher
from daric_rag.storage.database import DATABASE_ERRORS
from daric_rag.storage.format import RecordError
from daric_rag.storage.io_pool import ReadPool
from daric_rag.storage.ledger import Ledger
from daric_rag.storage.record_file import read_record_file
from daric_rag.storage.shared_index import SharedIndex

__all__ = ["Reader"]


class Reader:
    """Finds, reads and verifies records; one that is damaged is deleted.

    Args:
        index: Where they are.
        ledger: Deletes them.
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

        names = {key: self._index.find(key) for key in keys}
        files = [(key, name) for key, name in names.items() if name is not None]
        loaded = dict(zip(files, self._threads.map(load, files), strict=True))
        records: dict[bytes, Record | None] = {}
        for key, name in names.items():
            result = None if name is None else loaded[key, name]
            if isinstance(result, FileNotFoundError):
                # Replaced or evicted by another process since its name was learnt.
                self._index.learn()
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

    def close(self) -> None:
        """End the threads; they start again when needed."""
        self._threads.close()

    def _settle(
        self,
        key: bytes,
        filename: str | None,
        result: Record | RecordError | OSError | None,
    ) -> Record | None:
        """Count a read's outcome, and delete what is damaged."""
        if isinstance(result, Record):
            self._catalog.count("hits")
            return result
        self._catalog.count("misses")
        if result is None or filename is None:
            return None
        is_damaged = isinstance(result, RecordError)
        freed = 0
        if is_damaged or isinstance(result, FileNotFoundError):
            # Unless another thread has written it anew since.
            with suppress(*DATABASE_ERRORS):
                freed = self._ledger.remove([key], only=filename)
        if is_damaged:
            self._catalog.count("corrupt")
        elif isinstance(result, FileNotFoundError) and not freed:
            return None  # Another process was just evicting it.
        kind = result.kind if isinstance(result, RecordError) else type(result).__name__
        self._index.notices.warn(kind, "a record could not be read: %s", result)
        return None
