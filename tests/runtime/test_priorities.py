"""Who is scheduled first when not all can be; everybody's answer is the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from daric_rag import Completion
from daric_rag.errors import ConfigError
from tests.reference.dense import DenseReference
from tests.reference.prompts import Prompt, random_chunks, random_prompt
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import Harness, check_continuation, finished
from tests.runtime.pressure import (
    TIGHT,
    as_prompt,
    check_drawn,
    check_nothing_is_left,
    note_preemptions,
    scheduler_of,
)

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
OPTIONS: dict[str, Any] = {"logprobs": 20, "ignore_eos": True}


@pytest.fixture
def tight(harness_of: HarnessPool) -> Harness:
    """A prompt with more than 64 tokens to compute waits until they are."""
    return harness_of(
        KIND, **TIGHT, scheduling_policy="priority", max_num_batched_tokens=256
    )


class Answers:
    """What was answered, in the order in which it was."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.order: list[str] = []
        self._prompts: dict[str, Prompt] = {}
        self._tasks: dict[str, asyncio.Task[Completion]] = {}

    def ask(self, name: str, prompt: Prompt, **options: Any) -> None:
        self._prompts[name] = prompt
        self._tasks[name] = asyncio.create_task(self._ask(name, OPTIONS | options))

    async def _ask(self, name: str, options: dict[str, Any]) -> Completion:
        prompt = as_prompt(self._prompts[name])
        answer = await self.harness.engine.agenerate(prompt, **options)
        self.order.append(name)
        return answer

    async def until(self, num_running: int) -> None:
        """Returns once so many requests are running, and none of them is over."""
        scheduler = scheduler_of(self.harness)
        async with asyncio.timeout(30):
            while len(scheduler.running) < num_running:
                await asyncio.sleep(0.001)
        assert not self.order, "too late: lengthen the answers"

    async def check(self) -> None:
        """All are answered, and right."""
        for name, task in self._tasks.items():
            check_drawn(self.harness, self._prompts[name], await task)
        await asyncio.to_thread(check_nothing_is_left, self.harness)


async def test_a_later_request_of_a_lower_priority_value_is_answered_first(
    tight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long answers fill the cache; what is preempted waits behind the urgent one."""
    preempted = note_preemptions(tight, monkeypatch)
    answers = Answers(tight)
    for index in range(4):
        prompt = random_prompt(800 + index, (20, 90, 100, 15))
        answers.ask(f"low {index}", prompt, max_tokens=180, priority=5)
    await answers.until(4)
    urgent = random_prompt(810, (20, 90, 60, 10))
    answers.ask("high", urgent, max_tokens=21, priority=-1)
    await answers.check()
    assert answers.order[0] == "high"
    assert preempted, "nothing was preempted: the test is too small"


async def test_among_equals_the_first_comes_first(tight: Harness) -> None:
    """One has the cache to itself, the others wait for it."""
    answers = Answers(tight)
    for index in range(4):
        prompt = random_prompt(820 + index, (20, 300, 290, 15))
        answers.ask(f"{index}", prompt, max_tokens=21, priority=3)
        await asyncio.sleep(0.02)
    await answers.check()
    assert answers.order == ["0", "1", "2", "3"]


@pytest.mark.parametrize("stored", [False, True])
async def test_requests_that_wait_hold_no_urgent_one_back(
    tight: Harness, stored: bool
) -> None:
    """Cold low ones each need most of the cache; the urgent one is third at latest."""
    urgent = random_prompt(830 + stored, (20, 290, 280, 15))
    if stored:
        tight.store(urgent.chunks[:-1])
    answers = Answers(tight)
    for index in range(5):
        prompt = random_prompt(840 + 10 * stored + index, (20, 300, 290, 15))
        answers.ask(f"low {index}", prompt, max_tokens=120, priority=1)
    await answers.until(1)
    answers.ask("high", urgent, max_tokens=21)
    await answers.check()
    assert answers.order.index("high") == 1


async def test_an_urgent_ordinary_request_overtakes_too(
    tight: Harness, reference_of: Callable[[str], DenseReference]
) -> None:
    answers = Answers(tight)
    for index in range(4):
        prompt = random_prompt(860 + index, (20, 300, 290, 15))
        answers.ask(f"low {index}", prompt, max_tokens=120, priority=1)
    await answers.until(1)
    urgent = random_prompt(870, (20, 300, 290, 15))
    options = OPTIONS | {"max_tokens": 21, "reuse": "off"}
    answer = await tight.engine.agenerate(as_prompt(urgent), **options)
    assert len(answers.order) == 1
    check_continuation(answer, reference_of(KIND).full_greedy(urgent.token_ids, 21))
    await answers.check()


async def test_several_answers_of_a_priority(tight: Harness) -> None:
    """Each is a request of its own to vLLM, and all go before what waits."""
    answers = Answers(tight)
    for index in range(3):
        prompt = random_prompt(880 + index, (20, 300, 290, 15))
        answers.ask(f"low {index}", prompt, max_tokens=120, priority=1)
    await answers.until(1)
    urgent = random_prompt(890, (20, 90, 100, 15))
    options = OPTIONS | {"max_tokens": 21, "temperature": 1.0}
    answer = await tight.engine.agenerate(as_prompt(urgent), n=3, **options)
    assert len(answers.order) <= 1
    for drawn in answer.answers:
        check_drawn(tight, urgent, drawn)
    await answers.check()


@pytest.mark.parametrize("seed", range(2))
def test_a_busy_engine_with_priorities(
    tight: Harness, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Shared documents, several answers, waiting, preemption and aborts at once."""
    preempted = note_preemptions(tight, monkeypatch)
    draw = random.Random(seed)
    lens = [draw.randrange(1, 160) for _ in range(8)]
    documents = random_chunks(1900 + seed, lens, 512)
    prompts, streams = [], []
    with tight.together():
        for index in range(15):
            chosen = draw.choices(documents, k=draw.randrange(1, 5))
            asked = 1920 + 100 * seed + index
            question = random_chunks(asked, [draw.randrange(1, 60)], 512)
            prompts.append(Prompt((*chosen, *question)))
            options = {
                "max_tokens": draw.randrange(1, 110),
                "priority": draw.randrange(-2, 3),
                "n": draw.choice((1, 1, 3)),
                "temperature": 1.0,
            }
            stream = tight.engine.stream(as_prompt(prompts[-1]), **OPTIONS, **options)
            streams.append(stream)
    for stream in streams[::6]:
        next(stream, None)
        stream.close()
    for index, stream in enumerate(streams):
        if index % 6:
            for answer in finished(stream).answers:
                check_drawn(tight, prompts[index], answer)
    assert preempted, "nothing was preempted: the test is too small"
    check_nothing_is_left(tight)


def test_priorities_are_refused_where_vllm_would_ignore_them(
    harness_of: HarnessPool,
) -> None:
    harness = harness_of(KIND)
    prompt = as_prompt(random_prompt(895, (20, 90, 15)))
    steps = len(harness.spy.plans)
    for call in (harness.engine.generate, harness.engine.stream):
        with pytest.raises(
            ConfigError, match=r'open it .*scheduling_policy="priority"'
        ):
            call(prompt, priority=1)
    assert len(harness.spy.plans) == steps
    assert harness.engine.generate(prompt, priority=0, max_tokens=1).token_ids
