"""What a corpus does not have any more: unpinned or evicted. And what stays: pinned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from daric_rag.prewarm.audit import StoredDocuments, check_models
from daric_rag.prewarm.manifest import Entry, Manifest
from daric_rag.prewarm.manifest_writer import ManifestWriter
from daric_rag.prewarm.seen import SeenDocuments
from daric_rag.storage.admin import carry_out, plan_eviction

if TYPE_CHECKING:
    from daric_rag.storage.disk import DiskTier
    from daric_rag.storage.documents import Document

__all__ = ["Vanished", "expire", "give_up", "pin_all"]

Vanished = Literal["evict", "unpin"]
"""What happens to documents that vanished: their KV is deleted, or only may be."""


def give_up(
    disk: DiskTier, header: dict[str, Any], entries: Sequence[Entry], how: Vanished
) -> int:
    """Unpin documents, and evict them if so wanted; what others share stays.

    Args:
        disk: The store.
        header: Of the manifest that the entries are from.
        entries: Of documents to be given up.
        how: See `Vanished`.

    Returns:
        Bytes freed.

    Raises:
        StoreError: The store cannot be changed.
    """
    documents = _documents(StoredDocuments(disk, header), entries)
    disk.unpin([document.key for document in documents])
    if how == "unpin" or not documents:
        return 0
    stored = StoredDocuments(disk, header)
    return carry_out(disk, plan_eviction(stored.tree, _documents(stored, entries)))


def pin_all(disk: DiskTier, manifest: Manifest, header: dict[str, Any]) -> int:
    """Pin every document that a manifest calls stored; returns how many are new.

    Raises:
        StoreError: The store cannot be changed.
    """
    stored = StoredDocuments(disk, header)
    with SeenDocuments() as seen:
        seen.load(manifest.entries(header))
        keys = [document.key for document in _documents(stored, seen.stored())]
    return disk.pin(keys)


def expire(disk: DiskTier, manifest: Manifest, *, now: float) -> tuple[int, int]:
    """Evict what has had its time, and write it down.

    Args:
        disk: The store.
        manifest: With entries that have an end.
        now: In seconds since 1970.

    Returns:
        How many documents went, and the bytes freed.

    Raises:
        StoreError: The store cannot be changed, or the manifest not be written.
        ConfigError: A job writes to the manifest, or see `check_models`.
    """
    headers = manifest.headers()
    if not headers:
        return 0, 0
    check_models(disk, headers[-1])
    with ManifestWriter(manifest.path, headers[-1]) as writer, SeenDocuments() as seen:
        seen.load(manifest.entries(headers[-1]))
        entries = [replace(entry, time=now) for entry in seen.expired(now)]
        # First, so that a kill leaves nothing that is called done and is not there.
        writer.append(entries)
        freed = give_up(disk, headers[-1], entries, "evict")
    return len(entries), freed


def _documents(stored: StoredDocuments, entries: Iterable[Entry]) -> list[Document]:
    """Return each document once, as every rank has it."""
    found = {d.key: d for entry in entries for d in stored.find(entry)}
    return list(found.values())
