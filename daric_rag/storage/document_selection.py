"""Which of a store's documents somebody means."""

import fnmatch
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from daric_rag.errors import ConfigError
from daric_rag.storage.documents import Document

__all__ = ["MIN_PREFIX_LEN", "Selection", "select"]

MIN_PREFIX_LEN: Final = 4
_MAX_LISTED: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which documents are meant; a document must satisfy everything that is given.

    Attributes:
        names: Beginnings of document hashes or of last segments' keys in hex, each of
            exactly one document.
        title: Pattern of the whole title, as in a shell (``*``, ``?``, ``[...]``);
            upper and lower case are the same.
        namespace: The tenant.
        model: Beginning of the model's fingerprint in hex, `MIN_PREFIX_LEN` digits at
            least.
        unused_for_s: Seconds since the last use, at least.
        all: Every document that the rest lets through.
    """

    names: tuple[str, ...] = ()
    title: str | None = None
    namespace: str | None = None
    model: str | None = None
    unused_for_s: float | None = None
    all: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is given."""
        return self == Selection()

    @property
    def is_unlimited(self) -> bool:
        """Whether whatever a store holds is meant, however that was said."""
        return (
            not self.names
            and self.namespace is None
            and self.model is None
            and (self.title is None or set(self.title) == {"*"})
            and (self.unused_for_s is None or self.unused_for_s <= 0)
        )


def select(
    documents: Iterable[Document], selection: Selection, *, now: float
) -> list[Document]:
    """Return the documents that are meant, in the order of `documents`.

    Args:
        documents: Of a `DocumentTree`.
        selection: An empty one means every document.
        now: Seconds since 1970.

    Raises:
        ConfigError: If a name or the model is too short or no hex text, or a name not
            the beginning of exactly one document among those that satisfy the rest.
    """
    satisfies = _filter_of(selection, now)
    chosen = [d for d in documents if satisfies(d)]
    if not selection.names:
        return chosen
    named = _Names(chosen)
    positions = {named.find(name) for name in selection.names}
    return [chosen[i] for i in sorted(positions)]


def _filter_of(selection: Selection, now: float) -> Callable[[Document], bool]:
    model = "" if selection.model is None else selection.model.lower()
    if selection.model is not None and not _is_prefix(model):
        raise ConfigError(
            f"{selection.model!r} names no model: give {MIN_PREFIX_LEN} or more hex "
            "digits of its fingerprint, as `daric store stats` shows it"
        )
    pattern = "*" if selection.title is None else selection.title
    title = re.compile(fnmatch.translate(pattern.casefold()))
    age = selection.unused_for_s

    def satisfies(document: Document) -> bool:
        return (
            (age is None or now - document.last_used >= age)
            and selection.namespace in (None, document.namespace)
            and document.fingerprint.hex().startswith(model)
            and title.match(document.title.casefold()) is not None
        )

    return satisfies


def _is_prefix(text: str) -> bool:
    """Whether this can be the beginning of a hash: too few digits say too little."""
    return re.fullmatch(rf"[0-9a-f]{{{MIN_PREFIX_LEN},}}", text) is not None


class _Names:
    """Documents found by the beginning of a name: hash or last segment's key."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents
        self._names: list[tuple[str, int]] = []
        for i, document in enumerate(documents):
            self._names.append((document.key.hex(), i))
            if document.document_hash is not None:
                self._names.append((document.document_hash.hex(), i))
        self._names.sort()

    def find(self, name: str) -> int:
        """Return the position of the one document whose name begins so."""
        prefix = name.lower()
        if not _is_prefix(prefix):
            raise ConfigError(
                f"{name!r} names no document: give {MIN_PREFIX_LEN} or more hex digits "
                "of its hash or key, or --title PATTERN"
            )
        start = bisect_left(self._names, (prefix, -1))
        end = bisect_left(self._names, (prefix + "g", -1))  # "g" follows every digit
        found = {i for _, i in self._names[start:end]}
        if not found:
            raise ConfigError(
                f"no document here begins with {name!r}: `daric store ls` lists them"
            )
        if len(found) > 1:
            raise ConfigError(self._ambiguous(name, sorted(found)))
        return found.pop()

    def _ambiguous(self, name: str, positions: list[int]) -> str:
        documents = [self._documents[i] for i in positions[:_MAX_LISTED]]
        listed = ", ".join(f"{d.key.hex()[:12]} ({d.title[:40]!r})" for d in documents)
        more = ", ..." if len(positions) > _MAX_LISTED else ""
        return (
            f"{len(positions)} documents begin with {name!r}: give more digits, the "
            f"key of one, --model or --namespace; keys: {listed}{more}"
        )
