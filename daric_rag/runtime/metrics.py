"""Counters for vLLM's log and its ``/metrics``.

Worker and scheduler side fill a `DaricStats` each and hand it over at the end of every
step; vLLM adds them up over ranks and steps, and sends them as a dictionary to the
process that logs. All ranks do alike, so everything is counted once, by the scheduler
side from one rank's reports; only what the store holds is told by the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daric_rag.engine import ReuseStats
from daric_rag.runtime.vllm_api import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    VllmConfig,
)
from daric_rag.storage import StoreStats

__all__ = ["COUNTERS", "GAUGES", "DaricPromMetrics", "DaricStats", "MetricSpec"]

_COUNTERS, _GAUGES = "counters", "gauges"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric of ours.

    Attributes:
        text: What it counts, for ``/metrics``.
        label: Name of its label; "" for none.
        values: Every value that the label may have, so that no series is ever made
            from a text that a client could choose.
    """

    text: str
    label: str = ""
    values: tuple[str, ...] = ("",)


COUNTERS: dict[str, MetricSpec] = {
    "requests": MetricSpec("Requests that reuse was tried for."),
    "refused_requests": MetricSpec("Requests served without reuse: a bad layout."),
    "prompt_tokens": MetricSpec("Prompt tokens of the requests counted."),
    "hit_tokens": MetricSpec(
        "Prompt tokens that were not computed on their own, by where they came from.",
        "kind",
        ("gpu_prefix", "contiguous", "disjoint"),
    ),
    "generated_tokens": MetricSpec(
        "Tokens of chunks computed on their own, by why the store could not provide "
        "them.",
        "reason",
        ("absent", "unreadable"),
    ),
    "recomputed_tokens": MetricSpec("Tokens computed in full context."),
    "saved_tokens": MetricSpec("Tokens whose KV was written to the store."),
    "loaded_bytes": MetricSpec("Bytes of records read from the store, by each rank."),
    "saved_bytes": MetricSpec("Bytes of records handed to the store, by each rank."),
    "phase_seconds": MetricSpec(
        "Seconds per phase; requests in one batch share those of recompute.",
        "phase",
        ("wait", "load", "generate", "recompute"),
    ),
    "evictions": MetricSpec("Records that the store gave up to make room."),
}
GAUGES: dict[str, MetricSpec] = {
    "store_bytes": MetricSpec("Bytes in the store.", "tier", ("host", "disk")),
    "store_records": MetricSpec("Records in the store.", "tier", ("host", "disk")),
}

_PREFIX = "vllm:daric_"


@dataclass
class DaricStats(KVConnectorStats):
    """Worker process or scheduler process. What happened since the last `take`.

    `data` is ``{"counters": {name: {label value: number}}, "gauges": ...}``; a metric
    without label has the label value "".
    """

    def __post_init__(self) -> None:
        """Start from nothing, unless data of another process are given."""
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {_COUNTERS: {}, _GAUGES: {}}

    def add(self, name: str, amount: float, label: str = "") -> None:
        """Add to a counter of `COUNTERS`; zero leaves no trace."""
        _check(COUNTERS, name, label)
        if amount:
            series = self.data[_COUNTERS].setdefault(name, {})
            series[label] = series.get(label, 0) + amount

    def set(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge of `GAUGES`."""
        _check(GAUGES, name, label)
        self.data[_GAUGES].setdefault(name, {})[label] = value

    def add_request(
        self, reuse: ReuseStats, *, unread_tokens: int = 0, wait_s: float = 0.0
    ) -> None:
        """Count a finished request.

        Args:
            reuse: What its client is told.
            unread_tokens: Of its generated tokens, those that the index knew and the
                store could not provide intact.
            wait_s: Seconds from its arrival to its admission.
        """
        unread = min(unread_tokens, reuse.generated_tokens)
        self.add("requests", 1)
        self.add("prompt_tokens", reuse.prompt_tokens)
        self.add("hit_tokens", reuse.gpu_prefix_tokens, "gpu_prefix")
        self.add("hit_tokens", reuse.contiguous_hit_tokens, "contiguous")
        self.add("hit_tokens", reuse.disjoint_hit_tokens, "disjoint")
        self.add("generated_tokens", reuse.generated_tokens - unread, "absent")
        self.add("generated_tokens", unread, "unreadable")
        self.add("recomputed_tokens", reuse.recomputed_tokens)
        self.add("saved_tokens", reuse.saved_tokens)
        self.add("phase_seconds", wait_s, "wait")
        self.add("phase_seconds", reuse.load_s, "load")
        self.add("phase_seconds", reuse.generation_s, "generate")
        self.add("phase_seconds", reuse.recompute_s, "recompute")

    def set_store(self, store: StoreStats) -> None:
        """Set the gauges of the store's usage; worker side."""
        for tier, held in (("host", store.host), ("disk", store.disk)):
            if held is not None:
                self.set("store_bytes", held.nbytes, tier)
                self.set("store_records", held.num_records, tier)

    def take(self) -> DaricStats | None:
        """Return what was counted, and start over; None if nothing was."""
        if self.is_empty():
            return None
        taken = DaricStats(self.data)
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> DaricStats:
        """Return the sum of both; of gauges the later value, which is `other`'s.

        Neither is changed: vLLM gives one dictionary to several loggers.
        """
        merged = DaricStats()
        for part in (self, other):
            for name, series in part.data[_COUNTERS].items():
                total = merged.data[_COUNTERS].setdefault(name, {})
                for label, amount in series.items():
                    total[label] = total.get(label, 0) + amount
            for name, series in part.data[_GAUGES].items():
                merged.data[_GAUGES].setdefault(name, {}).update(series)
        return merged

    def reduce(self) -> dict[str, int | float]:
        """Return one number per series, named as in ``hit_tokens[disjoint]``."""
        return {
            f"{name}[{label}]" if label else name: _rounded(value)
            for group in (_COUNTERS, _GAUGES)
            for name, series in self.data[group].items()
            for label, value in series.items()
        }

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.data[_COUNTERS] or self.data[_GAUGES])


class DaricPromMetrics(KVConnectorPromMetrics):
    """Logging process. `DaricStats` as ``vllm:daric_*`` counters and gauges.

    Every series is made at once and starts from 0, so that a rate over its first
    value is right.

    Args:
        vllm_config: The engine's.
        metric_types: From prometheus_client's classes to those to use instead.
        labelnames: vLLM's own labels.
        per_engine_labelvalues: Their values by engine.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[int, str, str], Any] = {}
        self._gauges: dict[tuple[int, str, str], Any] = {}
        for name, spec in COUNTERS.items():
            counter = self._counter_cls(
                name=_PREFIX + name,
                documentation=spec.text,
                labelnames=_labelnames(labelnames, spec),
            )
            self._counters |= self._series(name, spec, counter)
        for name, spec in GAUGES.items():
            gauge = self._gauge_cls(
                name=_PREFIX + name,
                documentation=spec.text,
                labelnames=_labelnames(labelnames, spec),
                multiprocess_mode="mostrecent",
            )
            self._gauges |= self._series(name, spec, gauge)

    def observe(
        self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0
    ) -> None:
        """Add a step's `DaricStats.data` to the series of engine `engine_idx`."""
        for name, series in transfer_stats_data.get(_COUNTERS, {}).items():
            for label, amount in series.items():
                self._counters[engine_idx, name, label].inc(amount)
        for name, series in transfer_stats_data.get(_GAUGES, {}).items():
            for label, value in series.items():
                self._gauges[engine_idx, name, label].set(value)

    def _series(
        self, name: str, spec: MetricSpec, metric: Any
    ) -> dict[tuple[int, str, str], Any]:
        return {
            (engine, name, value): metric.labels(
                *engine_values, *([value] if spec.label else [])
            )
            for engine, engine_values in self.per_engine_labelvalues.items()
            for value in spec.values
        }


def _labelnames(ours: list[str], spec: MetricSpec) -> list[str]:
    return [*ours, spec.label] if spec.label else list(ours)


def _check(specs: Mapping[str, MetricSpec], name: str, label: str) -> None:
    if name not in specs or label not in specs[name].values:
        raise KeyError(f"no metric {name!r} with label {label!r}; add it to the table")


def _rounded(value: float) -> int | float:
    return value if isinstance(value, int) else round(value, 3)
