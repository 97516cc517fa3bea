"""An engine of a few lines whose store is a folder of files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from daric_rag.engine import DocumentOutcome
from daric_rag.keys import document_hash
from daric_rag.prewarm import text_hash


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
            path.write_text(text)
        ids = text.encode()
        return DocumentOutcome(document_hash(ids), num_tokens, num_tokens * is_new)

    @property
    def texts(self) -> list[str]:
        """What is stored."""
        return sorted(path.read_text() for path in self.folder.iterdir())
