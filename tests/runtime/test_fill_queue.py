"""Requests that wait while their blocks are filled: nobody else waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from daric_rag import Completion, TokenPrompt
from tests.reference.dense import DenseReference
from tests.reference.prompts import Prompt, TokenIds, random_chunks, random_prompt
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import NUM_TOKENS, Harness, check_continuation, finished

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
PASS_LEN = 256
# About eight passes of missing chunks.
COLD_LENS = (37, 300, 290, 310, 295, 305, 288, 23)
OPTIONS: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "logprobs": 20,
    "ignore_eos": True,
}


@pytest.fixture
def harness(harness_of: HarnessPool) -> Harness:
    return harness_of(KIND, max_num_batched_tokens=PASS_LEN)


def as_prompt(prompt: Prompt) -> TokenPrompt:
    return TokenPrompt([list(chunk) for chunk in prompt.chunks])


def check(harness: Harness, prompt: Prompt, answer: Completion) -> None:
    harness.check(answer, harness.engine.layout(as_prompt(prompt)), kv=False)


def scheduler_of(harness: Harness) -> Any:
    return harness.engine._loop.facts.engine.engine_core.engine_core.scheduler


def free_blocks(harness: Harness) -> int:
    pool = scheduler_of(harness).kv_cache_manager.block_pool
    return int(pool.get_num_free_blocks())


def sampled_ids(seed: int) -> TokenIds:
    (ids,) = random_chunks(seed, (40,), 512)
    return ids


def test_a_cold_prompt_is_spread_over_steps(harness: Harness) -> None:
    """No pass is longer than a pass, no step has more than one and a quarter."""
    prompt = random_prompt(700, COLD_LENS)
    since = len(harness.spy.step_lens)
    answer, layout = harness.run(prompt.chunks)
    harness.check(answer, layout)
    steps = harness.spy.step_lens[since:]
    assert max(sum(lens) for lens in steps) <= PASS_LEN * 5 / 4
    assert sum(sum(lens) > PASS_LEN / 2 for lens in steps) >= 7, "nothing was spread"


def test_many_at_once_make_no_step_longer(harness: Harness) -> None:
    """Long and short ones, cold and warm: one and a half passes at most."""
    warm = [random_prompt(760 + i, (37, 140, 150, 23)) for i in range(4)]
    for prompt in warm:
        harness.run(prompt.chunks, max_tokens=1)
    harness.engine.clear_prefix_cache()
    cold = [random_prompt(770 + i, (*COLD_LENS[: 3 + i], 23)) for i in range(4)]
    short = [random_prompt(780 + i, (37, 30, 20, 9)) for i in range(8)]
    prompts = [p for group in zip(warm, cold, short, strict=False) for p in group]
    prompts += short[4:]
    since = len(harness.spy.step_lens)
    answers = harness.batch([as_prompt(p) for p in prompts], **OPTIONS)
    for prompt, answer in zip(prompts, answers, strict=True):
        check(harness, prompt, answer)
    steps = [sum(lens) for lens in harness.spy.step_lens[since:]]
    assert max(steps) <= PASS_LEN * 3 / 2
    assert max(steps) > PASS_LEN


def test_others_go_on_decoding_meanwhile(
    harness: Harness, reference_of: Callable[[str], DenseReference]
) -> None:
    """Every step of the cold prompt has a token for the running request too."""
    ids = sampled_ids(710)
    cold = random_prompt(711, COLD_LENS)
    running = harness.engine.stream(
        TokenPrompt([list(ids)]), reuse="off", **(OPTIONS | {"max_tokens": 200})
    )
    first = next(running)
    since = len(harness.spy.step_lens)
    answer = harness.engine.generate(as_prompt(cold), **OPTIONS)
    spread = [lens for lens in harness.spy.step_lens[since:] if sum(lens) > 100]
    assert len(spread) >= 7
    # vLLM's own pass is the last of a step, and the running request is in it.
    assert all(lens[-1] >= 1 for lens in spread)
    assert all(sum(lens) <= PASS_LEN * 5 / 4 for lens in spread)
    other = finished(running)
    assert first.token_ids[0] == other.token_ids[0]
    check(harness, cold, answer)
    reference = reference_of(KIND)
    expected = reference.decode(reference.full_prefill(ids), 200)
    check_continuation(other, expected)


def test_one_missing_chunk_wanted_in_different_steps(harness: Harness) -> None:
    """Who comes while it is generated waits for it."""
    prompts = [random_prompt(720 + i, COLD_LENS) for i in range(3)]
    (wanted,) = random_chunks(729, (640,), 512)
    prompts = [prompt.replaced(2 + i, wanted) for i, prompt in enumerate(prompts)]
    answers = harness.batch([as_prompt(p) for p in prompts], **OPTIONS)
    for prompt, answer in zip(prompts, answers, strict=True):
        check(harness, prompt, answer)
    made = sum(answer.reuse.generated_tokens for answer in answers)
    all_lens = sum(len(c) for p in prompts for c in p.chunks[1:-1])
    assert made == all_lens - 2 * len(wanted)


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.06, 0.1, 0.2])
async def test_abort_in_every_phase(harness: Harness, after_s: float) -> None:
    """Blocks come back at once, and who shares a chunk still gets it."""
    harness.engine.clear_prefix_cache()
    before = free_blocks(harness)
    seed = 730 + int(after_s * 1000)
    aborted, kept = random_prompt(seed, COLD_LENS), random_prompt(seed + 500, COLD_LENS)
    kept = kept.replaced(2, aborted.chunks[3])
    ends = asyncio.create_task(harness.engine.agenerate(as_prompt(aborted), **OPTIONS))
    stays = asyncio.create_task(harness.engine.agenerate(as_prompt(kept), **OPTIONS))
    await asyncio.sleep(after_s)
    ends.cancel()
    answer = await stays
    check(harness, kept, answer)
    await asyncio.gather(ends, return_exceptions=True)
    alone = random_prompt(seed + 900, COLD_LENS)
    task = asyncio.create_task(harness.engine.agenerate(as_prompt(alone), **OPTIONS))
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(100):
        if not scheduler_of(harness).requests:
            break
        await asyncio.sleep(0.02)
    assert not scheduler_of(harness).requests
    assert free_blocks(harness) == before


async def test_nobody_is_overtaken_for_good(harness_of: HarnessPool) -> None:
    """Ordinary requests behind a prompt that needs the whole cache wait for it."""
    block_bytes = 32 * 2048
    harness = harness_of(
        KIND,
        max_num_batched_tokens=PASS_LEN,
        max_model_len=1024,
        kv_cache_memory_bytes=44 * block_bytes,
    )
    engine, order = harness.engine, []
    big = random_prompt(740, (40, 320, 310, 20))

    async def answer(name: str, prompt: TokenPrompt, **options: Any) -> Completion:
        completion = await engine.agenerate(prompt, **(OPTIONS | options))
        order.append(name)
        return completion

    def ordinary(seed: int) -> Any:
        (ids,) = random_chunks(seed, (300,), 512)
        return answer("ordinary", TokenPrompt([list(ids)]), reuse="off")

    running = [asyncio.create_task(ordinary(741 + i)) for i in range(3)]
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(answer("big", as_prompt(big)))
    await asyncio.sleep(0.02)
    later = [asyncio.create_task(ordinary(750 + i)) for i in range(6)]
    completion = await waiting
    await asyncio.gather(*running, *later)
    check(harness, big, completion)
    assert order.index("big") <= 4, order
