"""A model's first use with a real engine: checked, remembered, refused if faulty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daric_rag.errors import UnsupportedModelError
from daric_rag.runtime.gate_record import gate_folder
from tests.reference.prompts import random_prompt
from tests.runtime.harness import Harness

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
RunPass = Callable[[Any], None]


def first_use(
    harness: Harness, wrapped: Callable[[RunPass], RunPass] = lambda run: run
) -> int:
    """Puts an idle engine through the gate; returns the number of passes."""
    harness.engine.clear_prefix_cache()
    num_passes = 0

    def check(worker: Any) -> None:
        def counted(output: Any) -> None:
            nonlocal num_passes
            num_passes += 1
            worker._run_pass(output)

        worker._side.check_first_use(
            wrapped(counted), kernel="this", max_model_len=4096, vocab_size=512
        )

    harness.on_worker(check)
    return num_passes


def test_first_use_is_checked_and_remembered(
    harness_of: Callable[..., Harness], cache_home: Path
) -> None:
    harness = harness_of(KIND)
    assert first_use(harness) > 0
    assert first_use(harness) == 0
    for record in gate_folder().iterdir():
        record.write_bytes(b"damaged")
    assert first_use(harness) > 0


def test_requests_after_it_find_nothing_of_it(
    harness_of: Callable[..., Harness], cache_home: Path
) -> None:
    harness = harness_of(KIND)
    prompt = random_prompt(41)
    first_use(harness)
    completion, layout = harness.run(prompt.chunks)
    harness.check(completion, layout)


def of_other_blocks(run: RunPass) -> RunPass:
    """Windows are computed over the sequence's blocks in another order."""

    def wrong(output: Any) -> None:
        new = [
            replace(r, block_ids=(r.block_ids[0][::-1],))
            if r.num_computed_tokens
            else r
            for r in output.scheduled_new_reqs
        ]
        run(replace(output, scheduled_new_reqs=new))

    return wrong


def of_no_context(run: RunPass) -> RunPass:
    """Passes are not run at all."""
    return lambda output: None


@pytest.mark.parametrize("fault", [of_other_blocks, of_no_context])
def test_a_faulty_engine_is_refused_and_not_remembered(
    harness_of: Callable[..., Harness],
    cache_home: Path,
    fault: Callable[[RunPass], RunPass],
) -> None:
    harness = harness_of(KIND)
    with pytest.raises(UnsupportedModelError, match="with vLLM alone"):
        first_use(harness, fault)
    # Only the start of the engine itself may have passed.
    assert first_use(harness) > 0
