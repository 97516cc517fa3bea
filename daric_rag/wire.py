"""What a request tells the scheduler side, and what it hears back.

Client -> scheduler: one entry in vLLM's ``kv_transfer_params``, under `WIRE_KEY`. It
carries where the chunks are and how to treat them, never windows or keys: hits and
side data are known on the scheduler side only, so the same pure functions run there.

Scheduler -> client: the reuse counts, and a trace where the request asked for one,
under the same key of the finished request's ``kv_transfer_params``.

Both are plain JSON values, because a remote server gets them over HTTP. Everything is
checked on arrival: a server must not be confused by a client of another version.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from daric_rag.config import DaricConfig, shown
from daric_rag.errors import ConfigError, WireError
from daric_rag.keys import cache_salt, chunking_id
from daric_rag.layout import MAX_TITLE_LEN
from daric_rag.selection import ReuseMode, Span
from daric_rag.trace import RequestTrace

__all__ = [
    "MAX_CHUNKS",
    "WIRE_KEY",
    "WIRE_VERSION",
    "RequestWire",
    "decode_request",
    "decode_reuse",
    "decode_trace",
    "encode_request",
    "encode_reuse",
    "salt_of",
]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

WIRE_KEY = "daric"
WIRE_VERSION = 1

MAX_CHUNKS = 4096
"""More would keep a scheduler busy with bookkeeping for seconds."""

_POLICY_FIELDS = ("policy", "avg_chunk_budget", "initial_ratio", "mtaf", "alignment")


@dataclass(frozen=True, slots=True)
class RequestWire:
    """One request's layout and treatment.

    Attributes:
        ends: End of every chunk, ascending; the last one is the prompt's length, [M].
        reusable: Whether each chunk's KV may come from the store, [M].
        mode: ``"daric"`` or ``"full_reuse"``.
        config: Selection settings and namespace; the scheduler side keeps its own
            capacities and segment length.
        save_tail: Whether a lone chunk is stored to its last token, as pre-warming
            wants it, or in full segments only.
        titles: Of every chunk, for the store's listing, [M]; empty: none has one.
        conversation: Id of a template or conversation whose prompts only ever grow by
            whole chunks; a longer prompt then still takes its earlier blocks from
            vLLM's prefix cache. None: only an equal layout shares blocks.
        trace: Whether the scheduler side is to send a `RequestTrace` back.
    """

    ends: tuple[int, ...]
    reusable: tuple[bool, ...]
    mode: ReuseMode
    config: DaricConfig
    save_tail: bool = False
    conversation: str | None = None
    titles: tuple[str, ...] = ()
    trace: bool = False

    def __post_init__(self) -> None:
        """Check what a foreign client may have got wrong."""
        if len(self.ends) != len(self.reusable) or not self.ends:
            raise WireError("a layout needs one end and one reusable flag per chunk")
        if len(self.ends) > MAX_CHUNKS:
            raise WireError(
                f"the prompt has {len(self.ends)} chunks and at most {MAX_CHUNKS} are "
                f"served; join short documents"
            )
        if any(end <= start for start, end in self.spans):
            raise WireError(f"chunk ends {shown(self.ends)} do not ascend from 0")
        if len(self.ends) > 1 and self.reusable[-1]:
            raise WireError("the last chunk is the question and is never reusable")
        if self.mode not in ("daric", "full_reuse"):
            raise WireError(
                f'mode {shown(self.mode)} is neither "daric" nor "full_reuse"'
            )
        if self.conversation is not None and not isinstance(self.conversation, str):
            raise WireError("conversation must be a str or absent")
        if len(self.titles) not in (0, len(self.ends)) or not all(
            isinstance(title, str) and len(title) <= MAX_TITLE_LEN
            for title in self.titles
        ):
            raise WireError(
                f"titles must be one str per chunk, of at most {MAX_TITLE_LEN} "
                f"characters, or absent"
            )

    @property
    def spans(self) -> tuple[Span, ...]:
        """Every chunk's [start, end)."""
        return tuple(zip((0, *self.ends[:-1]), self.ends, strict=True))

    @property
    def prompt_len(self) -> int:
        """Tokens in the prompt."""
        return self.ends[-1]


def encode_request(wire: RequestWire) -> dict[str, Any]:
    """Return the entry to put into ``kv_transfer_params``."""
    return {
        WIRE_KEY: {
            "version": WIRE_VERSION,
            "ends": list(wire.ends),
            "reusable": [int(flag) for flag in wire.reusable],
            "mode": wire.mode,
            "save_tail": int(wire.save_tail),
            "conversation": wire.conversation,
            "namespace": wire.config.namespace,
            "titles": list(wire.titles),
            "trace": int(wire.trace),
            **wire.config.policy_fields(),
        }
    }


def decode_request(params: Mapping[str, Any] | None) -> RequestWire | None:
    """Read a request's entry; None when it has none and is an ordinary request.

    Raises:
        WireError: The entry is there but is not what `encode_request` makes.
    """
    if not isinstance(params, Mapping) or WIRE_KEY not in params:
        return None
    entry = params[WIRE_KEY]
    version = entry.get("version") if isinstance(entry, Mapping) else None
    if type(version) is not int or version != WIRE_VERSION:
        raise WireError(
            f"this server speaks version {WIRE_VERSION} of daric_rag's requests; "
            f"install the same daric_rag on client and server"
        )
    try:
        config = DaricConfig.from_dict(
            {"namespace": entry["namespace"]}
            | {name: entry[name] for name in _POLICY_FIELDS}
        )
        return RequestWire(
            ends=_ints(entry["ends"]),
            reusable=_flags(entry["reusable"]),
            mode=entry["mode"],
            config=config,
            save_tail=_flags([entry["save_tail"]])[0],
            conversation=entry["conversation"],
            titles=_listed(entry["titles"]),
            # Absent from requests of clients that knew of no traces.
            trace=_flags([entry.get("trace", 0)])[0],
        )
    except (KeyError, ConfigError) as error:
        raise WireError(f"a request's layout is damaged: {error}") from error


def salt_of(wire: RequestWire) -> str:
    """Return the cache salt that keeps a request's approximate blocks apart.

    A server serves no request with another salt: who could choose it freely could
    pass off the blocks of one layout as those of another.
    """
    if wire.conversation is None:
        flags = "".join(str(int(flag)) for flag in wire.reusable)
        chunking = f"layout:{chunking_id(wire.spans)}.{flags}"
    else:
        chunking = f"conversation:{wire.conversation}"
    return cache_salt(
        wire.config.namespace,
        wire.config.policy_fields() | {"mode": wire.mode},
        chunking,
    )


def encode_reuse(counts: Any, trace: RequestTrace | None = None) -> dict[str, Any]:
    """Return a dataclass of reuse counts, and a trace, as the entry for the client."""
    entry = {"version": WIRE_VERSION, "reuse": asdict(counts)}
    if trace is not None:
        entry["trace"] = trace.to_dict()
    return {WIRE_KEY: entry}


def decode_reuse(params: Mapping[str, Any] | None, into: type[_T]) -> _T | None:
    """Read reuse counts into the dataclass `into`; None when there are none.

    Fields that the sender did not know, or sent as another type, keep their defaults
    and unknown ones are ignored, so that counts never fail a request that has been
    answered.

    Args:
        params: The finished request's ``kv_transfer_params``.
        into: A dataclass whose fields all have defaults: numbers and strings.
    """
    entry = params.get(WIRE_KEY) if isinstance(params, Mapping) else None
    counts = entry.get("reuse") if isinstance(entry, Mapping) else None
    if not isinstance(counts, Mapping):
        return None
    known = {field.name: field.default for field in fields(into)}  # type: ignore[arg-type]
    return into(
        **{
            name: value
            for name, value in counts.items()
            if name in known and _is_alike(value, known[name])
        }
    )


def decode_trace(params: Mapping[str, Any] | None) -> RequestTrace | None:
    """Read a request's trace; None when none was sent, or none that can be read.

    The latter is logged: the request has been answered and must not fail any more.

    Args:
        params: The finished request's ``kv_transfer_params``.
    """
    entry = params.get(WIRE_KEY) if isinstance(params, Mapping) else None
    data = entry.get("trace") if isinstance(entry, Mapping) else None
    if data is None:
        return None
    try:
        return RequestTrace.from_dict(data)
    except WireError as error:
        logger.warning("a trace is dropped: %s", error)
        return None


def _listed(values: object) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        raise WireError(f"expected a list, got {shown(values)}")
    return tuple(values)


def _ints(values: object) -> tuple[int, ...]:
    # bool is a subclass of int, but an end of True is damage.
    listed = _listed(values)
    if not all(isinstance(value, int) and type(value) is not bool for value in listed):
        raise WireError(f"expected a list of ints, got {shown(values)}")
    return listed


def _flags(values: object) -> tuple[bool, ...]:
    flags = _ints(values)
    if not set(flags) <= {0, 1}:
        raise WireError(f"expected flags of 0 and 1, got {shown(values)}")
    return tuple(flag == 1 for flag in flags)


def _is_alike(value: object, default: object) -> bool:
    if isinstance(value, bool) or isinstance(default, bool):
        return type(value) is type(default)
    # JSON may write 1.0 s as 1.
    return isinstance(value, type(default)) or (
        isinstance(default, float) and isinstance(value, int)
    )
