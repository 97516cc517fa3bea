"""Small caches, sampled answers, and what must be left when all of it is over."""

from __future__ import annotations

import time
from typing import Any

import pytest

from daric_rag import Completion, TokenPrompt
from tests.reference.prompts import Prompt
from tests.runtime.harness import Harness, check_continuation

BLOCK_BYTES = 32 * 2048
TIGHT_BLOCKS = 39
"""39 blocks beside the null block: one request of full length, little more."""

TIGHT: dict[str, Any] = {
    "max_model_len": 1024,
    "kv_cache_memory_bytes": (TIGHT_BLOCKS + 1) * BLOCK_BYTES,
}


def as_prompt(prompt: Prompt) -> TokenPrompt:
    return TokenPrompt([list(chunk) for chunk in prompt.chunks])


def check_drawn(harness: Harness, prompt: Prompt, answer: Completion) -> None:
    """Every token's distribution is the reference's, whichever token was drawn."""
    layout = harness.engine.layout(as_prompt(prompt))
    prefill = harness.reference.daric_prefill(
        layout.token_ids, layout.spans, layout.windows
    )
    drawn = answer.token_ids
    expected = harness.reference.decode(prefill, len(drawn), forced=drawn)
    check_continuation(answer, expected)


def scheduler_of(harness: Harness) -> Any:
    return harness.engine._loop.call(
        lambda vllm: vllm.engine_core.engine_core.scheduler
    )


def check_nothing_is_left(harness: Harness) -> None:
    """No request is known to anybody, and every block is free."""
    scheduler = scheduler_of(harness)
    deadline = time.monotonic() + 2
    while scheduler.requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not scheduler.requests, "ended requests run on"
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not harness.engine._loop._streams
    assert not harness.spy_tracked()
    front = harness.engine._loop.call(lambda vllm: vllm.output_processor)
    assert not front.request_states
    assert not front.external_req_ids
    assert not front.parent_requests


def note_preemptions(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that ids of preempted requests are added to from now on."""
    scheduler = scheduler_of(harness)
    seen: list[str] = []
    preempt = scheduler._preempt_request

    def noted(request: Any, *args: Any, **options: Any) -> None:
        seen.append(request.request_id)
        preempt(request, *args, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", noted)
    return seen
