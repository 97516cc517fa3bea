"""A disk that is slow or hangs: only who reads from it waits, and not for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from daric_rag import Completion, TokenPrompt
from tests.reference.prompts import Prompt, random_chunks, random_prompt
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import NUM_TOKENS, Harness, finished

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
LENS = (37, 300, 290, 310, 23)
OPTIONS: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "logprobs": 20,
    "ignore_eos": True,
}


class SlowDisk:
    """Makes an engine's disk answer only when it is told to."""

    def __init__(self, harness: Harness) -> None:
        self.go = threading.Event()
        self.num_reads = 0
        self._disk = harness.on_worker(lambda worker: worker._side.store.disk)
        self._read_many = self._disk.read_many
        self._disk.read_many = self.read_many

    def read_many(self, keys: Sequence[bytes], fingerprint: bytes) -> Any:
        self.num_reads += 1
        self.go.wait(60)
        return self._read_many(keys, fingerprint)

    def mend(self) -> None:
        self.go.set()
        self._disk.read_many = self._read_many


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("slow") / "store")


@pytest.fixture
def harness(harness_of: HarnessPool, folder: str) -> Harness:
    return harness_of(KIND, store=folder)


@pytest.fixture
def slow_down(harness: Harness) -> Iterator[Callable[[float], SlowDisk]]:
    """Slows the disk down; takes what computing a token is to be thought to take."""
    disks: list[SlowDisk] = []

    def slow(token_s: float) -> SlowDisk:
        harness.on_worker(
            lambda worker: setattr(worker._side._pace, "_token_s", token_s)
        )
        disks.append(SlowDisk(harness))
        return disks[-1]

    yield slow
    for disk in disks:
        disk.mend()


def as_prompt(prompt: Prompt) -> TokenPrompt:
    return TokenPrompt([list(chunk) for chunk in prompt.chunks])


def check(harness: Harness, prompt: Prompt, answer: Completion) -> None:
    harness.check(answer, harness.engine.layout(as_prompt(prompt)), kv=False)


def stored(harness: Harness, seed: int) -> Prompt:
    """A prompt whose documents are on disk and nowhere else."""
    prompt = random_prompt(seed, LENS)
    harness.run(prompt.chunks, max_tokens=1)
    harness.engine.flush()
    harness.engine.clear_host()
    harness.engine.clear_prefix_cache()
    return prompt


def running(harness: Harness, seed: int) -> Any:
    """Another client's answer, that has begun."""
    (ids,) = random_chunks(seed, (40,), 512)
    options = OPTIONS | {"max_tokens": 2000, "reuse": "off"}
    stream = harness.engine.stream(TokenPrompt([list(ids)]), **options)
    next(stream)
    return stream


def test_alone_it_reads_within_its_step(harness: Harness) -> None:
    prompt = stored(harness, 800)
    answer, layout = harness.run(prompt.chunks)
    harness.check(answer, layout)
    assert answer.reuse.hit_tokens == sum(LENS[:-1])
    admitting = next(plan for plan in reversed(harness.spy.plans) if plan.requests)
    assert not admitting.requests[0].asynchronous


def test_others_go_on_while_it_reads(
    harness: Harness, slow_down: Callable[[float], SlowDisk]
) -> None:
    prompt = stored(harness, 801)
    disk = slow_down(1.0)
    other = running(harness, 802)
    waiting = harness.engine.stream(as_prompt(prompt), **OPTIONS)
    for _ in range(50):
        assert next(other).token_ids
    assert disk.num_reads
    disk.mend()
    answer = finished(waiting)
    other.close()
    check(harness, prompt, answer)
    assert answer.reuse.hit_tokens == sum(LENS[:-1])
    assert answer.reuse.reason == ""


@pytest.mark.parametrize("beside_others", [False, True])
def test_what_would_be_computed_sooner_is_computed(
    harness: Harness, slow_down: Callable[[float], SlowDisk], beside_others: bool
) -> None:
    """A disk that hangs costs a moment, and the answer says what is wrong with it."""
    prompt = stored(harness, 810 + beside_others)
    slow_down(1e-4)
    others = [running(harness, 815)] if beside_others else []
    started_s = time.perf_counter()
    answer, layout = harness.run(prompt.chunks, trace=True)
    assert time.perf_counter() - started_s < 10
    for other in others:
        other.close()
    harness.check(answer, layout, kv=not beside_others)
    assert answer.reuse.hit_tokens == 0
    assert answer.reuse.generated_tokens == sum(LENS[:-1])
    assert "slower than computing" in answer.reuse.reason
    assert answer.trace is not None
    assert [chunk.kind for chunk in answer.trace.chunks[:-1]] == ["generated"] * 4
    # The documents are in memory now, and were never forgotten on disk.
    harness.engine.clear_prefix_cache()
    again, _ = harness.run(prompt.chunks)
    assert again.reuse.hit_tokens == sum(LENS[:-1])


def test_aborted_while_it_reads(
    harness: Harness, slow_down: Callable[[float], SlowDisk]
) -> None:
    prompt = stored(harness, 820)
    scheduler = harness.engine._loop.facts.engine.engine_core.engine_core.scheduler
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    disk = slow_down(1.0)
    other = running(harness, 821)
    waiting = harness.engine.stream(as_prompt(prompt), **OPTIONS)
    while not disk.num_reads:
        next(other)
    waiting.close()
    for _ in range(10):
        next(other)
    other.close()
    deadline_s = time.monotonic() + 5
    while scheduler.requests and time.monotonic() < deadline_s:
        time.sleep(0.01)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == free
    disk.mend()
    answer, layout = harness.run(prompt.chunks)
    harness.check(answer, layout)
