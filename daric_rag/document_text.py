"""Text, title, source and score of what retrievers return, whatever their types.

Nothing of a framework is imported: a document is a str, a mapping with ``"text"``, or
an object that LangChain, LlamaIndex or anyone else makes, known by its attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daric_rag.errors import PromptError
from daric_rag.layout import MAX_TITLE_LEN

__all__ = [
    "one_line",
    "own_title_of",
    "score_of",
    "source_of",
    "text_of",
    "title_of",
]

# As LangChain's loaders and LlamaIndex's readers name them.
_SOURCE_FIELDS = ("source", "file_name", "file_path", "url")

_TEXT_FIELDS = ("page_content", "text")


def text_of(index: int, document: Any) -> str:
    """Return a document's text, to the letter.

    Args:
        index: Names the document in an error.
        document: A str; an object with ``page_content``, ``text``, ``get_content()``
            or a ``node`` that has one of them; or a mapping with one of the first two.
            A node's metadata is not part of its text.

    Raises:
        PromptError: There is no text in it.
    """
    if isinstance(document, str):
        return document
    for carrier in (document, _field(document, "node")):
        for name in _TEXT_FIELDS:
            text = _field(carrier, name)
            if isinstance(text, str):
                return text
        content = _field(carrier, "get_content")
        text = content() if callable(content) else None
        if isinstance(text, str):
            return text
    raise PromptError(
        f"document {index} is a {type(document).__name__} without text; pass a str, a "
        f'dict with "text", or an object with a page_content or text attribute'
    )


def title_of(document: Any, text: str) -> str:
    """Return what the store's listing calls a document: one printable line.

    That is its own title, else where it comes from, else how its text begins.
    """
    named = own_title_of(document) or source_of(document) or text
    return one_line(named[: 4 * MAX_TITLE_LEN])


def own_title_of(document: Any) -> str:
    """Return a document's own title; else ""."""
    return _first_text(_field(document, "title"), _metadata_of(document).get("title"))


def source_of(document: Any) -> str:
    """Return where a document comes from, as its metadata say; else ""."""
    metadata = _metadata_of(document)
    named = [metadata.get(name) for name in _SOURCE_FIELDS]
    return _first_text(_field(document, "source"), *named)


def score_of(document: Any) -> float | None:
    """Return a retriever's score, higher is better; None if it gave none."""
    score = _field(document, "score")
    if isinstance(score, int | float) and not isinstance(score, bool):
        return float(score)
    return None


def one_line(text: str) -> str:
    """Return a title: short, and printable on terminals, whatever a text holds."""
    line = " ".join(text.split())[:MAX_TITLE_LEN]
    return "".join(char if char.isprintable() else "?" for char in line)


def _field(carrier: Any, name: str) -> Any:
    if isinstance(carrier, Mapping):
        return carrier.get(name)
    try:
        return getattr(carrier, name, None)
    except ValueError:
        # A property that refuses, as LlamaIndex's `text` of a node that is no text.
        return None


def _metadata_of(document: Any) -> Mapping[str, Any]:
    for carrier in (document, _field(document, "node")):
        metadata = _field(carrier, "metadata")
        if isinstance(metadata, Mapping):
            return metadata
    return {}


def _first_text(*values: Any) -> str:
    texts = (v for v in values if isinstance(v, str) and v.strip())
    return next(texts, "")
