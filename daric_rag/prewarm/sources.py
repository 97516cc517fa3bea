"""Files, folders, JSON Lines and standard input as streams of documents.

A source is read while its documents are computed and never held as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from daric_rag.errors import ConfigError
from daric_rag.prewarm.folders import Findings, blocks, files_of, real, size_of
from daric_rag.prewarm.items import SourceItem
from daric_rag.prewarm.readers import (
    JSONL_SUFFIXES,
    MAX_DOCUMENT_BYTES,
    UnreadableError,
    check_readers,
    read_text,
)
from daric_rag.prewarm.splitting import Split, split_items

__all__ = ["JsonFields", "PathSource", "read_json_lines"]


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Which fields of a JSON Lines record say what.

    Attributes:
        text: Its text; required in every record.
        title: Its title, may be absent.
        source: Where it comes from, may be absent.
        id: Its name in the manifest; None or absent: file and line number.
    """

    text: str = "text"
    title: str = "title"
    source: str = "source"
    id: str | None = "id"


class PathSource:
    """Documents of files and folders, in a fixed order. Can be read many times.

    Of a folder, files of known suffixes at any depth, hidden ones and manifests left
    out; links are followed. A file is a document; a ``.jsonl`` file has one per line. A
    file that is named itself is read whatever its suffix is.

    Args:
        paths: Files and folders; ``"-"`` is JSON Lines on standard input.
        fields: Of JSON Lines records.
        stdin: Read for ``"-"``.
        split: Cuts texts into pieces, which are documents then; see `splitting`.
        leave_out: Files that are no documents, wherever they lie.

    Attributes:
        num_ignored: Files in folders whose suffix is none of `SUFFIXES`, by suffix, as
            it was at first.
        linked: Folders that links led to then, links followed.

    Raises:
        ConfigError: A path does not exist, or what reads such files is missing.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        fields: JsonFields | None = None,
        stdin: BinaryIO | None = None,
        split: Split | None = None,
        leave_out: Iterable[Path] = (),
    ) -> None:
        """Look at the paths, so that a wrong one is told before any work."""
        self._paths = [os.fspath(path) for path in paths]
        self._fields = fields or JsonFields()
        self._stdin, self._split = stdin, split
        self._left_out = {real(path) for path in leave_out}
        if not self._paths:
            raise ConfigError("no source is named: give files, folders, or - for stdin")
        for path in self._paths:
            if path == "-" and stdin is None:
                raise ConfigError("standard input cannot be read here: name a file")
            if path != "-" and not Path(path).exists():
                raise ConfigError(f"{path} does not exist: name a file or a folder")
        self._found = Findings()
        self.num_ignored, self.linked = self._found.num_others, self._found.linked
        self._num_bytes, suffixes = 0, set()
        for path in self._paths:
            if path == "-":
                continue
            for file in files_of(path, self._found):
                suffixes.add(file.suffix.lower())
                self._num_bytes += size_of(file)
        check_readers(suffixes)

    @property
    def places(self) -> list[str]:
        """Where the documents are, however the paths are written; for the manifest."""
        resolved = (p if p == "-" else str(Path(p).resolve()) for p in self._paths)
        return sorted(set(resolved))

    @property
    def num_bytes(self) -> int | None:
        """Bytes of all files, as they were at first; None with standard input."""
        return None if "-" in self._paths else self._num_bytes

    def emptied(self, place: str) -> str:
        """Return where a document was, if the last reading found nothing at all there.

        A disk that is not mounted looks like that, and a file that is being written.

        Args:
            place: A document's.

        Returns:
            A folder or file that is empty, or "".
        """
        if not (place and self._found.empty):
            return ""
        path = Path(place)
        found = (one for one in (path, *path.parents) if one in self._found.empty)
        return str(next(found, ""))

    def __iter__(self) -> Iterator[SourceItem]:
        """Yield every document, or why it cannot be read."""
        if self._split is None:
            return self._read_all()
        return split_items(self._read_all(), self._split)

    def _read_all(self) -> Iterator[SourceItem]:
        found = self._found = Findings()
        for path in self._paths:
            if path == "-":
                assert self._stdin is not None
                yield from read_json_lines(self._stdin, "stdin", self._fields)
                continue
            is_empty = Path(path).is_dir()
            for file in files_of(path, found):
                if self._left_out and real(file) in self._left_out:
                    continue
                is_empty = False
                if file != Path(path) and blocks(file):
                    yield SourceItem(str(file), error="is no regular file")
                else:
                    yield from self._read(file)
            if is_empty:
                found.empty.add(real(Path(path)))
            for error in found.unread:
                yield _unread_item(str(error.filename), error)
            found.unread.clear()

    def _read(self, file: Path) -> Iterator[SourceItem]:
        num_bytes = size_of(file)
        place = str(real(file))
        if not num_bytes:
            self._found.empty.add(Path(place))
        if file.suffix.lower() in JSONL_SUFFIXES:
            try:
                with file.open("rb") as lines:
                    yield from read_json_lines(lines, str(file), self._fields, place)
            except OSError as error:
                yield _unread_item(str(file), error)
            return
        try:
            document = {"text": read_text(file), "source": str(file)}
            yield SourceItem(str(file), document, source_bytes=num_bytes, place=place)
        except UnreadableError as error:
            yield SourceItem(
                str(file),
                error=str(error),
                source_bytes=num_bytes,
                place=place,
                # What it was called, and held, when it could be read is not known.
                hides_others=isinstance(error.__cause__, OSError),
            )


def read_json_lines(
    lines: BinaryIO, name: str, fields: JsonFields, in_file: str = ""
) -> Iterator[SourceItem]:
    """Yield the documents of a JSON Lines stream; empty lines are left out.

    A document has the record's ``"metadata"`` if that is a mapping, else the fields
    that are named by nothing here.
    """
    number = 0
    while line := lines.readline(MAX_DOCUMENT_BYTES + 1):
        number += 1
        called = f"{name}:{number}"
        num_bytes = len(line)
        if num_bytes > MAX_DOCUMENT_BYTES:
            while line and not line.endswith(b"\n"):
                line = lines.readline(MAX_DOCUMENT_BYTES)
                num_bytes += len(line)
            error = f"is longer than {MAX_DOCUMENT_BYTES >> 20} MiB: split it"
            yield SourceItem(called, None, error, num_bytes, hides_others=True)
        elif line.strip():
            item = _record_item(line, called, fields)
            yield item if item.error else replace(item, place=in_file)


def _record_item(line: bytes, called: str, fields: JsonFields) -> SourceItem:
    num_bytes = len(line)
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        why = f"is no JSON ({' '.join(str(error).split())})"
        # What it was called before it was damaged cannot be told.
        return SourceItem(called, None, why, num_bytes, hides_others=True)
    is_record = isinstance(record, dict)
    own = record.get(fields.id) if is_record and fields.id is not None else None
    name = str(own) if isinstance(own, str | int) and own != "" else called
    if not is_record or not isinstance(record.get(fields.text), str):
        where = "" if name == called else f"{called} "
        why = f"{where}has no text in the field {fields.text!r}: see --text-field"
        return SourceItem(name, None, why, num_bytes, hides_others=name == called)
    return SourceItem(name, _document(record, fields), source_bytes=num_bytes)


def _document(record: dict[str, Any], fields: JsonFields) -> dict[str, Any]:
    used = (fields.text, fields.title, fields.source, fields.id, "metadata")
    metadata = record.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {key: value for key, value in record.items() if key not in used}
    document = {"text": record[fields.text], "metadata": metadata}
    for name, field in (("title", fields.title), ("source", fields.source)):
        if isinstance(record.get(field), str):
            document[name] = record[field]
    return document


def _unread_item(name: str, error: OSError) -> SourceItem:
    """Return what tells of a file or folder whose documents are called otherwise."""
    reason = error.strerror or str(error)
    return SourceItem(name, error=f"cannot be read ({reason})", hides_others=True)
