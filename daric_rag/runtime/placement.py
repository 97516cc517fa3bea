"""Where segments go: integers only, decided before anything is copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from daric_rag.selection import Span
from daric_rag.storage.base import Record

__all__ = ["Piece", "Placement", "Round", "rounds_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A segment and its place in a prompt.

    Attributes:
        record: The segment, with keys as they are at the chunk's own positions.
        block_ids: The sequence's blocks from position 0 on.
        chunk_start: Where the chunk starts in the prompt: how far keys are turned.
        segment_start: Where the segment starts in the chunk.
        place_from: First position that may be written.
        place_until: Position after the last one.
    """

    record: Record
    block_ids: Sequence[int]
    chunk_start: int
    segment_start: int
    place_from: int
    place_until: int

    @property
    def start(self) -> int:
        """Position of the segment's first token."""
        return self.chunk_start + self.segment_start

    @property
    def written(self) -> Span:
        """The segment's tokens that are written, [first, end); empty at [0, 0)."""
        first = max(0, self.place_from - self.start)
        end = min(self.record.header.num_tokens, self.place_until - self.start)
        return (first, end) if first < end else (0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens [first, end) of a placement's segment."""

    placement: Placement
    first: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return self.end - self.first


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Pieces that are staged side by side.

    Attributes:
        pieces: At least one. Those whose keys do not turn come first.
        still_len: Tokens whose keys do not turn.
        num_tokens: Tokens of all pieces.
    """

    pieces: tuple[Piece, ...]
    still_len: int
    num_tokens: int


def rounds_of(placements: Iterable[Placement], max_tokens: int) -> list[Round]:
    """Cut placements into rounds, of which all but the last are full.

    Args:
        placements: No two of them write to the same place.
        max_tokens: Of one round, at least 1.
    """
    ordered = sorted(placements, key=lambda placement: placement.chunk_start != 0)
    rounds: list[list[Piece]] = []
    room = 0
    for placement in ordered:
        first, end = placement.written
        while first < end:
            if not room:
                rounds.append([])
                room = max_tokens
            stop = min(end, first + room)
            rounds[-1].append(Piece(placement, first, stop))
            room -= stop - first
            first = stop
    return [_round(pieces) for pieces in rounds]


def _round(pieces: Sequence[Piece]) -> Round:
    still = [p.num_tokens for p in pieces if p.placement.chunk_start == 0]
    return Round(tuple(pieces), sum(still), sum(p.num_tokens for p in pieces))
