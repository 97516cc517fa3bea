"""How a job runs, and what it reports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from daric_rag.config import shown
from daric_rag.errors import ConfigError
from daric_rag.prewarm.manifest import Entry
from daric_rag.prewarm.sharding import Shard

__all__ = ["JobOptions", "JobReport", "Totals", "engine_identity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How to pre-warm.

    Attributes:
        shard: This worker's share of the corpus.
        batch_tokens: About how many tokens are handed to the engine at once.
        batch_documents: Most documents in a batch.
        max_in_flight: Batches that the engine has at a time; two, so that it never
            waits for the job.
        commit_interval_s: Seconds between two flushes of the store. After a kill,
            what was done since the last one is looked up in the store again, and not
            computed again.
        budget_bytes: What the store may hold in all before the job stops; None for
            the store's own limit. Either way the job evicts nothing.
        lifetime_s: Seconds after which a document may be evicted by ``expire``; None:
            never.
        again: Whether to ask the store for documents that the manifest calls done.
        identity: What else the manifest's entries depend on, such as ``model`` and
            ``store``; overrules what the engine says.

    Raises:
        ConfigError: A value lies outside its range.
    """

    shard: Shard = field(default_factory=Shard)
    batch_tokens: int = 8_192
    batch_documents: int = 256
    max_in_flight: int = 2
    commit_interval_s: float = 3.0
    budget_bytes: int | None = None
    lifetime_s: float | None = None
    again: bool = False
    identity: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every value before any work."""
        for name in ("batch_tokens", "batch_documents", "max_in_flight"):
            _check_positive(name, getattr(self, name))
        for name in ("budget_bytes", "lifetime_s"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.commit_interval_s < 0:
            raise ConfigError(
                f"commit_interval_s is {self.commit_interval_s}; it must be at least 0"
            )


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{name} is {shown(value)}; it must be a number above 0")


@dataclass(slots=True)
class Totals:
    """Counts of a run so far; documents, unless the name says otherwise.

    Attributes:
        computed: Computed and stored.
        hit: Stored before, as the engine found.
        known: Stored before, as the manifest says.
        repeated: Equal to an earlier one of this run.
        skipped: Empty.
        failed: Not stored; the manifest says why.
        removed: Not in the source any more.
        others: Of other shards.
        computed_tokens: Of the computed documents.
        hit_tokens: Of the hit ones.
        nbytes: Of the computed ones, on disk, as far as can be told.
        source_bytes: Of the source, of all documents that something has become of.
        known_bytes: Of those, of the known ones.
        engine_bytes: Of those, of the ones that the engine has worked on.
        waiting_bytes: Of the source, read and waiting for the engine.
        engine_s: Seconds since the engine got its first batch.
    """

    computed: int = 0
    hit: int = 0
    known: int = 0
    repeated: int = 0
    skipped: int = 0
    failed: int = 0
    removed: int = 0
    others: int = 0
    computed_tokens: int = 0
    hit_tokens: int = 0
    nbytes: int = 0
    source_bytes: int = 0
    known_bytes: int = 0
    engine_bytes: int = 0
    waiting_bytes: int = 0
    engine_s: float = field(default=0.0, compare=False)

    @property
    def num_alive(self) -> int:
        """Documents that the source has and the store, too."""
        return self.computed + self.hit + self.known

    def add(self, entry: Entry) -> None:
        """Count an entry."""
        setattr(self, entry.status, getattr(self, entry.status) + 1)
        if entry.status == "computed":
            self.computed_tokens += entry.num_tokens
            self.nbytes += entry.nbytes
        elif entry.status == "hit":
            self.hit_tokens += entry.num_tokens


@dataclass(frozen=True, slots=True)
class JobReport:
    """How a run ended.

    Attributes:
        totals: What was done.
        stopped: Why it ended before all was done: ``"stopped"`` by `stop`;
            ``"budget"``: the store has no more room; ``"store"``: writing to it failed
            again and again; ``"empty"``: the source has no document at all, so that
            ``sync`` would have removed everything; ``"unreadable"``: it could not be
            read as a whole, so that ``sync`` removed nothing; "" if all was done.
        num_damaged_lines: Of the manifest; what they may have said was looked up again.
    """

    totals: Totals
    stopped: str = ""
    num_damaged_lines: int = 0


def engine_identity(engine: Any) -> dict[str, Any]:
    """Return what a manifest's entries depend on, as far as the engine tells."""
    fingerprints = getattr(engine, "fingerprints", None)
    config = getattr(engine, "config", None)
    model = getattr(engine, "model_path", None) or getattr(engine, "model", "")
    return {
        "model": os.fspath(model) if model else "",
        "fingerprints": fingerprints() if fingerprints is not None else [],
        "namespace": getattr(config, "namespace", "default"),
        "store": getattr(engine, "base_url", "") or getattr(engine, "store_path", ""),
    }
