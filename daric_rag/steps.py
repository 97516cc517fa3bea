"""One engine step's work as flat lists: loads, generations, recomputes, saves.

Stage 1 fills blocks: hit chunks are loaded; missing ones run as generation
sub-requests over scratch blocks, are saved, re-encoded and placed. Stage 2 computes
the recompute set in place, together with whatever vLLM itself scheduled (section
3.3.3). Both are cut into waves when they would overflow the engine's buffers; a window
depends on earlier positions only, so waves in ascending position compute the same.

Everything here is integers; tensors and engines are the worker's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daric_rag.chunk_plan import ChunkPlan
from daric_rag.document_info import DocumentInfo
from daric_rag.errors import EngineError
from daric_rag.keys import ModelFingerprint, SegmentKey
from daric_rag.selection import Span

__all__ = [
    "GenerationBatch",
    "GenerationItem",
    "Limits",
    "Piece",
    "RequestStep",
    "SaveStep",
    "StepPlan",
    "WindowWaves",
    "generation_batches",
    "window_waves",
]


@dataclass(frozen=True, slots=True)
class RequestStep:
    """A request admitted in this step.

    Attributes:
        req_id: vLLM's id.
        token_ids: The prompt's ids, [prompt_len].
        block_ids: Its blocks, in order of position, a copy.
        chunks: Chunks to load or to generate.
        early_windows: Windows to recompute before the last one, by position.
        hit_len: Start of the last window, which vLLM scheduled itself.
        root: Parent of every chunk's first segment.
        namespace: The tenant that what it generates is saved for.
        asynchronous: Whether vLLM lets the request wait until everything before
            `hit_len` is in its blocks, over as many steps as that takes. Otherwise
            all of it belongs to the step that admits the request.
        priority: Asynchronous requests of a lower one go first.
    """

    req_id: str
    token_ids: Sequence[int]
    block_ids: tuple[int, ...]
    chunks: tuple[ChunkPlan, ...]
    early_windows: tuple[Span, ...]
    hit_len: int
    root: ModelFingerprint
    namespace: str
    asynchronous: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True)
class SaveStep:
    """A segment to be saved from a request's own blocks after the forward pass.

    Attributes:
        key: Its key.
        parent: Key of the segment before it, or the root.
        index: Which of its chunk's segments it is.
        start: First position in the prompt.
        end: Position after its last token.
        document: What it says about the document that ends with it, if one does.
        block_ids: The request's blocks from position 0 on.
    """

    key: SegmentKey
    parent: bytes
    index: int
    start: int
    end: int
    document: DocumentInfo | None
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Scheduler -> worker, once per engine step.

    Attributes:
        requests: Requests admitted in this step.
        saves: Segments that this step completes in place.
        scratch_block_ids: Blocks for generation within this step, never a request's.
        held_block_ids: Such blocks for asynchronous requests, which keep them from
            step to step: while one is unfinished, more may come and none goes.
    """

    requests: tuple[RequestStep, ...] = ()
    saves: tuple[SaveStep, ...] = ()
    scratch_block_ids: tuple[int, ...] = ()
    held_block_ids: tuple[int, ...] = ()

    def admitted(self, *, asynchronous: bool) -> tuple[RequestStep, ...]:
        """Return the admitted requests of one kind."""
        return tuple(r for r in self.requests if r.asynchronous is asynchronous)

    def hit_keys(self) -> list[SegmentKey]:
        """Return the keys of all segments to be loaded."""
        return [
            key
            for request in self.requests
            for chunk in request.chunks
            for key in chunk.hit_keys
        ]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one forward pass of the engine can hold.

    Attributes:
        max_num_tokens: Tokens of all sequences together.
        max_num_seqs: Sequences.
    """

    max_num_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class GenerationItem:
    """A missing chunk to be computed on its own, from position 0.

    Attributes:
        token_ids: Its ids, [num_tokens].
        num_loaded_tokens: Leading tokens whose KV the store provides.
    """

    token_ids: tuple[int, ...]
    num_loaded_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the chunk."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) of sequence `index` in one wave."""

    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GenerationBatch:
    """Chunks that are in scratch blocks at the same time.

    Attributes:
        block_ids: Scratch blocks per item, {item index: blocks}.
        waves: Forward passes, in order.
    """

    block_ids: dict[int, tuple[int, ...]]
    waves: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True, slots=True)
class WindowWaves:
    """The early windows' forward passes.

    Attributes:
        early: Passes of their own, in ascending position; `Piece.index` is the
            request's.
        final: Pieces that join the pass that vLLM scheduled.
    """

    early: tuple[tuple[Piece, ...], ...]
    final: tuple[Piece, ...]


def generation_batches(
    items: Sequence[GenerationItem],
    *,
    scratch_block_ids: Sequence[int],
    block_size: int,
    limits: Limits,
) -> list[GenerationBatch]:
    """Pack missing chunks into scratch blocks, and those into forward passes.

    Args:
        items: Chunks to generate.
        scratch_block_ids: Blocks at hand.
        block_size: Tokens per block.
        limits: Of one forward pass.

    Raises:
        EngineError: A chunk alone exceeds the scratch blocks.
    """
    batches: list[GenerationBatch] = []
    members: dict[int, tuple[int, ...]] = {}
    used = 0
    for index, item in enumerate(items):
        need = -(-item.num_tokens // block_size)
        if need > len(scratch_block_ids):
            raise EngineError(
                f"a chunk of {item.num_tokens} tokens needs {need} scratch blocks of "
                f"{block_size} tokens and {len(scratch_block_ids)} are reserved; raise "
                f"max_model_len or split the document"
            )
        if used + need > len(scratch_block_ids):
            batches.append(GenerationBatch(members, _waves(items, members, limits)))
            members, used = {}, 0
        members[index] = tuple(scratch_block_ids[used : used + need])
        used += need
    if members:
        batches.append(GenerationBatch(members, _waves(items, members, limits)))
    return batches


def window_waves(
    windows: Sequence[Sequence[Span]],
    *,
    limits: Limits,
    scheduled: Limits,
) -> WindowWaves:
    """Fit early windows around what vLLM scheduled.

    As many of the latest windows as fit join vLLM's own pass; the others go before it
    in passes of their own.

    Args:
        windows: Early windows per request, each sorted, [num_requests].
        limits: Of one forward pass.
        scheduled: Tokens and sequences that vLLM put into its pass.
    """
    pieces = sorted(
        (Piece(i, *span) for i, spans in enumerate(windows) for span in spans),
        key=lambda piece: (piece.start, piece.index),
    )
    room = limits.max_num_tokens - scheduled.max_num_tokens
    seats = limits.max_num_seqs - scheduled.max_num_seqs
    final: list[Piece] = []
    while pieces and room > 0 and seats > 0:
        piece = pieces.pop()
        cut = max(piece.start, piece.end - room)
        final.append(Piece(piece.index, cut, piece.end))
        if cut > piece.start:
            pieces.append(Piece(piece.index, piece.start, cut))
        room -= piece.end - cut
        seats -= 1
    return WindowWaves(_pack(pieces, limits), tuple(reversed(final)))


def _waves(
    items: Sequence[GenerationItem],
    members: dict[int, tuple[int, ...]],
    limits: Limits,
) -> tuple[tuple[Piece, ...], ...]:
    pieces = [
        Piece(index, items[index].num_loaded_tokens, items[index].num_tokens)
        for index in members
        if items[index].num_loaded_tokens < items[index].num_tokens
    ]
    return _pack(pieces, limits)


def _pack(pieces: Sequence[Piece], limits: Limits) -> tuple[tuple[Piece, ...], ...]:
    """Fill passes in the order given, cutting a piece where a pass is full.

    The two halves of a cut piece land in different passes, so a sequence occurs at
    most once per pass when it occurs once in `pieces`.
    """
    waves: list[tuple[Piece, ...]] = []
    wave: list[Piece] = []
    room = limits.max_num_tokens
    for piece in pieces:
        start = piece.start
        while start < piece.end:
            if room == 0 or len(wave) == limits.max_num_seqs:
                waves.append(tuple(wave))
                wave, room = [], limits.max_num_tokens
            end = min(piece.end, start + room)
            wave.append(Piece(piece.index, start, end))
            room -= end - start
            start = end
    if wave:
        waves.append(tuple(wave))
    return tuple(waves)
