"""What became of one request, for people who look into it.

The scheduler side makes a trace, the client draws it. It is a plain record: nothing is
ever decided from it, so it holds no keys, only positions and seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, get_args

from daric_rag.config import shown
from daric_rag.errors import WireError
from daric_rag.layout import MAX_TITLE_LEN
from daric_rag.selection import Span

__all__ = ["TRACE_VERSION", "ChunkKind", "ChunkTrace", "RequestTrace", "TraceEvent"]

TRACE_VERSION = 1

ChunkKind = Literal[
    "gpu_prefix",
    "contiguous_hit",
    "disjoint_hit",
    "generated",
    "recomputed",
    "mixed",
]
"""Where a whole chunk's KV came from before its windows were recomputed; ``recomputed``
where windows cover all of it, ``mixed`` where parts came from different places."""

_KINDS: tuple[str, ...] = get_args(ChunkKind)
_MAX_NAME_LEN = 40


@dataclass(frozen=True, slots=True)
class ChunkTrace:
    """One chunk of the prompt, [start, end).

    Attributes:
        start: First position.
        end: Position after its last token.
        kind: See `ChunkKind`.
        hit_len: Leading tokens that the store provided.
        title: Of its document, or "".
    """

    start: int
    end: int
    kind: ChunkKind
    hit_len: int = 0
    title: str = ""

    def __post_init__(self) -> None:
        """Check what another process may have got wrong."""
        _check_span(self.start, self.end)
        if self.kind not in _KINDS:
            raise _damaged(f"kind {shown(self.kind)} is none of {', '.join(_KINDS)}")
        if not _is_int(self.hit_len) or not 0 <= self.hit_len <= self.num_tokens:
            raise _damaged(f"hit_len {shown(self.hit_len)} exceeds its chunk")
        if not isinstance(self.title, str) or len(self.title) > MAX_TITLE_LEN:
            raise _damaged(f"title {shown(self.title)} is no str of a title's length")

    @property
    def num_tokens(self) -> int:
        """Tokens in the chunk."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that took time; an instant where both ends are equal.

    Attributes:
        name: Such as ``"wait"``, ``"load"``, ``"generate"``, ``"recompute"`` or
            ``"first_token"``.
        start_s: Seconds from the request's arrival at the scheduler.
        end_s: Seconds from there to its end.
    """

    name: str
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        """Check what another process may have got wrong."""
        name = self.name
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_LEN:
            raise _damaged(f"event name {shown(name)} is no short str")
        if not (
            _is_seconds(self.start_s)
            and _is_seconds(self.end_s)
            and self.start_s <= self.end_s
        ):
            raise _damaged(
                f"event {name!r} lasts from {shown(self.start_s)} to "
                f"{shown(self.end_s)} s"
            )


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request, from its arrival to its first token.

    Attributes:
        prompt_len: Tokens in the prompt.
        chunks: By position, without overlaps.
        windows: The recompute set, by position, without overlaps.
        events: By start.
    """

    prompt_len: int
    chunks: tuple[ChunkTrace, ...]
    windows: tuple[Span, ...] = ()
    events: tuple[TraceEvent, ...] = ()

    def __post_init__(self) -> None:
        """Check what another process may have got wrong."""
        if not _is_int(self.prompt_len) or self.prompt_len < 1:
            raise _damaged(f"prompt_len is {shown(self.prompt_len)}")
        spans = [(chunk.start, chunk.end) for chunk in self.chunks]
        for name, ordered in (("chunks", spans), ("windows", list(self.windows))):
            for start, end in ordered:
                _check_span(start, end)
            edges = [0, *(edge for span in ordered for edge in span), self.prompt_len]
            if edges != sorted(edges):
                raise _damaged(
                    f"{name} overlap or leave the prompt of {self.prompt_len} tokens"
                )

    @property
    def last_s(self) -> float:
        """Seconds from arrival to the end of the last event."""
        return max((event.end_s for event in self.events), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, which `from_dict` reads back."""
        return {
            "version": TRACE_VERSION,
            "prompt_len": self.prompt_len,
            "chunks": [
                {
                    "start": chunk.start,
                    "end": chunk.end,
                    "kind": chunk.kind,
                    "hit_len": chunk.hit_len,
                    "title": chunk.title,
                }
                for chunk in self.chunks
            ],
            "windows": [list(window) for window in self.windows],
            "events": [
                {"name": event.name, "start_s": event.start_s, "end_s": event.end_s}
                for event in self.events
            ],
        }

    @classmethod
    def from_dict(cls, data: object) -> RequestTrace:
        """Read what `to_dict` made, maybe after a trip over HTTP.

        Raises:
            WireError: It is of another version, or damaged.
        """
        if not isinstance(data, Mapping):
            raise _damaged(f"it is {shown(data)}")
        version = data.get("version")
        if not _is_int(version) or version != TRACE_VERSION:
            raise WireError(
                f"a trace is of version {shown(version)} and this daric_rag reads "
                f"{TRACE_VERSION}; install the same daric_rag on client and server"
            )
        try:
            return cls(
                data["prompt_len"],
                tuple(_chunk(item) for item in _listed(data["chunks"])),
                tuple(_window(item) for item in _listed(data["windows"])),
                tuple(_event(item) for item in _listed(data["events"])),
            )
        except KeyError as error:
            raise _damaged(f"it lacks {error}") from error


def _chunk(item: object) -> ChunkTrace:
    fields = _mapping(item)
    return ChunkTrace(
        fields["start"],
        fields["end"],
        fields["kind"],
        fields["hit_len"],
        fields["title"],
    )


def _event(item: object) -> TraceEvent:
    fields = _mapping(item)
    return TraceEvent(fields["name"], fields["start_s"], fields["end_s"])


def _window(item: object) -> Span:
    edges = _listed(item)
    if len(edges) != 2:
        raise _damaged(f"window {shown(item)} is no [start, end)")
    return edges[0], edges[1]


def _check_span(start: object, end: object) -> None:
    if not (_is_int(start) and _is_int(end) and 0 <= start < end):
        raise _damaged(f"[{shown(start)}, {shown(end)}) is no span of tokens")


def _listed(value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _damaged(f"expected a list, got {shown(value)}")
    return value


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _damaged(f"expected an object, got {shown(value)}")
    return value


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_seconds(value: object) -> TypeGuard[float]:
    # JSON may write 1.0 s as 1.
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and value >= 0
    except OverflowError:
        return False


def _damaged(what: str) -> WireError:
    return WireError(f"a request's trace is damaged: {what}")
