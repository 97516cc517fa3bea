"""What one admitted request needs: hits, the claimed prefix, the refined recompute set.

Every position of a prompt of L tokens has one owner (section 3.3.2)::

    [0, gpu_prefix_len)          vLLM's own prefix cache; never written again
    [gpu_prefix_len, L)          recompute set        computed in full context
                                 the rest of a hit    loaded and re-encoded
                                 the rest of a miss   generated, saved, re-encoded

The claim made to vLLM, ``hit_len``, is the start of the last window: all blocks are
then allocated at once, vLLM schedules exactly the last window, and everything before
it is the worker's business within the same step, hit or miss. The paper claims
``max(gpu_prefix_len, contiguous_len)``; on current vLLM that leaves holes which are
scheduled although nobody computes them. A stale index costs time and never
correctness, because what cannot be loaded is generated in the same step.

The first chunk is an exact prefix. What the store does not have of it is therefore
computed in place, as one more window, and saved from where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daric_rag.keys import ModelFingerprint, SegmentKey, segment_keys
from daric_rag.selection import Span, merge, recompute_set, subtract, total_len
from daric_rag.wire import RequestWire

__all__ = ["ChunkPlan", "RequestPlan", "SegmentSave", "plan_request"]

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
    """

    start: int
    end: int
    keys: tuple[SegmentKey, ...]
    max_segment_len: int
    num_hit_segments: int
    place_from: int
    contiguous: bool

    @property
    def num_tokens(self) -> int:
        """Tokens in the chunk."""
        return self.end - self.start

    @property
    def hit_len(self) -> int:
        """Leading tokens that the store has."""
        return min(self.num_hit_segments * self.max_segment_len, self.num_tokens)

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
        key: Its key.
        start: First position in the prompt.
        end: Position after its last token.
    """

    key: SegmentKey
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Everything decided about a request when it is admitted; integers only.

    Attributes:
        prompt_len: L.
        gpu_prefix_len: Tokens that vLLM's prefix cache holds.
        hit_len: Tokens claimed as computed; the last window starts here.
        chunks: Chunks to load or to generate, by position.
        windows: The refined recompute set, the last window included.
        saves: Segments of the first chunk to be saved once they are computed.
        first_keys: All keys of the first chunk, the chain that `saves` ends.
        contiguous_hit_len: Tokens of the contiguous hits beyond the GPU prefix.
        disjoint_hit_len: Tokens of the disjoint hits beyond the GPU prefix.
    """

    prompt_len: int
    gpu_prefix_len: int
    hit_len: int
    chunks: tuple[ChunkPlan, ...]
    windows: tuple[Span, ...]
    saves: tuple[SegmentSave, ...]
    first_keys: tuple[SegmentKey, ...]
    contiguous_hit_len: int
    disjoint_hit_len: int

    @property
    def early_windows(self) -> tuple[Span, ...]:
        """Windows that the worker computes; vLLM itself schedules the last one."""
        return tuple(window for window in self.windows if window[0] < self.hit_len)

    @property
    def num_external_tokens(self) -> int:
        """What the connector tells vLLM to be available beyond its own prefix."""
        return self.hit_len - self.gpu_prefix_len

    @property
    def missing_len(self) -> int:
        """Tokens of missing chunks that must be generated on their own."""
        return sum(chunk.num_tokens - chunk.hit_len for chunk in self.chunks)

    @property
    def recompute_len(self) -> int:
        """Tokens in the refined recompute set."""
        return total_len(self.windows)


def plan_request(
    wire: RequestWire,
    token_ids: Sequence[int],
    *,
    gpu_prefix_len: int,
    root: ModelFingerprint,
    max_segment_len: int,
    match: MatchSegments,
    max_generated_len: int | None = None,
) -> RequestPlan:
    """Decide what is loaded, generated, recomputed and saved for one request.

    Args:
        wire: Layout and treatment.
        token_ids: The prompt's ids; ids after it (a resumed request's output) are
            part of the last window.
        gpu_prefix_len: Tokens in vLLM's own prefix cache, whole blocks.
        root: The model's fingerprint in the request's namespace.
        max_segment_len: Tokens per segment.
        match: The index.
        max_generated_len: Longest chunk that can be generated on its own; a longer
            missing one is computed in full context instead. None: any.
    """
    chunks = [
        _ChunkHits.of(span, token_ids, root, max_segment_len, match)
        for span in _cached_spans(wire, max_segment_len)
    ]
    windows = subtract(_windows_of(wire, chunks, max_generated_len), gpu_prefix_len)
    # None is left when the prefix cache reaches beyond the prompt, into the answer of
    # a resumed request.
    last_start = windows[-1][0] if windows else wire.prompt_len - 1
    contiguous = _contiguous_starts(wire.spans, chunks)
    placed = tuple(
        chunk.plan(gpu_prefix_len, contiguous=chunk.start in contiguous)
        for chunk in chunks
        if _needs_placing(chunk, windows, gpu_prefix_len)
    )
    first = chunks[0] if chunks and chunks[0].start == 0 else None
    return RequestPlan(
        prompt_len=wire.prompt_len,
        gpu_prefix_len=gpu_prefix_len,
        hit_len=max(last_start, gpu_prefix_len),
        chunks=placed,
        windows=windows,
        saves=first.saves() if first else (),
        first_keys=first.keys if first else (),
        contiguous_hit_len=sum(c.loaded_len for c in placed if c.contiguous),
        disjoint_hit_len=sum(c.loaded_len for c in placed if not c.contiguous),
    )


def _windows_of(
    wire: RequestWire, chunks: Sequence[_ChunkHits], max_generated_len: int | None
) -> tuple[Span, ...]:
    """Everything that is computed in full context, as if nothing were resident."""
    windows = [
        *recompute_set(wire.spans, wire.reusable, wire.config, mode=wire.mode),
        *_between(wire.prompt_len, [(chunk.start, chunk.end) for chunk in chunks]),
    ]
    for chunk in chunks:
        if chunk.start == 0:
            windows.append((chunk.hit_len, chunk.end))
        elif (
            max_generated_len is not None
            and not chunk.is_hit
            and chunk.end - chunk.start > max_generated_len
        ):
            windows.append((chunk.start, chunk.end))
    return merge(windows)


@dataclass(frozen=True, slots=True)
class _ChunkHits:
    """A reusable chunk and what the index knows of it."""

    start: int
    end: int
    keys: tuple[SegmentKey, ...]
    max_segment_len: int
    num_hit_segments: int

    @classmethod
    def of(
        cls,
        span: Span,
        token_ids: Sequence[int],
        root: ModelFingerprint,
        max_segment_len: int,
        match: MatchSegments,
    ) -> _ChunkHits:
        start, end = span
        keys = segment_keys(root, token_ids[start:end], max_segment_len)
        return cls(start, end, keys, max_segment_len, match(keys))

    @property
    def hit_len(self) -> int:
        return min(self.num_hit_segments * self.max_segment_len, self.end - self.start)

    @property
    def is_hit(self) -> bool:
        return self.num_hit_segments == len(self.keys)

    def plan(self, gpu_prefix_len: int, *, contiguous: bool) -> ChunkPlan:
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
        )

    def saves(self) -> tuple[SegmentSave, ...]:
        starts = range(self.hit_len, self.end, self.max_segment_len)
        return tuple(
            SegmentSave(key, start, min(start + self.max_segment_len, self.end))
            for key, start in zip(
                self.keys[self.num_hit_segments :], starts, strict=True
            )
        )


def _cached_spans(wire: RequestWire, max_segment_len: int) -> list[Span]:
    spans = [s for s, keep in zip(wire.spans, wire.reusable, strict=True) if keep]
    if len(wire.spans) == 1 and spans and not wire.save_tail:
        # A prompt without delimiters is one chunk, and the index degenerates to
        # fixed-size prefix matching: a ragged tail would hardly ever be hit again.
        whole = wire.prompt_len // max_segment_len * max_segment_len
        return [(0, whole)] if whole else []
    return spans


def _between(prompt_len: int, spans: Sequence[Span]) -> list[Span]:
    """What no cached span covers: nobody else provides it, so it is computed."""
    edges = [0, *(edge for span in spans for edge in span), prompt_len]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _needs_placing(
    chunk: _ChunkHits, windows: Sequence[Span], gpu_prefix_len: int
) -> bool:
    # A missing chunk that is recomputed as a whole is not generated either, nor a hit
    # loaded. The first chunk's missing part is a window already.
    end = chunk.start + chunk.hit_len if chunk.start == 0 else chunk.end
    uncovered = max(chunk.start, gpu_prefix_len)
    for start, stop in windows:
        if start > uncovered:
            break
        uncovered = max(uncovered, stop)
    return uncovered < end


def _contiguous_starts(
    spans: Sequence[Span], chunks: Sequence[_ChunkHits]
) -> frozenset[int]:
    """Starts of the chunks before which every chunk is hit (section 3.3.2)."""
    by_start = {chunk.start: chunk for chunk in chunks}
    starts: set[int] = set()
    for start, _ in spans:
        starts.add(start)
        hits = by_start.get(start)
        if hits is None or not hits.is_hit:
            break
    return frozenset(starts)
