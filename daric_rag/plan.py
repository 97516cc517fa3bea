"""What one admitted request needs: hits, the claimed prefix, the refined recompute set.

Every position of a prompt of L tokens has one owner (section 3.3.2)::

    [0, gpu_prefix_len)          vLLM's own prefix cache; never written again
    [gpu_prefix_len, L)          recompute set        computed in full context
                                 the rest of a hit    loaded and re-encoded
                                 the rest of a miss   generated, saved, re-encoded

The claim made to vLLM, ``hit_len``, is the start of the last window: all blocks are
then allocated at once, vLLM schedules exactly the last window, and everything before
it is the worker's business, hit or miss: within the same step where it is little, else
over several steps while vLLM lets the request wait, as for a transfer. The paper claims
``max(gpu_prefix_len, contiguous_len)``; on current vLLM that leaves holes which are
scheduled although nobody computes them. A stale index costs time and never
correctness, because what cannot be loaded is generated.

The first chunk is an exact prefix. What the store does not have of it is therefore
computed in place, as one more window, and saved from where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daric_rag.chunk_plan import (
    ChunkHits,
    ChunkPlan,
    MatchSegments,
    SegmentSave,
    cached_chunks,
)
from daric_rag.keys import ModelFingerprint, SegmentKey
from daric_rag.selection import Span, merge, recompute_set, subtract, total_len
from daric_rag.wire import RequestWire

__all__ = ["RequestPlan", "plan_request"]


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
        first_keys: All keys of the first chunk, which `saves` points into.
        first_title: The first chunk's title.
        root: The model's fingerprint in the request's namespace: the parent of every
            chunk's first segment.
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
    first_title: str
    root: ModelFingerprint
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

    def hit_keys(self) -> list[SegmentKey]:
        """Return the keys of all segments to be loaded, by position."""
        return [key for chunk in self.chunks for key in chunk.hit_keys]

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
    exact_records: bool = True,
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
        exact_records: Whether the store's records hold exactly what was computed, or
            are quantised.
    """
    chunks = [
        ChunkHits.of(
            chunk,
            token_ids,
            root,
            max_segment_len,
            match,
            exact_records=exact_records,
        )
        for chunk in cached_chunks(wire, max_segment_len)
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
        first_title=first.chunk.title if first else "",
        root=root,
        contiguous_hit_len=sum(c.loaded_len for c in placed if c.contiguous),
        disjoint_hit_len=sum(c.loaded_len for c in placed if not c.contiguous),
    )


def _windows_of(
    wire: RequestWire, chunks: Sequence[ChunkHits], max_generated_len: int | None
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


def _between(prompt_len: int, spans: Sequence[Span]) -> list[Span]:
    """What no cached span covers: nobody else provides it, so it is computed."""
    edges = [0, *(edge for span in spans for edge in span), prompt_len]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _needs_placing(
    chunk: ChunkHits, windows: Sequence[Span], gpu_prefix_len: int
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
    spans: Sequence[Span], chunks: Sequence[ChunkHits]
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
