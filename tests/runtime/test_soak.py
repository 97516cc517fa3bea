"""Many requests at once and in turn, over a store that fails: no wrong token.

Everything is drawn from a seed, but for the moments at which things happen::

    DARIC_SOAK_SEED=7,8 DARIC_SOAK_REQUESTS=2000 pytest tests/runtime/test_soak.py
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from daric_rag import DaricConfig
from tests.reference.dense import DenseReference
from tests.reference.prompts import random_prompt
from tests.runtime.harness import Harness, own_threads
from tests.runtime.soak import Damage, Flaky, Storm
from tests.runtime.soak_asks import Ask, draw_asks, draw_documents
from tests.runtime.soak_oracle import Oracle

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
SEEDS = [int(seed) for seed in os.environ.get("DARIC_SOAK_SEED", "1").split(",")]
NUM_REQUESTS = int(os.environ.get("DARIC_SOAK_REQUESTS", "800"))
TOKEN_BYTES = 2048
BLOCK_BYTES = 32 * TOKEN_BYTES
# 24 blocks beside the null block: eight prompts of average length, or the longest
# one and a document.
ENGINE: dict[str, Any] = {
    "max_model_len": 640,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 12,
    "kv_cache_memory_bytes": 25 * BLOCK_BYTES,
}
# About a quarter and a half of the pool.
CONFIG = DaricConfig(
    avg_chunk_budget=8,
    max_segment_len=64,
    host_bytes=500 * TOKEN_BYTES,
    disk_bytes=1000 * TOKEN_BYTES,
)
# Of all requests; see the oracle.
MAX_TIES = 0.01


def scheduler_of(harness: Harness) -> Any:
    return harness.engine._loop.call(
        lambda vllm: vllm.engine_core.engine_core.scheduler
    )


def num_free_blocks(harness: Harness) -> int:
    pool = scheduler_of(harness).kv_cache_manager.block_pool
    return int(pool.get_num_free_blocks())


def check_nothing_left(harness: Harness, num_free: int) -> None:
    """Nobody knows any request, every block is free, and no record is protected."""
    assert not scheduler_of(harness).requests
    assert num_free_blocks(harness) == num_free
    assert not harness.spy_tracked()
    scratch = harness.scheduler_side(lambda side: side._scratch)
    assert (scratch.block_ids, scratch.held_block_ids) == ((), ())
    saving = harness.scheduler_side(lambda side: side._saving)
    assert not saving._waiting
    assert not harness.scheduler_side(lambda side: side._filling)
    queue = harness.spy.side._queue
    assert not queue._jobs
    assert not queue._generations.entries()
    store = harness.spy.side.store
    assert not any(store.host._index._table.holds)
    assert not store.disk._catalog._held


@pytest.fixture
def harness(
    no_engine: None,
    tiny_model: Callable[[str], Path],
    reference_of: Callable[[str], DenseReference],
    tmp_path: Path,
) -> Iterator[Harness]:
    """An engine with little of everything, closed by the test itself."""
    assert own_threads() == set()
    num_threads = torch.get_num_threads()
    harness = Harness(
        tiny_model(KIND),
        reference_of(KIND),
        config=CONFIG,
        store=str(tmp_path / "store"),
        **ENGINE,
    )
    # Tiny matrices gain nothing from threads, and on a busy machine lose much.
    harness.on_worker(lambda _: torch.set_num_threads(1))
    torch.set_num_threads(1)
    yield harness
    harness.close()
    torch.set_num_threads(num_threads)


def ran(
    harness: Harness,
    storm: Storm,
    asks: Sequence[Ask],
    flaky: Flaky,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sends the storm to an engine whose store fails meanwhile."""
    scheduler, store = scheduler_of(harness), harness.spy.side.store
    preempt = scheduler._preempt_request

    def noted(request: Any, *args: Any, **options: Any) -> None:
        storm.note_preemption(request)
        preempt(request, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_preempt_request", noted)
        patch.setattr(store, "write", flaky(store.write))
        patch.setattr(store, "read_many", flaky(store.read_many))
        asyncio.run(storm.run(asks))
        harness.engine.flush()


def replayed(seed: int, what: object, detail: object) -> str:
    return (
        f"{what}; {detail}; replay with DARIC_SOAK_SEED={seed} "
        f"DARIC_SOAK_REQUESTS={NUM_REQUESTS}"
    )


def check_answers(oracle: Oracle, storm: Storm, seed: int) -> None:
    """Each of them, and if one is wrong, everything that tells why."""
    # Turns in their order, then whatever can be told by a longer answer behind it.
    answers = sorted(
        storm.answers,
        key=lambda a: (a.talk is None, -a.ask.max_tokens if a.talk is None else 0),
    )
    for answer in answers:
        try:
            oracle.check(answer)
        except AssertionError as error:
            pytest.fail(replayed(seed, error, answer))


@pytest.mark.parametrize("seed", SEEDS)
def test_soak(
    harness: Harness,
    seed: int,
    reference_of: Callable[[str], DenseReference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_free = num_free_blocks(harness)
    damage, flaky = Damage(tmp_path / "store", seed), Flaky(seed, probability=0.01)
    storm = Storm(harness, draw_documents(seed), damage)
    ran(harness, storm, draw_asks(seed, NUM_REQUESTS), flaky, monkeypatch)
    for ask, error in storm.errors:
        pytest.fail(replayed(seed, repr(error), ask))
    check_nothing_left(harness, num_free)

    oracle = Oracle(reference_of(KIND), harness)
    check_answers(oracle, storm, seed)

    # The store works again, as far as it has room for a new prompt's documents.
    prompt = random_prompt(seed, (20, 90, 100, 15))
    for _ in range(2):
        harness.engine.clear_prefix_cache()
        answer, layout = harness.run(prompt.chunks)
        harness.check(answer, layout)
    assert answer.reuse.hit_tokens > 0

    assert len(storm.answers) + storm.num_aborted == NUM_REQUESTS
    assert oracle.num_ties <= MAX_TIES * NUM_REQUESTS
    check_it_was_a_storm(harness, storm, flaky, oracle)
    assert not [one for one in caplog.records if one.levelno > logging.WARNING]
    harness.close()
    assert own_threads() == set()


def check_it_was_a_storm(
    harness: Harness, storm: Storm, flaky: Flaky, oracle: Oracle
) -> None:
    """Everything that was to happen did happen."""
    stats = harness.engine.store_stats()
    assert stats.disk is not None
    happened = {
        "preemptions": len(storm.preempted),
        "aborts": storm.num_aborted,
        "turns with a prefix": oracle.num_prefixed,
        "evictions from memory": stats.host.evicted,
        "evictions from disk": stats.disk.evicted,
        "hits on disk": stats.disk.hits,
        "damaged records": stats.disk.corrupt,
        "failed calls": flaky.num_failures,
    }
    assert all(happened.values()), happened
