"""What the commands of ``daric store`` did, as JSON values and as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from daric_rag.evaluation.units import human_bytes
from daric_rag.storage.admin import Eviction, VerifyReport
from daric_rag.storage.archive import ExportReport, Failures
from daric_rag.storage.archive_import import ImportReport
from daric_rag.storage.documents import Document
from daric_rag.storage.reclaiming import Reclaimed

__all__ = [
    "document_json",
    "eviction_json",
    "eviction_lines",
    "export_lines",
    "import_lines",
    "printable",
    "reclaimed_lines",
    "verify_json",
    "verify_lines",
]

_MAX_LISTED = 20


def document_json(document: Document) -> dict[str, Any]:
    """Return a document as JSON values; bytes as hex, times in seconds since 1970."""
    hash_ = document.document_hash
    return {
        "key": document.key.hex(),
        "document": None if hash_ is None else hash_.hex(),
        "title": document.title,
        "namespace": document.namespace,
        "model": document.fingerprint.hex(),
        "num_tokens": document.num_tokens,
        "num_segments": document.num_segments,
        "nbytes": document.nbytes,
        "own_bytes": document.own_bytes,
        "last_used": document.last_used,
        "uses": document.uses,
        "pinned": document.pinned,
        "complete": document.complete,
    }


def verify_json(report: VerifyReport, documents: Sequence[Document]) -> dict[str, Any]:
    """Return what a verification found; `documents` need the damaged records."""
    return {
        "num_records": report.num_records,
        "nbytes": report.nbytes,
        "damaged": _errors_json(report.damaged),
        "unreadable": _errors_json(report.unreadable),
        "num_gone": report.num_gone,
        "num_deleted": report.num_deleted,
        "documents": [document_json(d) for d in documents],
    }


def verify_lines(report: VerifyReport, documents: Sequence[Document]) -> list[str]:
    """Return what a verification found; `documents` need the damaged records."""
    lines = [
        f"{_count(report.num_records, 'record')} whole ({human_bytes(report.nbytes)})"
    ]
    for word, errors in (
        ("damaged", report.damaged),
        ("unreadable", report.unreadable),
    ):
        if errors:
            lines.append(f"{len(errors):,} {word}:")
            lines += [
                f"  {key.hex()[:12]} {text}" for key, text in errors[:_MAX_LISTED]
            ]
            lines += ["  ..."] * (len(errors) > _MAX_LISTED)
    if documents:
        named = ", ".join(_name(d) for d in documents[:_MAX_LISTED])
        more = ", ..." if len(documents) > _MAX_LISTED else ""
        lines.append(f"part of {_count(len(documents), 'document')}: {named}{more}")
    if report.num_deleted:
        lines.append(f"{report.num_deleted:,} deleted; they are computed when needed")
    elif report.damaged:
        lines.append("--repair deletes what is damaged")
    return lines


def eviction_json(plan: Eviction, freed: int, *, dry_run: bool) -> dict[str, Any]:
    """Return what an eviction took away, or would."""
    return {
        "dry_run": dry_run,
        "num_segments": len(plan.segments),
        "freed_bytes": freed,
        "evicted": [document_json(d) for d in plan.documents],
        "kept_pinned": [document_json(d) for d in plan.pinned],
    }


def eviction_lines(plan: Eviction, freed: int, *, dry_run: bool) -> list[str]:
    """Return what an eviction took away, or would."""
    lines = []
    if dry_run:
        lines = [_name(d) for d in plan.documents[:_MAX_LISTED]]
        lines += ["..."] * (len(plan.documents) > _MAX_LISTED)
    verb = "would be evicted" if dry_run else "evicted"
    count = _count(len(plan.documents), "document")
    lines.append(f"{count} {verb}, {human_bytes(freed)} freed")
    if plan.pinned:
        count = _count(len(plan.pinned), "pinned document")
        lines.append(f"kept {count}: `daric store unpin` first")
    return lines


def export_lines(report: ExportReport, file: str) -> list[str]:
    """Return what an export wrote."""
    return [
        f"{_count(report.num_documents, 'document')} in "
        f"{_count(report.num_records, 'record')} ({human_bytes(report.nbytes)}) "
        f"written to {file}",
        *_failure_lines(report.failures, "not exported"),
    ]


def import_lines(report: ImportReport, file: str) -> list[str]:
    """Return what an import did."""
    lines = [
        f"{_count(report.num_records, 'record')} ({human_bytes(report.nbytes)}) "
        f"imported from {file}"
    ]
    if report.num_present:
        lines.append(f"{report.num_present:,} were there already")
    if report.num_pinned:
        lines.append(
            f"pinned {_count(report.num_pinned, 'document')}, as in the archive"
        )
    lines += _failure_lines(report.failures, "refused")
    if report.num_missing:
        lines.append(f"missing {_count(report.num_missing, 'record')} of the manifest")
    if report.stopped:
        lines.append(f"stopped early: {report.stopped}")
    return lines


def reclaimed_lines(reclaimed: Reclaimed, *, dry_run: bool) -> list[str]:
    """Return what was given back, or would be."""
    counts = {
        "unfinished records of ended processes": reclaimed.reservations,
        "files without a record": reclaimed.orphans,
        "temporary files": reclaimed.temporary,
        "records without a file": reclaimed.rows,
    }
    lines = [f"{count:,} {what}" for what, count in counts.items() if count]
    verb = "would be freed" if dry_run else "freed"
    return [*lines, f"{human_bytes(reclaimed.nbytes)} {verb}"]


def _failure_lines(failures: Failures, word: str) -> list[str]:
    if not failures.counts:
        return []
    counts = ", ".join(f"{n:,} {reason}" for reason, n in failures.counts.items())
    examples = [f"  {text}" for text in failures.examples]
    more = ["  ..."] * (failures.total > len(failures.examples))
    return [f"{_count(failures.total, 'member')} {word} ({counts}):", *examples, *more]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _errors_json(errors: Sequence[tuple[bytes, str]]) -> list[dict[str, str]]:
    return [{"key": key.hex(), "reason": reason} for key, reason in errors]


def _name(document: Document) -> str:
    title = printable(document.title) or "(untitled)"
    return f"{document.key.hex()[:12]} {title}"


def printable(text: str) -> str:
    """Return text without what moves the cursor or recolours the terminal."""
    # A title comes from whoever wrote the document.
    return "".join(c if c.isprintable() else " " for c in text)
