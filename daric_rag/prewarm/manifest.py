r"""The record of a job: JSON Lines, appended to, never rewritten.

A header says under what circumstances the entries below it hold; each entry tells of
one document; every line ends with the checksum of what it says::

    {"type": "header", "version": 2, "model": "...", "fingerprints": [...], ...}
    {"type": "document", "id": "a.md", "hash": "...", "status": "computed", ...}

A kill may tear the last line; it is cut off before the file is appended to. Lines that
are damaged are left out and counted, and what they may have changed is looked up in the
store again, which knows: the documents told of before such a line, and those behind one
that may have been a header. A writer appends whole groups of lines and returns once
they are on disk (`fsync`), always after the store was flushed, so that a document that
is called done is in the store even after a power cut.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

__all__ = [
    "BEGIN",
    "VERSION",
    "Entry",
    "Manifest",
    "Status",
    "encoded",
    "header_of",
    "is_manifest",
    "what_else",
]

VERSION: Final = 2

Status = Literal["computed", "hit", "skipped", "failed", "removed"]
"""``computed``: now; ``hit``: the store had it; ``skipped``: not to be stored, see
`error`; ``failed``: see `error`, tried again by the next run; ``removed``: not in the
corpus any more, and evicted or unpinned."""

# What a header's entries depend on: other ones say nothing about this job.
_IDENTITY: Final = ("model", "fingerprints", "namespace", "store")


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of one document.

    Attributes:
        id: Its name in the source.
        status: See `Status`.
        hash: `TextHash` in hex; "" if it has no text.
        document: `DocumentHash` in hex, of its token ids; "" if it is not stored.
        num_tokens: Of the document.
        nbytes: On disk, as far as can be told: its share by tokens.
        seconds: Its share of its batch's time, by tokens.
        error: Why it is not stored, or "".
        time: When, in seconds since 1970.
        expires: When it may go, in seconds since 1970; None: never.
        place: See `SourceItem`.
    """

    id: str
    status: Status
    hash: str = ""
    document: str = ""
    num_tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""
    time: float = 0.0
    expires: float | None = None
    place: str = ""

    @property
    def is_stored(self) -> bool:
        """Whether the store has it."""
        return self.status in ("computed", "hit")


BEGIN: Final = b'{"type": "header"'
"""Of every manifest."""
_DOCUMENT: Final = b'"type": "document"'
_HASHES: Final = {
    "hash": re.compile("(?:[0-9a-f]{32})?"),
    "document": re.compile("[0-9a-f]*"),
}

_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "id": str,
    "hash": str,
    "document": str,
    "num_tokens": int,
    "nbytes": int,
    "seconds": (int, float),
    "error": str,
    "time": (int, float),
    "expires": (int, float, type(None)),
    "place": str,
}

# Of headers.
_TEXTS: Final = ("model", "namespace", "store", "template")
_LISTS: Final = {"fingerprints": _HASHES["document"], "sources": re.compile(".*", re.S)}


class Manifest:
    """A manifest to be read; entries are streamed from the file.

    Args:
        path: The file; may be absent.

    Attributes:
        num_damaged: Lines left out by the last reading.
        has_lost_header: Whether one of them, behind the last header, may have been one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.num_damaged = 0
        self.has_lost_header = False

    def headers(self) -> list[dict[str, Any]]:
        """Return every header, in order."""
        lines = (line for line, _ in self._lines() if line is not None)
        return [line for line in lines if line["type"] == "header"]

    def circumstances(self) -> list[dict[str, Any]]:
        """Return a header of each kind that entries hold under, of the last's store."""
        kinds: dict[str, dict[str, Any]] = {}
        store = None
        for header in self.headers():
            # The last one of a kind, in their order.
            kinds.pop(repr(_identity(header)), None)
            kinds[repr(_identity(header))] = header
            store = header.get("store")
        return [header for header in kinds.values() if header.get("store") == store]

    def sources(self, header: Mapping[str, Any]) -> set[str]:
        """Return where the documents of a header's circumstances came from."""
        return {
            source
            for line in self.headers()
            if _identity(line) == _identity(header)
            for source in line.get("sources") or ()
        }

    def entries(self, header: Mapping[str, Any] | None = None) -> Iterator[Entry]:
        """Yield the entries that hold under a header's circumstances, in order.

        Args:
            header: None for all entries.
        """
        return (entry for entry in self.history(header) if entry is not None)

    def history(
        self, header: Mapping[str, Any] | None = None
    ) -> Iterator[Entry | None]:
        """Yield `entries`, and None for every damaged line: it may have said more."""
        applies = header is None
        for line, may_be_header in self._lines():
            if line is None:
                if header is not None and may_be_header:
                    applies = False
                yield None
            elif line["type"] == "header":
                applies = header is None or _identity(line) == _identity(header)
            elif (entry := _entry_of(line)) is None:
                self.num_damaged += 1
                yield None
            elif applies:
                yield entry

    def _lines(self) -> Iterator[tuple[dict[str, Any] | None, bool]]:
        """Yield lines, None for a damaged one, and whether it may be a header."""
        self.num_damaged, self.has_lost_header = 0, False
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            for raw in file:
                line = _parsed(raw)
                may_be_header = b'"header"' in raw or _DOCUMENT not in raw
                self.num_damaged += line is None
                if line is None:
                    self.has_lost_header |= may_be_header
                elif line["type"] == "header":
                    self.has_lost_header = False
                yield line, may_be_header


def header_of(identity: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return a header.

    Args:
        identity: Model, fingerprints, namespace and store.
        **more: What else is worth knowing, such as versions and the template's hash.
    """
    known = {name: identity.get(name) for name in _IDENTITY}
    return {"type": "header", "version": VERSION, **known, **more}


def _identity(header: Mapping[str, Any]) -> tuple[Any, ...]:
    # Fingerprints name a model, however its folder is written.
    names = _IDENTITY[1:] if header.get("fingerprints") else _IDENTITY
    return tuple(header.get(name) for name in names)


def encoded(line: Mapping[str, Any]) -> bytes:
    """Return a line with its checksum.

    Raises:
        ValueError: A number is none.
    """
    checked = {**line, "crc": _checksum(line)}
    return json.dumps(checked, allow_nan=False).encode() + b"\n"


def what_else(path: Path) -> str:
    """Say what a file without a header of ours is, and what to do."""
    with path.open("rb") as file:
        first = file.readline(1 << 20)
    try:
        line = json.loads(first)
    except (ValueError, RecursionError):
        line = None
    if isinstance(line, dict) and line.get("type") == "header":
        return (
            "a manifest of another version of daric_rag: name another file with "
            "--manifest; what is stored is found again, and not computed anew"
        )
    return "no manifest: name another file with --manifest"


def _checksum(line: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(line).encode())


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    # Without its newline a line may be the beginning of a longer one.
    if not raw.endswith(b"\n") or not isinstance(line, dict):
        return None
    if line.pop("crc", None) != _checksum(line):
        return None
    if line.get("type") == "header":
        return line if _is_header(line) else None
    return line if line.get("type") == "document" else None


def _is_header(line: Mapping[str, Any]) -> bool:
    if line.get("version") != VERSION:
        return False
    if not all(isinstance(line.get(name) or "", str) for name in _TEXTS):
        return False
    for name, pattern in _LISTS.items():
        values = line.get(name) or []
        if not isinstance(values, list):
            return False
        if not all(isinstance(v, str) and pattern.fullmatch(v) for v in values):
            return False
    return True


def _entry_of(line: Mapping[str, Any]) -> Entry | None:
    known = [field.name for field in fields(Entry)]
    values = {name: line[name] for name in known if name in line}
    if values.get("status") not in get_args(Status) or "id" not in values:
        return None
    for name, kind in _TYPES.items():
        if name in values and not isinstance(values[name], kind):
            return None
    for name, pattern in _HASHES.items():
        if not pattern.fullmatch(values.get(name, "")):
            return None
    if values.get("expires") is not None:
        try:
            values["expires"] = float(values["expires"])
        except OverflowError:
            return None
        if not math.isfinite(values["expires"]):
            return None
    return Entry(**values)


def is_manifest(path: Path) -> bool:
    """Whether a file begins as a manifest does."""
    if path.suffix.lower() != ".jsonl":
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(BEGIN)) == BEGIN
    except OSError:
        return False
