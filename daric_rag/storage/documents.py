r"""From a store's segments to the documents that an operator knows, and back.

Segments form a tree, for documents that begin alike share their first segments::

    root -- a0 -- a1 [Annual report]     own: a1; shared: a0
               \-- b1 -- b2 [Addendum]   own: b1, b2; shared: a0

A document ends at a segment that says so in its side data, or at a leaf that says
nothing: the beginning of a raw prompt, or a document whose end is not stored (yet).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from daric_rag.document_info import DocumentInfo, decode_document

if TYPE_CHECKING:
    from daric_rag.storage.database import SegmentRow

__all__ = ["Document", "DocumentTree"]

_NONE: Final = -1


@dataclass(frozen=True, slots=True)
class Document:
    """One document as the store holds it, for one model and one namespace.

    Attributes:
        key: `SegmentKey` of its last segment; names it within a store.
        document_hash: Names it by its token ids, whatever the model; None where its
            last segment says nothing about it.
        title: For people, "" if it has none.
        namespace: Its tenant; None where no document of the same root tells.
        fingerprint: `ModelFingerprint` of the model whose KV it is.
        num_tokens: Tokens stored.
        num_segments: Segments stored, shared ones included.
        nbytes: Their bytes on disk.
        own_bytes: Bytes of the segments that no other document needs: what evicting
            this one alone frees.
        last_used: Last use, in seconds since 1970.
        uses: How often it was used.
        pinned: Whether it is kept from eviction.
        complete: Whether no segment before the last one is missing. One that is not
            is worth nothing before its missing segments come back.
    """

    key: bytes
    document_hash: bytes | None
    title: str
    namespace: str | None
    fingerprint: bytes
    num_tokens: int
    num_segments: int
    nbytes: int
    own_bytes: int
    last_used: float
    uses: int
    pinned: bool
    complete: bool


@dataclass(frozen=True, slots=True)
class _Chain:
    """Totals from a document's first segment to this one."""

    num_segments: int
    num_tokens: int
    nbytes: int
    root: bytes
    complete: bool


class DocumentTree:
    """The documents of a store, as it was when `rows` were read.

    Takes time and memory in proportion to the rows, however documents share them.

    Args:
        rows: `DiskTier.segments()`.

    Attributes:
        documents: Each once, in no particular order.
    """

    def __init__(self, rows: "Iterable[SegmentRow]") -> None:
        # By depth: a parent stands before its children.
        self._rows = sorted(rows, key=lambda row: row.segment_index)
        self._position = {row.key: i for i, row in enumerate(self._rows)}
        self._parents = [self._parent_of(row) for row in self._rows]
        inner = set(self._parents)
        self._ends: dict[int, DocumentInfo | None] = {}
        for i, row in enumerate(self._rows):
            info = decode_document(row.side_data) if row.side_data else None
            if info is not None or i not in inner:
                self._ends[i] = info
        self._num_ends = self._count_below(self._ends)
        self._chains = self._follow_chains()
        # A root stands for one model and one namespace.
        self._namespaces = {
            self._chains[i].root: info.namespace
            for i, info in self._ends.items()
            if info is not None and self._chains[i].complete
        }
        self.documents: list[Document] = self._describe()

    @property
    def rows(self) -> "list[SegmentRow]":
        """All segments, parents first."""
        return self._rows

    def nbytes_by_namespace(self) -> dict[str | None, int]:
        """Bytes of every namespace; under None those of which it is not known."""
        nbytes: dict[str | None, int] = {}
        for row, chain in zip(self._rows, self._chains, strict=True):
            namespace = self._namespaces.get(chain.root)
            nbytes[namespace] = nbytes.get(namespace, 0) + row.nbytes
        return nbytes

    def segments_of(self, documents: Iterable[Document]) -> "list[SegmentRow]":
        """Return the segments of any of these, each once.

        Document by document, each from its beginning.
        """
        segments: list[SegmentRow] = []
        seen: set[int] = set()
        for document in documents:
            chain = []
            i = self._position[document.key]
            while i != _NONE and i not in seen:
                seen.add(i)
                chain.append(self._rows[i])
                i = self._parents[i]
            segments += reversed(chain)
        return segments

    def only_of(self, documents: Iterable[Document]) -> "list[SegmentRow]":
        """Return the segments that no other document needs, children first."""
        below = self._count_below(self._position[d.key] for d in documents)
        counts = zip(self._rows, below, self._num_ends, strict=True)
        return [row for row, chosen, ends in counts if chosen == ends][::-1]

    def needing(self, keys: Iterable[bytes]) -> list[Document]:
        """Return the documents that any of these segments is part of."""
        needed = set(keys)
        is_part = [row.key in needed for row in self._rows]
        for i, parent in enumerate(self._parents):
            is_part[i] |= parent != _NONE and is_part[parent]
        return [d for d in self.documents if is_part[self._position[d.key]]]

    def _parent_of(self, row: "SegmentRow") -> int:
        # The rows' contents may be damaged: only a parent that is one step nearer
        # to the root is believed, so that there are no cycles.
        i = self._position.get(row.parent, _NONE)
        if i == _NONE:
            return _NONE
        parent = self._rows[i]
        follows = parent.segment_index == row.segment_index - 1
        return i if follows and parent.fingerprint == row.fingerprint else _NONE

    def _count_below(self, positions: Iterable[int]) -> list[int]:
        """For every row, how many of `positions` are at it or below it."""
        counts = [0] * len(self._rows)
        for i in positions:
            counts[i] += 1
        for i in range(len(counts) - 1, -1, -1):
            if self._parents[i] != _NONE:
                counts[self._parents[i]] += counts[i]
        return counts

    def _describe(self) -> list[Document]:
        documents = []
        for i, info in self._ends.items():
            row, chain = self._rows[i], self._chains[i]
            namespace = info.namespace if info else self._namespaces.get(chain.root)
            documents.append(
                Document(
                    row.key,
                    info.document_hash if info else None,
                    info.title if info else "",
                    namespace,
                    row.fingerprint,
                    chain.num_tokens,
                    chain.num_segments,
                    chain.nbytes,
                    self._own_bytes(i),
                    row.last_used,
                    row.uses,
                    row.pinned,
                    chain.complete,
                )
            )
        return documents

    def _follow_chains(self) -> list[_Chain]:
        chains: list[_Chain] = []
        for row, parent in zip(self._rows, self._parents, strict=True):
            if parent == _NONE:
                before = _Chain(0, 0, 0, row.parent, row.segment_index == 0)
            else:
                before = chains[parent]
            chains.append(
                _Chain(
                    before.num_segments + 1,
                    before.num_tokens + row.num_tokens,
                    before.nbytes + row.nbytes,
                    before.root,
                    before.complete,
                )
            )
        return chains

    def _own_bytes(self, i: int) -> int:
        nbytes = 0
        while i != _NONE and self._num_ends[i] == 1:
            nbytes += self._rows[i].nbytes
            i = self._parents[i]
        return nbytes
