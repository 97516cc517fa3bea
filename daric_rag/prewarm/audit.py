"""Whether a store has what a manifest says, to the last byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daric_rag.errors import ConfigError
from daric_rag.prewarm.manifest import Entry, Manifest
from daric_rag.prewarm.seen import SeenDocuments
from daric_rag.storage.admin import VerifyReport, verify_segments
from daric_rag.storage.documents import Document, DocumentTree

if TYPE_CHECKING:
    from daric_rag.storage.disk import DiskTier

__all__ = ["Audit", "StoredDocuments", "audit", "check_models"]


@dataclass(slots=True)
class Audit:
    """What an audit found.

    Attributes:
        num_documents: That the manifest says are stored.
        missing: Entries of those that are not, or not whole.
        damaged: Entries of those with a record that is damaged or cannot be read.
        num_damaged_lines: Of the manifest, left out.
        records: What reading their records found.
    """

    num_documents: int = 0
    missing: list[Entry] = field(default_factory=list)
    damaged: list[Entry] = field(default_factory=list)
    num_damaged_lines: int = 0
    records: VerifyReport = field(default_factory=VerifyReport)

    @property
    def is_good(self) -> bool:
        """Whether every document is there and whole."""
        return not (self.missing or self.damaged)


class StoredDocuments:
    """A store's documents by their hash, as it was when this was made.

    Args:
        disk: The store.
        header: A manifest's: which tenant's documents are meant, and of which ranks.
        tree: Of the store, if it is known already.
    """

    def __init__(
        self,
        disk: DiskTier,
        header: Mapping[str, Any],
        tree: DocumentTree | None = None,
    ) -> None:
        self.tree = tree or DocumentTree(disk.segments())
        self._ranks = {bytes.fromhex(text) for text in header.get("fingerprints") or ()}
        self._by_hash: dict[str, list[Document]] = {}
        for document in self.tree.documents:
            if document.document_hash is None or not document.complete:
                continue
            if document.namespace != header.get("namespace"):
                continue
            if self._ranks and document.fingerprint not in self._ranks:
                continue
            name = document.document_hash.hex()
            self._by_hash.setdefault(name, []).append(document)

    def find(self, entry: Entry) -> list[Document]:
        """Return a document as every rank has it; nothing if one of them has it not."""
        found = self._by_hash.get(entry.document, [])
        ranks = {document.fingerprint for document in found}
        return found if found and ranks >= self._ranks else []

    def names(self) -> set[str]:
        """Return the hashes, in hex, of all documents that every rank has."""
        return {
            name
            for name, found in self._by_hash.items()
            if {document.fingerprint for document in found} >= self._ranks
        }


def check_models(
    disk: DiskTier, header: Mapping[str, Any], tree: DocumentTree | None = None
) -> None:
    """Refuse a store of several models where it is not known whose documents are meant.

    Args:
        disk: The store.
        header: A manifest's.
        tree: Of the store, if it is known already.

    Raises:
        ConfigError: The header names no model's fingerprints, as a server tells none,
            and the tenant has documents of several.
    """
    if header.get("fingerprints"):
        return
    fingerprints = {
        document.fingerprint
        for document in (tree or DocumentTree(disk.segments())).documents
        if document.namespace == header.get("namespace")
    }
    if len(fingerprints) > 1:
        raise ConfigError(
            f"the store has documents of {len(fingerprints)} models in the namespace "
            f"{header['namespace']!r}, and a server does not tell which is its own: "
            f"give each model a store or --namespace, or run with --model"
        )


def audit(
    manifest: Manifest, disk: DiskTier, *, on_record: Callable[[], None] = lambda: None
) -> Audit:
    """Read every record of every document that a manifest says is stored.

    Args:
        manifest: What it says of all tenants is meant, for the model and the store
            that it was last used with.
        disk: The store.
        on_record: Called before every record.

    Raises:
        StoreError: The store's index cannot be read.
        ConfigError: See `check_models`.
    """
    result, tree = Audit(), DocumentTree(disk.segments())
    present: list[tuple[Entry, list[Document]]] = []
    circumstances = manifest.circumstances()
    for header in circumstances:
        if header.get("fingerprints") != circumstances[-1].get("fingerprints"):
            continue
        check_models(disk, header, tree)
        stored = StoredDocuments(disk, header, tree)
        for entry in _live(manifest, header):
            result.num_documents += 1
            if found := stored.find(entry):
                present.append((entry, found))
            else:
                result.missing.append(entry)
    result.num_damaged_lines = manifest.num_damaged
    segments = tree.segments_of(d for _, documents in present for d in documents)
    result.records = verify_segments(disk, segments, on_record=on_record)
    bad = [key for key, _ in (*result.records.damaged, *result.records.unreadable)]
    spoilt = {document.key for document in tree.needing(bad)}
    result.damaged = [
        entry
        for entry, documents in present
        if any(document.key in spoilt for document in documents)
    ]
    return result


def _live(manifest: Manifest, header: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield what is stored by the manifest's last word, each text once."""
    with SeenDocuments() as seen:
        seen.load(manifest.history(header))
        yield from seen.stored()
