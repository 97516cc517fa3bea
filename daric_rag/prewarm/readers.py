"""The text of one file: plain text, Markdown, HTML, PDF."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Final

from daric_rag.errors import ConfigError, DaricError

__all__ = [
    "JSONL_SUFFIXES",
    "MAX_DOCUMENT_BYTES",
    "SUFFIXES",
    "UnreadableError",
    "check_readers",
    "read_text",
]

JSONL_SUFFIXES: Final = (".jsonl", ".ndjson")

MAX_DOCUMENT_BYTES: Final = 64 << 20
"""A file or a line that is longer holds no document that a model could read."""


class UnreadableError(DaricError):
    """A document of a source has no text that can be read; it is reported."""


def read_text(path: Path) -> str:
    """Return a file's text; a suffix that is not known means plain text.

    Raises:
        UnreadableError: It cannot be read, is damaged, not UTF-8, or too long.
        ConfigError: What reads such files is not installed.
    """
    reader = _READERS.get(path.suffix.lower(), _plain)
    try:
        return reader(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnreadableError(f"cannot be read ({reason})") from error
    except UnicodeDecodeError as error:
        raise UnreadableError(
            f"is not UTF-8 (byte {error.start}): convert it to UTF-8"
        ) from error


def check_readers(suffixes: set[str]) -> None:
    """Refuse, before any work, files that nothing here reads.

    Args:
        suffixes: Of the files to come, in lower case.

    Raises:
        ConfigError: What reads such files is not installed.
    """
    if suffixes & {".html", ".htm"}:
        _needed("bs4", "HTML")
    if ".pdf" in suffixes:
        _needed("pypdf", "PDF")


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise UnreadableError(
            f"is longer than {MAX_DOCUMENT_BYTES >> 20} MiB: split it"
        )
    return content


def _plain(path: Path) -> str:
    return _content(path).decode("utf-8-sig")


def _html(path: Path) -> str:
    """Return the text that a browser would show, a line per block."""
    bs4 = _needed("bs4", "HTML")
    content = _content(path)
    # It warns of what is refused below.
    logging.getLogger("bs4.dammit").setLevel(logging.ERROR)
    try:
        # Bytes: a page may say itself how it is encoded.
        soup = bs4.BeautifulSoup(content, "html.parser")
    except Exception as error:
        # What its parser refuses has an error that is of no narrower kind.
        reason = " ".join(str(error).split())
        raise UnreadableError(f"is no HTML that can be read ({reason})") from error
    if soup.contains_replacement_characters:
        raise UnreadableError("is in no encoding that it names: convert it to UTF-8")
    for hidden in soup(["script", "style", "template", "noscript", "head"]):
        hidden.decompose()
    lines = (" ".join(line.split()) for line in soup.get_text("\n").splitlines())
    return "\n".join(line for line in lines if line)


def _pdf(path: Path) -> str:
    """Return the pages' text, an empty line between two."""
    pypdf = _needed("pypdf", "PDF")
    # It warns of every fault that it mends.
    logging.getLogger("pypdf").setLevel(logging.ERROR)
    content = io.BytesIO(_content(path))
    try:
        pages = [page.extract_text() for page in pypdf.PdfReader(content).pages]
    except Exception as error:
        # pypdf raises errors of its own and builtin ones alike on damaged files.
        raise UnreadableError(f"is no PDF that can be read ({error!r})") from error
    return "\n\n".join(page.strip() for page in pages if page.strip())


def _needed(module: str, kind: str) -> ModuleType:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"reading {kind} files needs {module}: pip install 'daric-rag[prewarm]'"
        ) from error


_READERS: Final[dict[str, Callable[[Path], str]]] = {
    ".txt": _plain,
    ".text": _plain,
    ".md": _plain,
    ".markdown": _plain,
    ".rst": _plain,
    ".html": _html,
    ".htm": _html,
    ".pdf": _pdf,
}

SUFFIXES: Final = (*_READERS, *JSONL_SUFFIXES)
"""Of the files that are looked for in folders."""
