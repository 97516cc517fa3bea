"""A store's documents and sums on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from daric_rag.evaluation.store_report import printable
from daric_rag.evaluation.units import human_age, human_bytes
from daric_rag.storage.documents import Document

__all__ = ["documents_table", "listing_console", "stats_table"]

_KEY_DIGITS = 12
_MODEL_DIGITS = 8


def listing_console() -> Console:
    """Return a console as wide as the terminal, or wide enough for any title."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=400 if piped else None)


def documents_table(documents: Sequence[Document], *, now: float) -> Table:
    """Return documents as a table; columns that would say one thing are left out.

    Args:
        documents: In the order to show.
        now: Seconds since 1970.
    """
    models = len({d.fingerprint for d in documents}) > 1
    namespaces = len({d.namespace for d in documents}) > 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("document", no_wrap=True, style="cyan")
    # The one column that may shrink, and with it what is in it (see `_title`).
    table.add_column("title")
    if namespaces:
        table.add_column("namespace", no_wrap=True, overflow="ellipsis", max_width=16)
    if models:
        table.add_column("model", no_wrap=True)
    for name in ("tokens", "size", "own", "uses"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("used", no_wrap=True)
    table.add_column("", no_wrap=True)
    for document in documents:
        cells = [Text(document.key.hex()[:_KEY_DIGITS]), _title(document)]
        if namespaces:
            cells.append(Text(printable(document.namespace or "?")))
        if models:
            cells.append(Text(document.fingerprint.hex()[:_MODEL_DIGITS]))
        table.add_row(*cells, *_figures(document, now))
    return table


def stats_table(facts: Mapping[str, Any], *, now: float) -> Table:
    """Return `admin.store_facts` as names and values."""
    shown = {
        "store": facts["store"] + (" (read-only)" if facts["read_only"] else ""),
        "documents": f"{facts['num_documents']:,}",
        "segments": f"{facts['num_segments']:,}",
        "tokens": f"{facts['num_tokens']:,}",
        "size": human_bytes(facts["nbytes"]),
        "pinned": f"{facts['num_pinned']:,} ({human_bytes(facts['pinned_bytes'])})",
        "free on disk": human_bytes(facts["free_bytes"]),
    }
    if facts["num_incomplete"]:
        shown["incomplete"] = f"{facts['num_incomplete']:,} (see `daric store ls`)"
    if facts["latest_use"] is not None:
        shown["last used"] = human_age(now - facts["latest_use"])
        shown["longest unused"] = human_age(now - facts["oldest_use"])
    for model in facts["models"]:
        shown[f"model {model['model'][:_MODEL_DIGITS]}"] = _sums(model)
    for namespace in facts["namespaces"]:
        name = "unknown" if namespace["namespace"] is None else namespace["namespace"]
        shown[f"namespace {name}"] = _sums(namespace)
    return _facts_table(shown)


def _facts_table(facts: Mapping[str, str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in facts.items():
        table.add_row(Text(printable(name)), Text(printable(value)))
    return table


def _sums(row: Mapping[str, Any]) -> str:
    return f"{row['num_documents']:,} documents, {human_bytes(row['nbytes'])}"


def _title(document: Document) -> Text:
    if document.title:
        title = printable(document.title)
        return Text(title, no_wrap=True, overflow="ellipsis")
    return Text("(untitled)", style="dim", no_wrap=True, overflow="ellipsis")


def _figures(document: Document, now: float) -> tuple[str, ...]:
    marks = ["pinned"] * document.pinned + ["incomplete"] * (not document.complete)
    return (
        f"{document.num_tokens:,}",
        human_bytes(document.nbytes),
        human_bytes(document.own_bytes),
        f"{document.uses:,}",
        human_age(now - document.last_used),
        " ".join(marks),
    )
