"""Small buffers and a small KV cache: more passes and more waiting, the same output."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from daric_rag import Completion, DaricConfig, TokenPrompt
from daric_rag.selection import merge
from tests.reference.dense import DenseReference
from tests.reference.prompts import (
    LONG_LENS,
    Prompt,
    Span,
    random_chunks,
    random_prompt,
    scenarios,
)
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import (
    NUM_LOGPROBS,
    NUM_TOKENS,
    Harness,
    check_continuation,
    finished,
)
from tests.runtime.pressure import note_preemptions

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
OPTIONS: dict[str, Any] = {"logprobs": 20, "ignore_eos": True}
BLOCK_BYTES = 32 * 2048


@contextmanager
def more_passes(harness: Harness, least: int) -> Iterator[None]:
    """The sub-requests inside need at least so many passes of their own."""
    before = harness.spy.passes
    yield
    assert harness.spy.passes - before >= least


def test_few_seats_do_not_starve_the_fill_queue(harness_of: HarnessPool) -> None:
    harness = harness_of(KIND, max_num_batched_tokens=512, max_num_seqs=4)
    running = [
        harness.engine.stream(
            as_prompt(random_prompt(number, (8, 8))),
            reuse="off",
            max_tokens=300,
            ignore_eos=True,
        )
        for number in range(3)
    ]
    for stream in running:
        next(stream)
    before = len(harness.spy.plans)
    # Its chunks and windows, of which the one free seat would take one a step.
    prompt = as_prompt(random_prompt(99, (20, *[60] * 14, 12)))
    cold = finished(harness.engine.stream(prompt, max_tokens=1))
    num_steps = len(harness.spy.plans) - before
    for stream in running:
        stream.close()  # type: ignore[attr-defined]
    assert cold.reuse.generated_tokens > 500
    # One sub-request a step took twenty.
    assert num_steps < 14


# --------------------------------------------------------------------- small buffers


@pytest.fixture(params=[(64, 4), (128, 2), (96, 32)], scope="module")
def small(request: pytest.FixtureRequest) -> dict[str, int]:
    num_tokens, num_seqs = request.param
    return {"max_num_batched_tokens": num_tokens, "max_num_seqs": num_seqs}


@pytest.fixture
def cramped(harness_of: HarnessPool, small: dict[str, int]) -> Harness:
    return harness_of(KIND, **small)


@pytest.mark.parametrize("name", ["all_miss", "all_hit", "hole", "repeated"])
def test_scenarios_in_waves(cramped: Harness, name: str) -> None:
    scenario = next(s for s in scenarios(300) if s.name == name)
    # Under this seed other tests of this engine store nothing: start clean.
    prompt = shifted(scenario.prompt, name)
    stored = [shifted(Prompt((c,)), name).chunks[0] for c in scenario.stored]
    cramped.store(stored)
    with more_passes(cramped, 2 if name in ("all_miss", "hole") else 1):
        answer, layout = cramped.run(prompt.chunks)
    cramped.check(answer, layout)


def shifted(prompt: Prompt, name: str) -> Prompt:
    """The same chunks with tokens that no other scenario has."""
    shift = len(name) * 7
    return Prompt(
        tuple(tuple((t - 16 + shift) % 496 + 16 for t in c) for c in prompt.chunks)
    )


def test_chunks_longer_than_a_pass(cramped: Harness, small: dict[str, int]) -> None:
    prompt = random_prompt(301, LONG_LENS)
    longest_pass = small["max_num_batched_tokens"]
    assert max(LONG_LENS) > 4 * longest_pass
    with more_passes(cramped, sum(LONG_LENS[1:-1]) // longest_pass):
        answer, layout = cramped.run(prompt.chunks)
    cramped.check(answer, layout)
    cramped.engine.clear_prefix_cache()
    warm, _ = cramped.run(prompt.chunks)
    cramped.check(warm, layout)
    assert warm.reuse.generated_tokens == 0


@pytest.mark.parametrize("lens", [(700, 150, 160, 20), (40, 150, 160, 500)])
def test_long_system_prompt_and_long_question(
    cramped: Harness, lens: tuple[int, ...]
) -> None:
    """Windows longer than a pass; vLLM itself cuts the last one into steps."""
    prompt = random_prompt(302 + lens[0], lens)
    steps = len(cramped.spy.plans)
    with more_passes(cramped, 2):
        answer, layout = cramped.run(prompt.chunks, max_tokens=5)
    cramped.check(answer, layout)
    if lens[-1] > 400:
        assert len(cramped.spy.plans) - steps > 5 + 2
    cramped.engine.clear_prefix_cache()
    warm, _ = cramped.run(prompt.chunks, max_tokens=5)
    cramped.check(warm, layout)
    assert warm.reuse.generated_tokens == 0
    assert warm.reuse.hit_tokens == sum(lens[:-1])


def test_a_batch_in_waves(
    cramped: Harness, reference_of: Callable[[str], DenseReference]
) -> None:
    """More requests than seats, each with more windows than seats."""
    prompts = [random_prompt(310 + i, (30, 100, 170, 110, 90, 25)) for i in range(5)]
    answers = cramped.batch(
        [as_prompt(prompt) for prompt in prompts], max_tokens=9, **OPTIONS
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        cramped.check(answer, cramped.engine.layout(as_prompt(prompt)), kv=False)


# ------------------------------------------------------------------- small KV cache


@pytest.fixture
def tight(harness_of: HarnessPool) -> Harness:
    """39 blocks beside the null block: one request of full length, little more."""
    return harness_of(KIND, max_model_len=1024, kv_cache_memory_bytes=40 * BLOCK_BYTES)


def free_blocks(harness: Harness) -> int:
    free: int = harness.engine._loop.call(
        lambda vllm: pool_of(vllm).get_num_free_blocks()
    )
    return free


def pool_of(vllm: Any) -> Any:
    return scheduler_of(vllm).kv_cache_manager.block_pool


def scheduler_of(vllm: Any) -> Any:
    return vllm.engine_core.engine_core.scheduler


@pytest.fixture
def preemptions(tight: Harness, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of requests that were preempted since."""
    return note_preemptions(tight, monkeypatch)


def check_all(
    harness: Harness, prompts: list[Prompt], answers: list[Completion]
) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        harness.check(answer, harness.engine.layout(as_prompt(prompt)), kv=False)


def test_the_cache_is_as_small_as_meant(tight: Harness) -> None:
    assert free_blocks(tight) == 39


def test_scarce_scratch_blocks(tight: Harness) -> None:
    """Missing chunks take turns in what is left beside the request."""
    prompt = random_prompt(320, (40, 250, 200, 260, 150, 20))
    answer, layout = tight.run(prompt.chunks)
    tight.check(answer, layout)
    assert answer.reuse.generated_tokens == 250 + 200 + 260 + 150
    assert free_blocks(tight) == 39


def test_requests_wait_for_blocks(tight: Harness) -> None:
    prompts = [random_prompt(330 + i, (30, 200, 150, 210, 25)) for i in range(4)]
    answers = tight.batch([as_prompt(p) for p in prompts], max_tokens=21, **OPTIONS)
    check_all(tight, prompts, answers)
    assert max(len(p.requests) for p in tight.spy.plans[-100:]) < 4
    assert free_blocks(tight) == 39


def test_preemption_and_resume(tight: Harness, preemptions: list[str]) -> None:
    prompts = [random_prompt(340 + i, (20, 90, 100, 15)) for i in range(4)]
    answers = tight.batch([as_prompt(p) for p in prompts], max_tokens=150, **OPTIONS)
    assert preemptions, "nothing was preempted: the test is too small"
    check_all(tight, prompts, answers)
    for answer in answers:
        reuse = answer.reuse
        assert reuse.prompt_tokens == 225
        assert 0 <= reuse.gpu_prefix_tokens < 225
        assert 0 <= reuse.hit_tokens <= 210
        assert min(reuse.generated_tokens, reuse.recomputed_tokens) > 0
    assert free_blocks(tight) == 39


def test_preemption_beside_ordinary_requests(
    tight: Harness,
    preemptions: list[str],
    reference_of: Callable[[str], DenseReference],
) -> None:
    prompts = [random_prompt(350 + i, (20, 90, 100, 15)) for i in range(4)]
    modes = ("daric", "off", "daric", "off")

    with tight.together():
        streams = [
            tight.engine.stream(as_prompt(p), reuse=mode, max_tokens=150, **OPTIONS)
            for p, mode in zip(prompts, modes, strict=True)
        ]
    answers = [finished(stream) for stream in streams]
    assert preemptions
    check_all(tight, prompts[::2], answers[::2])
    reference = reference_of(KIND)
    for prompt, answer in zip(prompts[1::2], answers[1::2], strict=True):
        check_continuation(answer, reference.full_greedy(prompt.token_ids, 150))
    assert free_blocks(tight) == 39


def computed_in_place(
    reference: DenseReference, layout: Any, spans: list[Span], num_tokens: int
) -> Any:
    """The reference for chunks that had to be computed in full context."""
    windows = list(merge([*layout.windows, *spans]))
    return reference.greedy(layout.token_ids, layout.spans, windows, num_tokens)


def test_a_chunk_too_long_for_scratch_is_computed_in_place(
    tight: Harness, reference_of: Callable[[str], DenseReference]
) -> None:
    """30 blocks for the prompt leave 9, and the long chunk needs 16."""
    prompt = random_prompt(360, (40, 500, 250, 150, 20))
    answer, layout = tight.run(prompt.chunks)
    expected = computed_in_place(
        reference_of(KIND), layout, [layout.spans[1]], len(answer.token_ids)
    )
    check_continuation(answer, expected)
    assert answer.reuse.generated_tokens == 250 + 150
    assert free_blocks(tight) == 39


def test_a_lost_chunk_too_long_for_scratch_is_computed_in_place(
    tight: Harness, reference_of: Callable[[str], DenseReference]
) -> None:
    """The scheduler side counts on the record, and the worker side cannot read it."""
    prompt = random_prompt(361, (40, 500, 250, 150, 20))
    tight.store([prompt.chunks[1]])
    store = tight.spy.side.store
    for key in list(store.keys()):
        store.delete(key)
    answer, layout = tight.run(prompt.chunks)
    expected = computed_in_place(
        reference_of(KIND), layout, [layout.spans[1]], len(answer.token_ids)
    )
    check_continuation(answer, expected)
    assert answer.reuse.hit_tokens == 0
    assert free_blocks(tight) == 39


def test_block_alignment_in_a_tight_cache(harness_of: HarnessPool) -> None:
    harness = harness_of(
        KIND,
        config=DaricConfig(alignment="block"),
        max_model_len=1024,
        kv_cache_memory_bytes=40 * BLOCK_BYTES,
        max_num_batched_tokens=64,
        max_num_seqs=4,
    )
    prompts = [random_prompt(370 + i, (20, 90, 100, 15)) for i in range(4)]
    answers = harness.batch([as_prompt(p) for p in prompts], max_tokens=130, **OPTIONS)
    check_all(harness, prompts, answers)
    assert free_blocks(harness) == 39


# ---------------------------------------------------------------------- all together


@pytest.mark.parametrize("seed", range(3))
def test_a_busy_engine(
    harness_of: HarnessPool,
    reference_of: Callable[[str], DenseReference],
    seed: int,
) -> None:
    """Shared documents, all modes, preemption, waves and aborts at the same time."""
    harness = harness_of(
        KIND,
        config=DaricConfig(host_bytes=700 * 2048, max_segment_len=100),
        max_model_len=1024,
        kv_cache_memory_bytes=50 * BLOCK_BYTES,
        max_num_batched_tokens=96,
        max_num_seqs=6,
    )
    harness.engine.clear_prefix_cache()
    draw = random.Random(seed)
    lens = [draw.randrange(1, 220) for _ in range(8)]
    documents = random_chunks(1000 + seed, lens, 512)
    prompts, modes, streams = [], [], []
    with harness.together():
        for index in range(24):
            chosen = draw.choices(documents, k=draw.randrange(1, 5))
            asked = 2000 + 100 * seed + index
            question = random_chunks(asked, [draw.randrange(1, 80)], 512)
            prompts.append(Prompt((*chosen, *question)))
            if index % 5 == 4:  # An earlier prompt again, its blocks too.
                prompts[-1] = prompts[-3]
            modes.append(draw.choice(("daric", "daric", "daric", "full_reuse", "off")))
            options = {"reuse": modes[-1], "max_tokens": draw.randrange(1, 90)}
            streams.append(
                harness.engine.stream(as_prompt(prompts[-1]), **OPTIONS, **options)
            )
    for stream in streams[::6]:
        next(stream, None)
        stream.close()
    answers = [None if i % 6 == 0 else finished(s) for i, s in enumerate(streams)]
    assert free_blocks(harness) == 49
    reference = reference_of(KIND)
    for prompt, mode, answer in zip(prompts, modes, answers, strict=True):
        if answer is None:
            continue
        layout = harness.engine.layout(as_prompt(prompt))
        windows = {
            "daric": layout.windows,
            "full_reuse": [layout.spans[-1]],
            "off": [(0, prompt.prompt_len)],
        }[mode]
        expected = reference.greedy(
            prompt.token_ids, layout.spans, windows, len(answer.token_ids)
        )
        check_continuation(answer, expected)


def as_prompt(prompt: Prompt) -> TokenPrompt:
    return TokenPrompt([list(chunk) for chunk in prompt.chunks])


def test_cold_requests_do_not_all_generate_in_one_step(harness_of: HarnessPool) -> None:
    """Running requests wait for a step, so one step takes about a pass of misses."""
    limit = 256
    harness = harness_of(KIND, max_num_batched_tokens=limit)
    prompts = [random_prompt(90 + seed, (37, 129, 113, 23)) for seed in range(6)]
    before = len(harness.spy.plans)
    completions = harness.engine.generate_batch(
        [TokenPrompt([list(c) for c in prompt.chunks]) for prompt in prompts],
        max_tokens=NUM_TOKENS,
        logprobs=NUM_LOGPROBS,
        ignore_eos=True,
    )
    for plan in harness.spy.plans[before:]:
        missing = [
            sum(chunk.num_tokens - chunk.hit_len for chunk in request.chunks)
            for request in plan.requests
        ]
        assert sum(missing) <= limit or len(missing) == 1
    for prompt, completion in zip(prompts, completions, strict=True):
        layout = harness.engine.layout(TokenPrompt([list(c) for c in prompt.chunks]))
        harness.check(completion, layout, kv=False)
