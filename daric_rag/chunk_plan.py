"""One chunk of a prompt against the index: what is stored of it, and what follows.

Segments of a chunk are chained, so the store has a leading part of it; the rest is
generated on top of that, or computed in place where the chunk is the prompt's first
and therefore an exact prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daric_rag.keys import ModelFingerprint, SegmentKey, segment_keys
from daric_rag.selection import Span
from daric_rag.wire import RequestWire

__all__ = [
    "CachedChunk",
    "ChunkHits",
    "ChunkPlan",
    "MatchSegments",
    "SegmentSave",
    "cached_chunks",
]

MatchSegments = Callable[[Sequence[SegmentKey]], int]
"""From a chain of keys to how many of its leading segments are in the store."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk whose independent KV has to be put into the request's blocks.

    Attributes:
        start: First position; also the distance by which its keys are re-encoded.
        end: Position after its last token.
        keys: Its segments' keys, [num_segments].
        max_segment_len: Tokens per segment; the last one may be shorter.
        num_hit_segments: Leading segments that the index knows. The rest is
            generated on top of them.
        place_from: First position to write; before it lies the GPU prefix.
        contiguous: Whether every chunk before it is hit: the group it counts to.
        ends_document: Whether a document ends with the last of `keys`.
        title: What the store's listing calls it.
    """

    start: int
    end: int
    keys: tuple[SegmentKey, ...]
    max_segment_len: int
    num_hit_segments: int
    place_from: int
    contiguous: bool
    ends_document: bool = True
    title: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens in the chunk."""
        return self.end - self.start

    @property
    def hit_len(self) -> int:
        """Leading tokens that the store has."""
        return min(self.num_hit_segments * self.max_segment_len, self.num_tokens)

    @property
    def hit_keys(self) -> tuple[SegmentKey, ...]:
        """Keys of the segments that the store has."""
        return self.keys[: self.num_hit_segments]

    @property
    def loaded_len(self) -> int:
        """Tokens of the hit that are written, those beyond the GPU prefix."""
        return max(0, self.start + self.hit_len - self.place_from)

    def segment_span(self, index: int) -> Span:
        """Positions of segment `index` within the chunk."""
        start = index * self.max_segment_len
        return start, min(start + self.max_segment_len, self.num_tokens)


@dataclass(frozen=True, slots=True)
class SegmentSave:
    """A segment of the first chunk that will lie in the request's blocks, exact.

    Attributes:
        index: Which of its chunk's segments it is.
        start: First position in the prompt.
        end: Position after its last token.
        ends_document: Whether a document ends with it.
    """

    index: int
    start: int
    end: int
    ends_document: bool


@dataclass(frozen=True, slots=True)
class CachedChunk:
    """A chunk whose KV the store may have.

    Attributes:
        start: First position.
        end: Position after the last token that is stored.
        title: For the store's listing.
        ends_document: Whether a document ends there.
    """

    start: int
    end: int
    title: str
    ends_document: bool


@dataclass(frozen=True, slots=True)
class ChunkHits:
    """Such a chunk and what the index knows of it.

    Attributes:
        chunk: The chunk.
        keys: Its segments' keys.
        max_segment_len: Tokens per segment; the last one may be shorter.
        num_hit_segments: Leading segments that are used.
        exact_records: Whether records hold exactly what was computed.
    """

    chunk: CachedChunk
    keys: tuple[SegmentKey, ...]
    max_segment_len: int
    num_hit_segments: int
    exact_records: bool

    @classmethod
    def of(
        cls,
        chunk: CachedChunk,
        token_ids: Sequence[int],
        root: ModelFingerprint,
        max_segment_len: int,
        match: MatchSegments,
        *,
        exact_records: bool,
    ) -> ChunkHits:
        """Look a chunk up.

        Where records are not exact, the rest of a document must not be computed on
        top of them: what it becomes would depend on what happened to be stored.
        """
        keys = segment_keys(root, token_ids[chunk.start : chunk.end], max_segment_len)
        num_hits = match(keys)
        if chunk.ends_document and not exact_records and num_hits < len(keys):
            num_hits = 0
        return cls(chunk, keys, max_segment_len, num_hits, exact_records)

    @property
    def start(self) -> int:
        """First position."""
        return self.chunk.start

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.chunk.end

    @property
    def hit_len(self) -> int:
        """Leading tokens that the store has."""
        return min(self.num_hit_segments * self.max_segment_len, self.end - self.start)

    @property
    def is_hit(self) -> bool:
        """Whether the store has all of it."""
        return self.num_hit_segments == len(self.keys)

    def plan(self, gpu_prefix_len: int, *, contiguous: bool) -> ChunkPlan:
        """Return what has to be put into the request's blocks."""
        # Of the first chunk only the hit part is placed: its rest is a window.
        hit_only = self.start == 0
        num_keys = self.num_hit_segments if hit_only else len(self.keys)
        return ChunkPlan(
            start=self.start,
            end=self.start + self.hit_len if hit_only else self.end,
            keys=self.keys[:num_keys],
            max_segment_len=self.max_segment_len,
            num_hit_segments=self.num_hit_segments,
            place_from=max(self.start, gpu_prefix_len),
            contiguous=contiguous,
            ends_document=self.chunk.ends_document and num_keys == len(self.keys),
            title=self.chunk.title,
        )

    def saves(self) -> tuple[SegmentSave, ...]:
        """Return the missing segments of a prompt's first chunk.

        None that would be computed on top of records that are not exact.
        """
        if self.num_hit_segments and not self.exact_records:
            return ()
        stride, last = self.max_segment_len, len(self.keys) - 1
        return tuple(
            SegmentSave(
                index,
                index * stride,
                min((index + 1) * stride, self.end),
                self.chunk.ends_document and index == last,
            )
            for index in range(self.num_hit_segments, len(self.keys))
        )


def cached_chunks(wire: RequestWire, max_segment_len: int) -> list[CachedChunk]:
    """Return the chunks whose KV the store may have, by position."""
    titles = wire.titles or ("",) * len(wire.spans)
    chunks = [
        CachedChunk(start, end, title, ends_document=True)
        for (start, end), title, reusable in zip(
            wire.spans, titles, wire.reusable, strict=True
        )
        if reusable
    ]
    if len(wire.spans) > 1 or wire.save_tail or not chunks:
        return chunks
    # A prompt without delimiters is one chunk, and the index degenerates to
    # fixed-size prefix matching: a ragged tail would hardly ever be hit again.
    whole = wire.prompt_len // max_segment_len * max_segment_len
    return [CachedChunk(0, whole, titles[0], ends_document=False)] if whole else []
