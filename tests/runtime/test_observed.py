"""What an engine tells of its requests: traces to clients, counts to Prometheus."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY

from daric_rag import TokenPrompt
from tests.reference.prompts import random_chunks, random_prompt
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import Harness

pytestmark = pytest.mark.engine

LENS = (37, 129, 163, 301, 132, 23)
DOCUMENT_TOKENS = sum(LENS[1:-1])


@pytest.fixture
def harness(harness_of: HarnessPool) -> Harness:
    return harness_of("llama-gqa-tied", disable_log_stats=False)


def counts() -> dict[tuple[str, str], float]:
    """Every series of ours, by name and the label that is ours."""
    found: dict[tuple[str, str], float] = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.startswith("vllm:daric_") and "created" not in sample.name:
                labels = dict(sample.labels)
                own = [labels[k] for k in labels if k not in ("model_name", "engine")]
                found[sample.name, ",".join(own)] = sample.value
    return found


def run(harness: Harness, seed: int, **options: Any) -> Any:
    prompt = random_prompt(seed, LENS)
    chunks = [list(chunk) for chunk in prompt.chunks]
    # Another first chunk, so that nothing comes from the prefix cache.
    chunks[0] = list(random_chunks(options.pop("first"), (LENS[0],), 512)[0])
    return harness.engine.generate(TokenPrompt(chunks), max_tokens=2, **options)


def test_trace_and_counts_tell_the_same(harness: Harness) -> None:
    before = counts()
    cold = run(harness, 800, first=801, trace=True)
    warm = run(harness, 800, first=802, trace=True)
    run(harness, 800, first=803, reuse="off")
    after = counts()
    assert {chunk.kind for chunk in cold.trace.chunks[1:-1]} == {"generated"}
    assert {chunk.kind for chunk in warm.trace.chunks[1:-1]} <= {"disjoint_hit"}
    assert sum(end - start for start, end in warm.trace.windows) == (
        warm.reuse.recomputed_tokens
    )
    assert all(e.end_s >= e.start_s >= 0 for e in warm.trace.events)

    def grown(name: str) -> float:
        return sum(after[k] - before.get(k, 0) for k in after if k[0] == name)

    assert grown("vllm:daric_requests_total") == 2
    assert grown("vllm:daric_generated_tokens_total") == DOCUMENT_TOKENS
    hits = warm.reuse.hit_tokens
    assert hits > DOCUMENT_TOKENS / 2
    assert grown("vllm:daric_hit_tokens_total") >= hits
    assert grown("vllm:daric_loaded_bytes_total") > 0
    assert grown("vllm:daric_saved_bytes_total") > 0
    assert any(name == "vllm:daric_store_bytes" for name, _ in after)


def test_no_trace_unasked(harness: Harness) -> None:
    assert run(harness, 804, first=805).trace is None
