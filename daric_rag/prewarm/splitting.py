"""Documents cut into the pieces that are retrieved, by the retriever's splitter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from daric_rag.errors import ConfigError
from daric_rag.prewarm.items import SourceItem

__all__ = ["Split", "load_splitter", "split_items", "split_of"]

Split = Callable[[str], Sequence[str]]
"""From a document's text to its pieces."""


def load_splitter(name: str) -> Split:
    """Import a splitter from the working directory or wherever Python finds modules.

    Args:
        name: ``"module:object"``, where the object may be ``a.b``; see `split_of`.

    Raises:
        ConfigError: There is none.
    """
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ConfigError(
            f"splitter {name!r}: write it as module:object, as indexing:splitter"
        )
    # As of `python -m`; an installed command has its own folder there instead.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        # The module is the operator's own: whatever it raises, this is why.
        raise ConfigError(
            f"splitter {name!r}: importing {module} failed ({error!r}): run it where "
            f"the module is, or install it"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"splitter {name!r}: {found!r} has no {part!r}")
        found = getattr(found, part)
    return split_of(found)


def split_of(splitter: Any) -> Split:
    """Return how a splitter cuts texts.

    Args:
        splitter: Has ``split_text``, as LangChain's text splitters and LlamaIndex's
            `SentenceSplitter` do, or is a function from a text to its pieces. In an
            index, LlamaIndex's splitters cut documents that have metadata otherwise.

    Raises:
        ConfigError: It is something else.
    """
    split = getattr(splitter, "split_text", splitter)
    if split is splitter and hasattr(splitter, "get_nodes_from_documents"):
        raise ConfigError(
            f"a {type(splitter).__name__} makes nodes of documents and splits no text; "
            f"hand its nodes to daric_rag.prewarm.PrewarmJob, or put a "
            f"DaricPrewarmTransform behind it"
        )
    if isinstance(splitter, type) or not callable(split):
        raise ConfigError(
            f"the splitter is {splitter!r}; give an object with split_text(text), or a "
            f"function from a text to its pieces"
        )

    def checked(text: str) -> Sequence[str]:
        found = split(text)
        # A generator can be read once.
        pieces = list(found)
        # A text is a sequence of texts as well.
        if isinstance(found, str) or not all(isinstance(p, str) for p in pieces):
            raise TypeError("the splitter returned something else than a list of texts")
        return pieces

    return checked


def split_items(items: Iterable[SourceItem], split: Split) -> Iterator[SourceItem]:
    """Yield the pieces of items; each keeps its document's title and metadata.

    The first piece of ``a.txt`` is called ``a.txt#1``. A document that cannot be read,
    or be split, hides what its pieces are called.
    """
    for item in items:
        if item.error:
            yield replace(item, hides_others=True)
            continue
        try:
            pieces = split(item.document["text"])
        except (Exception, SystemExit) as error:
            # A splitter is foreign code: one document it fails at stops no job.
            why = f"could not be split ({error!r})"
            yield SourceItem(item.id, error=why, hides_others=True)
            continue
        if not pieces:
            yield replace(item, document={**item.document, "text": ""})
        for number, piece in enumerate(pieces, 1):
            yield SourceItem(
                f"{item.id}#{number}",
                {**item.document, "text": piece},
                # Once per document, for the estimate of time left.
                source_bytes=item.source_bytes if number == 1 else 0,
                place=item.place,
            )
