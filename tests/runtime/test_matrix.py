"""Every hit pattern on every kind of model against the dense reference, in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from daric_rag import DaricConfig, ReuseStats
from tests.reference.prompts import Scenario, scenarios
from tests.reference.tiny_models import KINDS
from tests.runtime.harness import Harness

pytestmark = pytest.mark.engine

SCENARIOS = [scenario.name for scenario in scenarios(0)]
# Alignment changes the prompt, not how a kind of model is served.
CASES = [(kind, "exact") for kind in KINDS] + [
    (kind, "block") for kind in ("llama-gqa-tied", "qwen3", "llama-rope-yarn")
]


def _scenario(name: str, seed: int) -> Scenario:
    return next(s for s in scenarios(seed) if s.name == name)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(("kind", "alignment"), CASES)
def test_scenario(
    harness_of: Callable[..., Harness], kind: str, alignment: str, name: str
) -> None:
    """KV of every layer, log-probabilities and 21 greedy tokens are the reference's."""
    harness = harness_of(kind, config=DaricConfig(alignment=alignment))  # type: ignore[arg-type]
    scenario = _scenario(name, seed=SCENARIOS.index(name))
    harness.store([c for c in scenario.prompt.chunks if c in scenario.stored])
    completion, layout = harness.run(scenario.prompt.chunks)
    harness.check(completion, layout)
    _check_reuse(scenario, completion.reuse, layout.padding_len)


def _check_reuse(scenario: Scenario, reuse: ReuseStats, padding_len: int) -> None:
    """Hits and misses are counted as what they were."""
    chunks, hits = scenario.prompt.chunks, scenario.hits
    assert reuse.num_chunks == len(chunks)
    assert reuse.gpu_prefix_tokens == 0
    assert bool(reuse.contiguous_hit_tokens) == hits[0]
    unbroken = hits.index(False)  # the question is never stored
    assert bool(reuse.disjoint_hit_tokens) == any(hits[unbroken:])
    missing = {c for c, hit in zip(chunks[:-1], hits, strict=False) if not hit}
    assert bool(reuse.generated_tokens) == bool(missing - {chunks[0]})
    assert reuse.generated_tokens <= sum(map(len, missing)) + padding_len
    assert bool(reuse.saved_tokens) == bool(missing or scenario.name == "monolithic")
    assert bool(reuse.reason) == (not any(hits))
