"""What the commands of ``daric store`` share: options, opening, choosing, output."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daric_rag.config import DaricConfig
from daric_rag.errors import ConfigError

if TYPE_CHECKING:
    from daric_rag.storage.cipher import RecordCipher
    from daric_rag.storage.disk import DiskTier
    from daric_rag.storage.document_selection import Selection
    from daric_rag.storage.documents import Document, DocumentTree

__all__ = [
    "DEFAULT_DISK_BYTES",
    "All",
    "DiskBytes",
    "DryRun",
    "KeyFile",
    "ModelPrefix",
    "Names",
    "Namespace",
    "OlderThan",
    "StorePath",
    "Title",
    "choose",
    "opened",
    "print_json",
    "selection_of",
    "tree_of",
]

DEFAULT_DISK_BYTES = f"{DaricConfig().disk_bytes >> 30}GiB"

StorePath = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="DARIC_STORE",
        metavar="PATH",
        help="The store's folder.",
        show_default="daric_rag/store in the user's cache folder",
    ),
]
KeyFile = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="File of the store's key, if it is encrypted and no variable has it.",
        show_default=False,
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DOCUMENT",
        help="First hex digits, four or more, of documents' hashes or keys.",
        show_default=False,
    ),
]
Title = Annotated[
    str | None,
    typer.Option(metavar="GLOB", help="Those with such a title, as in 'Report*'."),
]
Namespace = Annotated[str | None, typer.Option(help="Those of this tenant.")]
ModelPrefix = Annotated[
    str | None,
    typer.Option(metavar="HEX", help="Those of the model whose fingerprint begins so."),
]
OlderThan = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Those not used for so long: 90s, 12h, 7d."),
]
All = Annotated[bool, typer.Option("--all", help="All of them.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")]
DiskBytes = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="What the store may hold in all, as its engines are told: 200GB, 32GiB.",
        show_default=DEFAULT_DISK_BYTES,
    ),
]


def selection_of(
    names: list[str] | None,
    title: str | None,
    namespace: str | None,
    model: str | None,
    older_than: str | None,
    everything: bool = False,
) -> Selection:
    """Return the options of a command as one value.

    Raises:
        ConfigError: If one of them is empty, or no time.
    """
    from daric_rag.evaluation.units import parse_duration
    from daric_rag.storage.document_selection import Selection

    for name in names or ():
        _refuse_empty("DOCUMENT", name)
    _refuse_empty("--title", title)
    _refuse_empty("--namespace", namespace)
    _refuse_empty("--model", model)
    _refuse_empty("--older-than", older_than)
    return Selection(
        names=tuple(names or ()),
        title=title,
        namespace=namespace,
        model=model,
        unused_for_s=None if older_than is None else parse_duration(older_than),
        all=everything,
    )


def tree_of(disk: DiskTier) -> DocumentTree:
    """Return what a store holds now."""
    from daric_rag.storage.documents import DocumentTree

    return DocumentTree(disk.segments())


def choose(
    tree: DocumentTree, selection: Selection, *, explicit: bool = True
) -> list[Document]:
    """Return the documents that are meant.

    Args:
        tree: Of the store.
        selection: What was asked for.
        explicit: Whether nothing at all is a mistake and not everything.

    Raises:
        ConfigError: If nothing is asked for, or a name does not fit one document.
    """
    from daric_rag.storage.document_selection import select

    if explicit and selection.is_empty:
        raise ConfigError(
            "say which documents: first digits of their hashes, --title, --namespace, "
            "--model, --older-than, or --all"
        )
    return select(tree.documents, selection, now=time.time())


@contextmanager
def opened(
    store: str | None,
    key_file: str | None,
    *,
    disk_bytes: int | None = None,
    writes: bool = False,
    creates: bool = False,
) -> Iterator[tuple[DiskTier, RecordCipher | None]]:
    """Yield a store that is there, and its cipher if it has one; closed at the end.

    Args:
        store: Its folder; None for the user's own.
        key_file: Of the key that it is encrypted with; None for the environment's.
        disk_bytes: Budget for what will be written.
        writes: Whether a store that can only be read is of no use.
        creates: Whether to make one where nothing is.

    Raises:
        ConfigError: If an option is empty, or two keys are given.
        StoreError: If there is none, or it cannot be opened or written.
    """
    from daric_rag.storage import default_store_path
    from daric_rag.storage.admin import NO_LIMIT, open_existing
    from daric_rag.storage.cipher import load_cipher

    _refuse_empty("--store", store)
    _refuse_empty("--key-file", key_file)
    cipher = load_cipher(key_file)
    disk = open_existing(
        default_store_path() if store is None else store,
        capacity_bytes=disk_bytes or NO_LIMIT,
        cipher=cipher,
        writes=writes,
        creates=creates,
    )
    try:
        yield disk, cipher
    finally:
        disk.close()


def _refuse_empty(option: str, text: str | None) -> None:
    """Refuse what an unset variable of a shell leaves: it selects what nobody meant."""
    if text is not None and not text:
        raise ConfigError(f"{option} is empty: give it a value or leave it out")


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON document, whatever text is in it."""
    typer.echo(json.dumps(value, allow_nan=False))
