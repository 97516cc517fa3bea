"""What is counted adds up over ranks and steps, and reaches Prometheus as it is."""

import json
import pickle
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from daric_rag.engine import ReuseStats
from daric_rag.runtime.metadata import DaricMetadata
from daric_rag.runtime.metrics import COUNTERS, GAUGES, DaricPromMetrics, DaricStats
from daric_rag.storage import StoreStats
from daric_rag.storage.base import TierStats

REUSE = ReuseStats(
    prompt_tokens=100,
    gpu_prefix_tokens=16,
    contiguous_hit_tokens=30,
    disjoint_hit_tokens=20,
    generated_tokens=24,
    recomputed_tokens=12,
    saved_tokens=24,
    load_s=0.5,
    generation_s=0.25,
    recompute_s=0.125,
)
REDUCED = {
    "requests": 1,
    "prompt_tokens": 100,
    "hit_tokens[gpu_prefix]": 16,
    "hit_tokens[contiguous]": 30,
    "hit_tokens[disjoint]": 20,
    "generated_tokens[absent]": 20,
    "generated_tokens[unreadable]": 4,
    "recomputed_tokens": 12,
    "saved_tokens": 24,
    "phase_seconds[load]": 0.5,
    "phase_seconds[generate]": 0.25,
    "phase_seconds[recompute]": 0.125,
}


def counted(**amounts):
    stats = DaricStats()
    for name, amount in amounts.items():
        stats.add(name, amount)
    return stats


def test_a_request_is_counted_field_by_field():
    stats = DaricStats()
    stats.add_request(REUSE, unread_tokens=4)
    assert stats.reduce() == REDUCED


def test_counters_add_up_and_gauges_are_the_latest():
    one, two = counted(evictions=1, loaded_bytes=10), counted(evictions=2)
    one.set("store_bytes", 50, "host")
    one.set("store_bytes", 7, "disk")
    two.set("store_bytes", 40, "host")
    assert one.aggregate(two).reduce() == {
        "evictions": 3,
        "loaded_bytes": 10,
        "store_bytes[host]": 40,
        "store_bytes[disk]": 7,
    }


def test_the_store_is_told_tier_by_tier():
    host = TierStats(1, 2, 3, 4, 5, num_records=6, nbytes=70, capacity_bytes=80)
    store = StoreStats(host, None, 0, 0, 0, 0, 0, read_only=False)
    stats = DaricStats()
    stats.set_store(store)
    assert stats.reduce() == {"store_bytes[host]": 70, "store_records[host]": 6}
    stats.set_store(replace(store, disk=replace(host, nbytes=90)))
    assert stats.reduce()["store_bytes[disk]"] == 90


def test_adding_up_changes_neither_part():
    one, two = counted(evictions=1), counted(evictions=2)
    total = one.aggregate(two)
    total.add("evictions", 5)
    assert (one.reduce(), two.reduce()) == ({"evictions": 1}, {"evictions": 2})


def test_what_is_taken_is_no_longer_here_and_no_longer_changes():
    stats = counted(evictions=1)
    taken = stats.take()
    stats.add("evictions", 2)
    assert taken.reduce() == {"evictions": 1}
    assert stats.take().reduce() == {"evictions": 2}
    assert stats.take() is None


def test_zeros_are_nothing_to_tell():
    assert counted(evictions=0, loaded_bytes=0).is_empty()
    stats = DaricStats()
    stats.set("store_bytes", 0, "host")
    assert not stats.is_empty()


def test_data_survive_both_ways_to_another_process():
    stats = DaricStats()
    stats.add_request(REUSE)
    stats.set("store_records", 3, "disk")
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert DaricStats(json.loads(json.dumps(stats.to_dict()))) == stats


@pytest.mark.parametrize(
    ("name", "label"), [("evicted", ""), ("hit_tokens", "other"), ("evictions", "x")]
)
def test_only_what_is_in_the_table_is_counted(name, label):
    with pytest.raises(KeyError, match="no metric"):
        DaricStats().add(name, 1, label)


def prometheus(engines=(0,)):
    registry = CollectorRegistry()
    kinds = (Counter, Gauge, Histogram)
    metrics = DaricPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {kind: partial(kind, registry=registry) for kind in kinds},
        ["model_name", "engine"],
        {index: ["tiny", str(index)] for index in engines},
    )
    return metrics, registry


def value_of(registry, name, **labels):
    labels = {"model_name": "tiny", "engine": "0"} | labels
    return registry.get_sample_value(f"vllm:daric_{name}", labels)


def test_prometheus_counts_what_was_counted():
    metrics, registry = prometheus()
    stats = DaricStats()
    stats.add_request(REUSE, unread_tokens=4)
    stats.set("store_bytes", 50, "host")
    metrics.observe(stats.to_dict())
    stats.set("store_bytes", 40, "host")
    metrics.observe(stats.to_dict())
    for series, value in REDUCED.items():
        name, _, label = series.rstrip("]").partition("[")
        labels = {COUNTERS[name].label: label} if label else {}
        assert value_of(registry, f"{name}_total", **labels) == 2 * value, series
    assert value_of(registry, "store_bytes", tier="host") == 40


def test_every_series_is_there_from_the_start():
    _, registry = prometheus()
    for name, spec in COUNTERS.items():
        for value in spec.values:
            labels = {spec.label: value} if spec.label else {}
            assert value_of(registry, f"{name}_total", **labels) == 0
    for name, spec in GAUGES.items():
        for value in spec.values:
            assert value_of(registry, name, **{spec.label: value}) == 0
    assert b"vllm:daric_requests_total" in generate_latest(registry)


def test_engines_have_series_of_their_own():
    metrics, registry = prometheus(engines=(0, 1))
    metrics.observe(counted(evictions=3).to_dict(), engine_idx=1)
    assert value_of(registry, "evictions_total", engine="1") == 3
    assert value_of(registry, "evictions_total", engine="0") == 0


@pytest.mark.parametrize("is_step", [True, False])
def test_passes_of_sub_requests_take_no_counts(is_step):
    """vLLM asks after every pass, and what they return is discarded."""
    from daric_rag.runtime.connector import DaricConnector, KVConnectorRole

    half = SimpleNamespace(
        role=KVConnectorRole.WORKER,
        _connector_metadata=DaricMetadata(is_step=is_step),
        worker=SimpleNamespace(stats=counted(evictions=1)),
    )
    taken = DaricConnector.get_kv_connector_stats(half)
    assert (taken is not None) == is_step
    assert half.worker.stats.is_empty() == is_step
