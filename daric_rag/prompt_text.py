"""The text of documents and questions in a prompt: templates and delimiters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from daric_rag.document_text import own_title_of, source_of, text_of
from daric_rag.errors import ConfigError, PromptError

__all__ = [
    "DocumentTemplate",
    "SourceDocument",
    "check_delimiter",
    "check_template",
    "joined",
    "rendered",
    "without_delimiter",
]

# What is put into a forged delimiter: the first of these that it does not hold.
_BREAKERS = " -_~."


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """What a document template sees of a document.

    Nothing here changes with the query: a score in the text would give one document
    another hash in every prompt.

    Attributes:
        text: To the letter.
        title: Its own, on one line; "" if it has none.
        source: Where it comes from, as its metadata say, on one line; "" if they do
            not.
    """

    text: str
    title: str = ""
    source: str = ""

    @classmethod
    def of(cls, index: int, document: Any) -> SourceDocument:
        """Read a document of any form that `document_text.text_of` takes.

        Raises:
            PromptError: There is no text in it.
        """
        text = text_of(index, document)
        named = (own_title_of(document), source_of(document))
        title, source = (" ".join(name.split()) for name in named)
        return cls(text, title, source)


DocumentTemplate = str | Callable[[SourceDocument], str]


def check_template(name: str, template: object, known: Sequence[str]) -> None:
    """Refuse a template that has other fields than the known ones, or lacks the first.

    Raises:
        ConfigError: So it is, or it is no text.
    """
    allowed = ", ".join(f"{{{field}}}" for field in known)
    if not isinstance(template, str):
        raise ConfigError(
            f"{name} is a {type(template).__name__}; pass a str with {allowed}"
        )
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"{name} is malformed ({error}); double its braces"
        ) from error
    fields = [field for _, field, *_ in parsed if field is not None]
    plain = not any(spec or conversion for *_, spec, conversion in parsed)
    if known[0] not in fields or not set(fields) <= set(known) or not plain:
        raise ConfigError(
            f"{name} is {template!r}; it must hold {{{known[0]}}} and no other fields "
            f"than {allowed}; double any other brace"
        )


def rendered(template: DocumentTemplate, document: SourceDocument) -> str:
    """Return a document's text as it stands in a prompt; "" if it has none.

    Raises:
        PromptError: The template is a function that returned something else.
    """
    if not document.text.strip():
        return ""
    if isinstance(template, str):
        return template.format(
            text=document.text, title=document.title, source=document.source
        )
    text = template(document)
    if not isinstance(text, str):
        raise PromptError(
            f"document_template returned a {type(text).__name__}; let it return a str"
        )
    return text


def check_delimiter(delimiter: object) -> None:
    """Refuse a delimiter that could not be kept out of texts.

    Raises:
        ConfigError: It is empty, white space alone, or holds every breaker.
    """
    if not isinstance(delimiter, str) or not delimiter.strip():
        raise ConfigError(
            f"delimiter is {delimiter!r}; it must be a str that is more than white "
            f"space, or None"
        )
    if set(_BREAKERS) <= set(delimiter):
        raise ConfigError(
            f"delimiter holds each of {_BREAKERS!r}; leave one of them out, so that a "
            f"delimiter inside a document can be broken with it"
        )


def without_delimiter(text: str, delimiter: str) -> str:
    """Return text with every delimiter in it broken, and readable as before.

    One sign is put behind its first character: ``"## a"`` becomes ``"# # a"`` where
    the delimiter is ``"##"``. A delimiter of one character is replaced by the sign.
    """
    breaker = _breaker(delimiter)
    broken = delimiter[0] + breaker + delimiter[1:] if delimiter[1:] else breaker
    # Delimiters that overlap take several rounds; none comes up anew, because no
    # delimiter holds the breaker.
    while delimiter in text:
        text = text.replace(delimiter, broken)
    return text


def joined(texts: Sequence[str], delimiter: str) -> str:
    """Return non-empty texts as one, each a chunk where it is split again.

    A text that would form a delimiter with the one behind it gets a breaker too.
    """
    pieces = [without_delimiter(text, delimiter) for text in texts]
    breaker = _breaker(delimiter)
    for index, piece in enumerate(pieces[:-1]):
        if (piece + delimiter).find(delimiter) < len(piece):
            pieces[index] += breaker
    return delimiter.join(pieces)


def _breaker(delimiter: str) -> str:
    return next(sign for sign in _BREAKERS if sign not in delimiter)
