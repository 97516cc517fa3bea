"""Every hit pattern on every kind of model against the dense reference, in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from daric_rag import DaricConfig
from tests.reference.prompts import Scenario, scenarios
from tests.reference.tiny_models import DENSE_KINDS
from tests.runtime.harness import Harness

pytestmark = pytest.mark.engine

SCENARIOS = [scenario.name for scenario in scenarios(0)]
ALIGNMENTS = ("exact", "block")


def _scenario(name: str, seed: int) -> Scenario:
    return next(s for s in scenarios(seed) if s.name == name)


@pytest.mark.parametrize("kind", DENSE_KINDS)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(
    harness_of: Callable[..., Harness], kind: str, alignment: str, name: str
) -> None:
    """KV of every layer, log-probabilities and 21 greedy tokens are the reference's."""
    harness = harness_of(kind, config=DaricConfig(alignment=alignment))  # type: ignore[arg-type]
    scenario = _scenario(name, seed=SCENARIOS.index(name))
    harness.store([c for c in scenario.prompt.chunks if c in scenario.stored])
    completion, layout = harness.run(scenario.prompt.chunks)
    harness.check(completion, layout)
    _check_reuse(scenario, completion.reuse)


def _check_reuse(scenario: Scenario, reuse: object) -> None:
    print(scenario.name, reuse)
