"""Engines of a few lines: one keeps texts in files, one fills a real store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from daric_rag.config import DaricConfig
from daric_rag.document_info import DocumentInfo, encode_document
from daric_rag.engine import DocumentOutcome
from daric_rag.errors import PromptError
from daric_rag.keys import document_hash
from daric_rag.layout import PromptLayout, build_layout
from daric_rag.prewarm import text_hash
from daric_rag.storage import DiskTier, Record, RecordHeader, StoreStats
from daric_rag.storage.format import SegmentIdentity
from tests.storage.records import FINGERPRINT, ROOT


class FolderEngine:
    """A token per word; a document that holds "refuse" is refused."""

    def __init__(
        self, folder: Path, on_write: Callable[[], None] = lambda: None
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.on_write = folder, on_write
        self.batches: list[list[str]] = []
        self.num_flushes = 0

    def prewarm_each(self, documents: Sequence[Any]) -> list[DocumentOutcome]:
        self.batches.append([part.text for part in documents])
        return [self._store(part.text) for part in documents]

    def flush(self) -> None:
        self.num_flushes += 1

    def _store(self, text: str) -> DocumentOutcome:
        if "refuse" in text:
            return DocumentOutcome(None, error="the document is too long")
        num_tokens, path = len(text.split()), self.folder / text_hash(text).hex()
        is_new = not path.exists()
        if is_new:
            self.on_write()
            # As stores do: a document is whole or not there.
            part = self.folder.with_name(f"{path.name}.tmp")
            part.write_text(text)
            part.rename(path)
        ids = text.encode()
        return DocumentOutcome(document_hash(ids), num_tokens, num_tokens * is_new)

    @property
    def texts(self) -> list[str]:
        """What is stored."""
        return sorted(path.read_text() for path in self.folder.iterdir())


class DiskEngine:
    """Keeps a document as two segments of a real store; a token per word."""

    def __init__(
        self, store: str | Path, config: DaricConfig | None = None, **options: Any
    ) -> None:
        self.config = config or DaricConfig()
        self.disk = DiskTier(store, self.config.disk_bytes, **options)
        self.num_computed = 0

    def prewarm_each(self, documents: Sequence[Any]) -> list[DocumentOutcome]:
        try:
            return [self._store(self.document_layout(part)) for part in documents]
        except PromptError as error:
            return [DocumentOutcome(None, error=str(error)) for _ in documents]
        finally:
            self.disk.close_thread()

    def document_layout(self, part: Any) -> PromptLayout:
        ids = [crc32(word.encode()) for word in part.text.split()]
        return build_layout([ids], config=self.config, block_size=32, pad_token_id=0)

    def _store(self, layout: PromptLayout) -> DocumentOutcome:
        name = document_hash(layout.token_ids)
        info = DocumentInfo(name, "", layout.prompt_len, self.config.namespace)
        keys = [name[:16] * 2, name]
        is_new = not all(map(self.disk.contains, keys))
        self.num_computed += is_new
        for index, parent in enumerate([ROOT, keys[0]]):
            side_data = encode_document(info) if index else b""
            identity = SegmentIdentity(
                keys[index], parent, FINGERPRINT, index, side_data
            )
            head = RecordHeader.for_shape(identity, (1, 3, 1, 4), "bfloat16")
            self.disk.write(Record(head, memoryview(bytes(48)), side_data))
        saved = layout.prompt_len * is_new
        return DocumentOutcome(name, layout.prompt_len, saved)

    def fingerprints(self) -> list[str]:
        return [FINGERPRINT.hex()]

    def flush(self) -> None:
        self.disk.flush()

    def store_stats(self) -> StoreStats:
        tier = self.disk.stats()
        return StoreStats(tier, tier, 0, 0, 0, 0, 0, self.disk.read_only)

    def close(self) -> None:
        self.disk.close()
