"""What became of documents, as the manifest tells it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from daric_rag.engine import DocumentOutcome
from daric_rag.prewarm.manifest import Entry
from daric_rag.prewarm.sharding import TextHash
from daric_rag.prompt_types import DocumentPart

__all__ = ["NewDocument", "doubted", "entry_of", "kept_in"]

# Which ones is not known: the next run finds those that were kept.
_NOT_KEPT = (
    "the store lost some of what it was given about now (disk full, too slow, or over "
    "its budget): see `daric store stats`, and run the job again"
)


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A document to be computed."""

    id: str
    hash: TextHash
    part: DocumentPart
    source_bytes: int
    place: str = ""


def doubted(entry: Entry) -> Entry:
    """Return an entry as it is to be told where the store has lost something."""
    if not entry.is_stored:
        return entry
    # A hit too, which may have been of memory alone.
    return replace(entry, status="failed", error=_NOT_KEPT)


def entry_of(document: NewDocument, outcome: DocumentOutcome, seconds: float) -> Entry:
    """Return the entry of what became of a document."""
    entry = Entry(
        document.id,
        "failed",
        document.hash.hex(),
        error=outcome.error,
        place=document.place,
    )
    if outcome.error or outcome.document_hash is None:
        return entry
    return replace(
        entry,
        status="computed" if outcome.saved_tokens else "hit",
        document=outcome.document_hash.hex(),
        num_tokens=outcome.num_tokens,
        seconds=round(seconds, 6),
    )


def kept_in(place: str, num_documents: int) -> Entry:
    """Return the entry of a folder or file that is empty, and had documents."""
    error = (
        f"is empty, and {num_documents} documents that were in it are kept: mount or "
        f"fill it, or remove it if they are gone"
    )
    return Entry(f"{place} (empty)", "failed", error=error)
