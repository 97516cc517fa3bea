"""Many at once, ended halfway, from any thread: the same answers and nothing left."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from daric_rag import Completion, Delta, EmbeddedEngine, TokenPrompt
from daric_rag.errors import EngineClosedError
from tests.reference.dense import DenseReference
from tests.reference.prompts import Prompt, TokenIds, random_chunks, random_prompt
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import (
    NUM_TOKENS,
    Harness,
    check_continuation,
    own_threads,
)
from tests.runtime.pressure import check_nothing_is_left

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
LENS = (37, 129, 163, 301, 132, 195, 23)
OPTIONS: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "logprobs": 20,
    "ignore_eos": True,
}
# Seconds even on a fast machine: what ends within one of them was aborted.
LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}


@pytest.fixture
def harness(harness_of: HarnessPool) -> Harness:
    return harness_of(KIND)


def as_prompt(prompt: Prompt) -> TokenPrompt:
    return TokenPrompt([list(chunk) for chunk in prompt.chunks])


def check(harness: Harness, prompt: Prompt, answer: Completion) -> None:
    harness.check(answer, harness.engine.layout(as_prompt(prompt)), kv=False)


def admitted(harness: Harness, since: int) -> list[int]:
    """How many requests each step since then admitted."""
    return [len(p.requests) for p in harness.spy.plans[since:] if p.requests]


# --------------------------------------------------------------------------- together


async def test_daric_and_ordinary_requests_at_once(
    harness: Harness, reference_of: Callable[[str], DenseReference]
) -> None:
    prompts = [random_prompt(400 + i, LENS) for i in range(12)]
    # Some documents are shared, some are stored already, some are neither.
    shared, known = random_chunks(499, (140, 170), 512)
    prompts[1] = prompts[1].replaced(2, shared)
    prompts[2] = prompts[2].replaced(4, shared)
    prompts[3] = prompts[3].replaced(1, known)
    prompts[4] = prompts[4].replaced(5, known)
    harness.store([known])
    modes = ["daric", "daric", "off"] * 4
    since = len(harness.spy.plans)
    answers = await asyncio.gather(
        *(
            harness.engine.agenerate(as_prompt(prompt), reuse=mode, **OPTIONS)
            for prompt, mode in zip(prompts, modes, strict=True)
        )
    )
    assert max(admitted(harness, since)) > 1, "nothing was batched"
    reference = reference_of(KIND)
    harness.engine.clear_prefix_cache()
    for prompt, mode, answer in zip(prompts, modes, answers, strict=True):
        alone = await harness.engine.agenerate(as_prompt(prompt), reuse=mode, **OPTIONS)
        assert answer.token_ids == alone.token_ids
        if mode == "daric":
            check(harness, prompt, answer)
            assert answer.reuse.prompt_tokens == prompt.prompt_len
        else:
            full = reference.full_greedy(prompt.token_ids, NUM_TOKENS)
            check_continuation(answer, full)
            assert answer.reuse.reason == 'reuse="off"'


def test_one_missing_chunk_wanted_by_two(harness: Harness) -> None:
    wanted = random_chunks(420, (300,), 512)[0]
    prompts = [random_prompt(421 + i, LENS).replaced(3 - i, wanted) for i in range(2)]
    since = len(harness.spy.plans)
    answers = harness.batch([as_prompt(p) for p in prompts], **OPTIONS)
    assert admitted(harness, since) == [2]
    for prompt, answer in zip(prompts, answers, strict=True):
        check(harness, prompt, answer)
    # One of them generated it, the other found it made.
    lens = [sum(map(len, p.chunks[1:-1])) for p in prompts]
    made = sum(answer.reuse.generated_tokens for answer in answers)
    assert made == sum(lens) - len(wanted)


def test_one_chunk_twice_in_a_prompt(harness: Harness) -> None:
    prompt = random_prompt(425, LENS).reordered([0, 3, 1, 3, 2, 3, 6])
    cold, layout = harness.run(prompt.chunks)
    harness.check(cold, layout)
    assert cold.reuse.generated_tokens == 301 + 129 + 163
    harness.engine.clear_prefix_cache()
    warm, _ = harness.run(prompt.chunks)
    harness.check(warm, layout)
    assert warm.reuse.hit_tokens == prompt.prompt_len - 23


@pytest.mark.parametrize("warm", [False, True])
def test_identical_prompts_at_once(harness: Harness, warm: bool) -> None:
    prompt = random_prompt(430 + warm, LENS)
    if warm:
        harness.run(prompt.chunks, max_tokens=1)
    answers = harness.batch([as_prompt(prompt)] * 5, **OPTIONS)
    for answer in answers:
        check(harness, prompt, answer)
    documents_len = sum(LENS[1:-1])
    generated = [answer.reuse.generated_tokens for answer in answers]
    assert sum(generated) == (0 if warm else documents_len)


def test_an_empty_batch(harness: Harness) -> None:
    assert harness.engine.generate_batch([]) == []


def test_from_several_threads(harness: Harness) -> None:
    prompts = [random_prompt(440 + i, LENS) for i in range(6)]

    def ask(prompt: Prompt) -> Completion:
        if prompt.chunks[0][0] % 2:
            return harness.engine.generate(as_prompt(prompt), **OPTIONS)
        *_, last = harness.engine.stream(as_prompt(prompt), **OPTIONS)
        assert last.completion is not None
        return last.completion

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        check(harness, prompt, answer)


async def test_streams_from_several_tasks(harness: Harness) -> None:
    prompts = [random_prompt(450 + i, LENS) for i in range(3)]

    async def ask(prompt: Prompt) -> tuple[list[Delta], Completion]:
        deltas = [d async for d in harness.engine.astream(as_prompt(prompt), **OPTIONS)]
        assert deltas[-1].completion is not None
        return deltas, deltas[-1].completion

    for prompt, (deltas, answer) in zip(
        prompts, await asyncio.gather(*map(ask, prompts)), strict=True
    ):
        assert "".join(delta.text for delta in deltas) == answer.text
        check(harness, prompt, answer)


# ----------------------------------------------------------------------------- aborts


def healthy(harness: Harness, seed: int) -> None:
    """No request is left, every block is free, and the next answer is right."""
    check_nothing_is_left(harness)
    prompt = random_prompt(seed, LENS)
    answer, layout = harness.run(prompt.chunks)
    harness.check(answer, layout)


@pytest.mark.parametrize("num_taken", [0, 1, 5])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_ending_a_stream_aborts_it(harness: Harness, num_taken: int, how: str) -> None:
    deltas = harness.engine.stream(as_prompt(random_prompt(460, LENS)), **LONG)
    for _ in range(num_taken):
        next(deltas)
    if how == "close":
        deltas.close()
        assert list(deltas) == []
    else:
        del deltas
        gc.collect()
    healthy(harness, 461)


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.3])
async def test_cancelling_a_task_aborts_it(harness: Harness, after_s: float) -> None:
    prompts = [random_prompt(465 + i, LENS) for i in range(3)]
    tasks = [
        asyncio.create_task(harness.engine.agenerate(as_prompt(p), **LONG))
        for p in prompts
    ]
    await asyncio.sleep(after_s)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await asyncio.to_thread(healthy, harness, 468)


async def test_leaving_an_async_stream_aborts_it(harness: Harness) -> None:
    stream = harness.engine.astream(as_prompt(random_prompt(470, LENS)), **LONG)
    async for delta in stream:
        if delta.token_ids:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    await asyncio.to_thread(healthy, harness, 471)


async def test_others_go_on_when_one_is_aborted(harness: Harness) -> None:
    kept, ended = random_prompt(472, LENS), random_prompt(473, LENS)
    tasks = [
        asyncio.create_task(harness.engine.agenerate(as_prompt(prompt), **options))
        for prompt, options in ((kept, OPTIONS), (ended, LONG), (kept, OPTIONS))
    ]
    await asyncio.sleep(0.05)
    tasks[1].cancel()
    first, _, second = await asyncio.gather(*tasks, return_exceptions=True)
    for answer in (first, second):
        assert isinstance(answer, Completion)
        check(harness, kept, answer)
    await asyncio.to_thread(healthy, harness, 474)


# ---------------------------------------------------------------------- conversations


def test_a_second_turn_takes_the_first_ones_blocks(harness: Harness) -> None:
    """Block by block the KV of turn 1; behind it turn 2 as if alone.

    Turn 2's recompute set is selected for its own chunks and loses what lies in the
    prefix (lazy acceptance): the prefix keeps what turn 1 made of it.
    """
    turn = random_prompt(480, (45, 150, 170, 30))
    first, layout = harness.run(turn.chunks, conversation="talk")
    harness.check(first, layout)

    added = random_chunks(481, (160, 140, 25), 512)
    answered: TokenIds = first.token_ids
    longer = Prompt((*turn.chunks, answered, *added))
    second, layout2 = harness.run(longer.chunks, conversation="talk")
    prefix_len = second.reuse.gpu_prefix_tokens
    block_size = harness.engine.block_size
    # The last answered token was never computed in turn 1.
    held = turn.prompt_len + len(answered) - 1
    assert prefix_len == held // block_size * block_size

    past = harness.cache_after(first, layout)
    harness.check(second, layout2, prefix=past.between(0, prefix_len))
    # Another conversation does not see them.
    other, _ = harness.run(longer.chunks, conversation="another talk")
    assert other.reuse.gpu_prefix_tokens == 0
    harness.check(other, layout2)


# --------------------------------------------------------------------------- closing


@pytest.fixture
def open_engine(
    no_engine: None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> Callable[[], EmbeddedEngine]:
    assert own_threads() == set()
    return lambda: EmbeddedEngine(
        str(tiny_model(KIND)),
        store=tmp_path / "store",
        dtype="float32",
        max_model_len=4096,
    )


async def test_closing_with_requests_in_flight(
    open_engine: Callable[[], EmbeddedEngine],
) -> None:
    engine = open_engine()
    prompt = as_prompt(random_prompt(490, LENS))
    tasks = [
        asyncio.create_task(engine.agenerate(prompt, reuse=mode, **LONG))
        for mode in ("daric", "off", "daric")
    ]
    stream = engine.stream(prompt, **LONG)
    assert next(stream).token_ids
    waiting = asyncio.create_task(asyncio.to_thread(engine.generate, prompt, **LONG))
    while len(engine._loop._streams) < 5:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(engine.close)
    for result in await asyncio.gather(*tasks, waiting, return_exceptions=True):
        assert isinstance(result, EngineClosedError)
    with pytest.raises(EngineClosedError):
        list(stream)
    assert own_threads() == set()
    await use_after_close(engine, prompt)
    # What was computed before the end is on disk, and the process is free again.
    with open_engine() as reopened:
        answer = reopened.generate(prompt, max_tokens=1)
        assert answer.reuse.hit_tokens == sum(LENS[:-1])
    assert own_threads() == set()


async def use_after_close(engine: EmbeddedEngine, prompt: TokenPrompt) -> None:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: engine.generate(prompt),
        lambda: engine.generate_batch([prompt]),
        lambda: engine.stream(prompt),
        lambda: engine.prewarm(["A document."]),
        engine.flush,
        engine.store_stats,
        engine.clear_host,
        engine.clear_prefix_cache,
    )
    for call in calls:
        with pytest.raises(EngineClosedError, match="open a new EmbeddedEngine"):
            call()
    with pytest.raises(EngineClosedError, match="open a new EmbeddedEngine"):
        await engine.agenerate(prompt)
    # These need no engine.
    assert engine.layout(prompt).prompt_len == sum(LENS)
    engine.close()
    with engine:
        pass


def test_an_engine_that_is_dropped_is_closed(
    open_engine: Callable[[], EmbeddedEngine],
) -> None:
    engine = open_engine()
    engine.generate(as_prompt(random_prompt(491, LENS)), max_tokens=1)
    del engine
    gc.collect()
    assert own_threads() == set()
    # Not for long, but another one can be opened at once.
    with open_engine():
        pass


def test_a_failing_step_ends_every_request_and_leaves_the_process_usable(
    open_engine: Callable[[], EmbeddedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from daric_rag.errors import EngineError

    prompt = as_prompt(random_prompt(492, LENS))
    engine = open_engine()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the kernel is out of order")

    engine._loop.call(lambda vllm: monkeypatch.setattr(vllm, "step", broken))
    with pytest.raises(EngineError, match="out of order"):
        engine.generate_batch([prompt, prompt])
    with pytest.raises(EngineClosedError, match="out of order"):
        engine.generate(prompt)
    engine.close()
    assert own_threads() == set()
    with open_engine() as reopened:
        assert reopened.generate(prompt, max_tokens=1).token_ids
