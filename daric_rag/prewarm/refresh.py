"""What a corpus does not have any more: unpinned or evicted. And what stays: pinned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from daric_rag.errors import ConfigError
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
    disk: DiskTier, header: Mapping[str, Any], entries: Sequence[Entry], how: Vanished
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


def pin_all(disk: DiskTier, manifest: Manifest, header: Mapping[str, Any]) -> int:
    """Pin every document that a manifest calls stored; returns how many are new.

    Raises:
        StoreError: The store cannot be changed.
    """
    stored = StoredDocuments(disk, header)
    with SeenDocuments() as seen:
        seen.load(manifest.history(header))
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
        ConfigError: A job writes to the manifest, it is of another store, or see
            `check_models`.
    """
    num_documents = freed = 0
    circumstances = manifest.circumstances()
    for header in circumstances:
        _check_store(disk, header)
        check_models(disk, header)
        with SeenDocuments() as seen:
            seen.load(manifest.history(header))
            entries = [replace(entry, time=now) for entry in seen.expired(now)]
        if not entries:
            continue
        with ManifestWriter(manifest.path, header) as writer:
            # First, so that a kill leaves nothing that is called done and is not there.
            writer.append(entries)
            num_documents += len(entries)
            freed += give_up(disk, header, entries, "evict")
    if num_documents:
        # Audits look at what was last, and that was not this.
        ManifestWriter(manifest.path, circumstances[-1]).close()
    return num_documents, freed


def _check_store(disk: DiskTier, header: Mapping[str, Any]) -> None:
    """Refuse to write documents off that are in another store."""
    named = Path(header.get("store") or "")
    if not named.is_absolute() or not named.is_dir():
        return  # A server's, or one that was moved.
    if named.resolve() != disk.directory.resolve():
        raise ConfigError(
            f"the manifest is of the store in {named}, and this is {disk.directory}: "
            f"name that one with --store"
        )


def _documents(stored: StoredDocuments, entries: Iterable[Entry]) -> list[Document]:
    """Return each document once, as every rank has it."""
    found = {d.key: d for entry in entries for d in stored.find(entry)}
    return list(found.values())
