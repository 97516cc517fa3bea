"""What a source yields: a document with a name, or the reason why it cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daric_rag.errors import ConfigError

__all__ = ["SourceItem", "items_of"]

# As LangChain, LlamaIndex and plain records call a document's own name.
_ID_FIELDS = ("id", "id_", "node_id")


@dataclass(frozen=True, slots=True)
class SourceItem:
    """One document of a source.

    Attributes:
        id: Names it in the manifest; the same in every run.
        document: Anything that `document_text.text_of` finds a text in; None if it
            could not be read.
        error: Why it could not be read, or "".
        source_bytes: What it took up in its source, for the estimate of time left;
            0 if unknown.
        place: The file that holds it, absolute and links followed; "" if there is none.
        hides_others: Whether it stands for documents of other ids that could not be
            read either, so that none can be said to have vanished.
    """

    id: str
    document: Any = None
    error: str = ""
    source_bytes: int = 0
    place: str = ""
    hides_others: bool = False


def items_of(source: Any) -> Iterator[SourceItem]:
    """Yield documents of any kind as items, one at a time.

    Args:
        source: A LangChain loader (with ``lazy_load``), a LlamaIndex docstore (with
            ``docs``), or an iterable of `SourceItem` or whatever
            `document_text.text_of` takes: strings, dicts, documents, nodes. One
            without an id is called by its place.

    Raises:
        ConfigError: It is nothing that documents come out of.
    """
    for index, document in enumerate(_documents(source)):
        if isinstance(document, SourceItem):
            yield document
        else:
            yield SourceItem(_id_of(document) or f"item {index}", document)


def _documents(source: Any) -> Iterable[Any]:
    lazy_load = getattr(source, "lazy_load", None)
    if callable(lazy_load):
        source = lazy_load()
    docs = getattr(source, "docs", None)
    if isinstance(docs, Mapping):
        source = docs.values()
    # A str is a sequence of letters, and a dict one document.
    if isinstance(source, str | Mapping) or not isinstance(source, Iterable):
        raise ConfigError(
            f"the source is a {type(source).__name__}; pass documents, an iterator of "
            f"them, a PathSource, a LangChain loader or a LlamaIndex docstore"
        )
    return source


def _id_of(document: Any) -> str:
    for name in _ID_FIELDS:
        if isinstance(document, Mapping):
            value = document.get(name)
        else:
            value = getattr(document, name, None)
        if isinstance(value, str | int) and value != "":
            return str(value)
    return ""
