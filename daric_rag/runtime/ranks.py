"""Tensor-parallel ranks: each holds its own heads' KV, and all run the same passes.

The scheduler side knows one key per segment, whatever the number of ranks. Every rank
keeps a record of its own under a key made from that one::

    record key of rank r of n = segment key XOR mask(r, n)        mask(0, 1) = 0

so records of one folder never meet, chains of parents stay chains, and a record's key
can be turned back. A segment is there when every rank's record is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed

from daric_rag.errors import ConfigError
from daric_rag.keys import KEY_BYTES, SegmentKey
from daric_rag.storage import StoreStats, TierStats

__all__ = ["Agree", "RankKeys", "agree", "record_keys", "total_stats"]

Agree = Callable[[Sequence[bool]], list[bool]]
"""Collective: from each rank's flags to those that are set on all of them."""

_Stats = TypeVar("_Stats", StoreStats, TierStats)

_PERSON_RANK = b"daric.rank.1"


class RankKeys:
    """Worker process. From segments' keys to those of one rank's records, and back.

    Args:
        rank: Of this worker.
        size: Number of ranks.

    Raises:
        ConfigError: There is no such rank.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} is not in [0, {size})")
        self._mask = _mask(rank, size)
        self._masks = [_mask(other, size) for other in range(size)]

    def to_record(self, key: bytes) -> bytes:
        """Return the key of this rank's record of a segment, or of a parent."""
        return _xor(key, self._mask)

    def from_record(self, key: bytes) -> SegmentKey:
        """Return the key of the segment whose record this rank keeps under `key`."""
        return SegmentKey(_xor(key, self._mask))

    def candidates(self, keys: Iterable[bytes]) -> set[SegmentKey]:
        """Return the segments that records may be of, whichever rank's they are.

        Ranks share a folder and evict each other's records. A rank does not know whose
        a record was: all but one of the keys per record name nothing.
        """
        return {SegmentKey(_xor(key, mask)) for key in keys for mask in self._masks}


def record_keys(key: bytes, size: int) -> list[bytes]:
    """Return the keys of all ranks' records of a segment, [size]."""
    return [_xor(key, _mask(rank, size)) for rank in range(size)]


def agree(flags: Sequence[bool], group: Any | None = None) -> list[bool]:
    """Return which flags are set on every rank; collective, so every rank must call.

    Ranks run the same passes or hang, and a file may be damaged or evicted between two
    ranks' readings of it.

    Args:
        flags: This rank's, [n]; n is the same on all.
        group: Of the ranks, on the CPU; None when there is only one.
    """
    if group is None or not flags:
        return list(flags)
    votes = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN, group=group)
    return [vote == 1 for vote in votes.tolist()]


def total_stats(per_rank: Sequence[StoreStats | Mapping[str, Any]]) -> StoreStats:
    """Return what the ranks' stores did together, and what they hold.

    The disk tier's folder is one for all: what it holds is counted once.

    Args:
        per_rank: Of every rank, at least one; as plain mappings where they come from
            another process.
    """
    total, *others = map(_as_stats, per_rank)
    for other in others:
        disk = other.disk
        if total.disk is not None and disk is not None:
            held = {
                name: max(getattr(total.disk, name), getattr(disk, name))
                for name in ("num_records", "nbytes", "capacity_bytes")
            }
            disk = replace(_sum(total.disk, disk), **held)
        host = _sum(total.host, other.host)
        total = replace(_sum(total, other), host=host, disk=disk)
    return total


def _as_stats(stats: StoreStats | Mapping[str, Any]) -> StoreStats:
    if isinstance(stats, StoreStats):
        return stats
    disk = stats["disk"]
    tiers = {
        "host": TierStats(**stats["host"]),
        "disk": None if disk is None else TierStats(**disk),
    }
    return StoreStats(**{**stats, **tiers})


def _sum(one: _Stats, other: _Stats) -> _Stats:
    """Add the counters; a flag is set where any rank sets it."""
    totals: dict[str, Any] = {}
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, bool):
            totals[field.name] = mine or theirs
        elif isinstance(mine, int):
            totals[field.name] = mine + theirs
    return replace(one, **totals)


def _mask(rank: int, size: int) -> int:
    if size == 1:
        # Stores of a single rank are older than ranks.
        return 0
    name = f"tp rank {rank} of {size}".encode()
    digest = hashlib.blake2b(name, digest_size=KEY_BYTES, person=_PERSON_RANK)
    return int.from_bytes(digest.digest(), "little")


def _xor(key: bytes, mask: int) -> bytes:
    return (int.from_bytes(key, "little") ^ mask).to_bytes(KEY_BYTES, "little")
