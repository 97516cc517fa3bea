"""Approximate blocks never reach an ordinary request, nor another tenant or cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daric_rag import Completion, DaricConfig, EmbeddedEngine, TokenPrompt
from daric_rag.wire import RequestWire, salt_of
from tests.reference.dense import DenseReference
from tests.reference.prompts import Prompt, TokenIds, random_prompt
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import NUM_TOKENS, Harness, check_continuation

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
LENS = (37, 129, 163, 301, 132, 195, 23)
OPTIONS = {"max_tokens": NUM_TOKENS, "logprobs": 20, "ignore_eos": True}
SEEDS = range(100, 104)

Answer = tuple[tuple[int, ...], tuple[dict[int, float], ...]]


@pytest.fixture
def harness(harness_of: HarnessPool) -> Harness:
    return harness_of(KIND)


def exact(completion: Completion) -> Answer:
    """Tokens and log-probabilities, to be compared bit for bit."""
    assert completion.logprobs is not None
    return completion.token_ids, completion.logprobs


@pytest.fixture(scope="module")
def plain_vllm(
    tiny_model: Callable[[str], Path], harness_of: HarnessPool
) -> dict[int, Answer]:
    """What vLLM says by itself, with neither our worker nor our connector."""
    harness_of.close()
    with _plain_engine(tiny_model(KIND)) as llm:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=NUM_TOKENS, logprobs=20, ignore_eos=True
        )
        answers: dict[int, Answer] = {}
        # One at a time and in another order than the tests: nothing is shared.
        for seed in reversed(SEEDS):
            ids = list(random_prompt(seed, LENS).token_ids)
            (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
            part = output.outputs[0]
            answers[seed] = (
                tuple(part.token_ids),
                tuple({t: e.logprob for t, e in p.items()} for p in part.logprobs),
            )
    return answers


@contextmanager
def _plain_engine(model: Path) -> Iterator[Any]:
    from daric_rag.runtime.vllm_api import quiet, release_process_state

    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        llm = LLM(
            str(model),
            dtype="float32",
            max_model_len=4096,
            block_size=32,
            enforce_eager=True,
            max_num_batched_tokens=8192,
            max_num_seqs=128,
            kv_cache_memory_bytes=64 * 2**20,
            async_scheduling=False,
            disable_log_stats=True,
        )
        yield llm
        llm.llm_engine.engine_core.shutdown()
        del llm
        release_process_state()


def test_off_after_daric_is_plain_vllm_bit_for_bit(
    plain_vllm: dict[int, Answer],
    harness: Harness,
    reference_of: Callable[[str], DenseReference],
) -> None:
    prompt = random_prompt(SEEDS[0], LENS)
    daric, _ = harness.run(prompt.chunks)
    off, _ = harness.run(prompt.chunks, reuse="off")
    assert exact(off) == plain_vllm[SEEDS[0]]
    assert off.reuse.gpu_prefix_tokens == 0
    full = reference_of(KIND).full_greedy(prompt.token_ids, NUM_TOKENS)
    check_continuation(off, full)
    # Or the test could not see a leak.
    assert exact(daric) != exact(off)
    # It has blocks of its own from now on, and they are exact as well.
    again, _ = harness.run(prompt.chunks, reuse="off")
    assert again.reuse.gpu_prefix_tokens > 0
    check_continuation(again, full)


def test_daric_after_off_takes_no_exact_blocks(
    plain_vllm: dict[int, Answer], harness: Harness
) -> None:
    prompt = random_prompt(SEEDS[1], LENS)
    off, _ = harness.run(prompt.chunks, reuse="off")
    assert exact(off) == plain_vllm[SEEDS[1]]
    daric, layout = harness.run(prompt.chunks)
    assert daric.reuse.gpu_prefix_tokens == 0
    harness.check(daric, layout)


async def test_interleaved_in_one_batch(
    plain_vllm: dict[int, Answer],
    harness: Harness,
    reference_of: Callable[[str], DenseReference],
) -> None:
    """A batch of another shape rounds differently: within tolerance here."""
    prompts = [random_prompt(seed, LENS) for seed in SEEDS[2:]]
    modes = ("daric", "off", "full_reuse", "off", "daric")
    answers = await asyncio.gather(
        *(
            harness.engine.agenerate(as_prompt(prompt), reuse=mode, **OPTIONS)
            for mode in modes
            for prompt in prompts
        )
    )
    assert max(len(p.requests) for p in harness.spy.plans) > 1, "nothing was batched"
    reference = reference_of(KIND)
    for index, answer in enumerate(answers):
        mode, prompt = modes[index // 2], prompts[index % 2]
        layout = harness.engine.layout(as_prompt(prompt))
        if mode == "off":
            full = reference.full_greedy(prompt.token_ids, NUM_TOKENS)
            check_continuation(answer, full)
            assert answer.token_ids == plain_vllm[SEEDS[2 + index % 2]][0]
        elif mode == "daric":
            harness.check(answer, layout, kv=False)
        else:
            question = [layout.spans[-1]]
            expected = reference.greedy(
                prompt.token_ids, layout.spans, question, NUM_TOKENS
            )
            check_continuation(answer, expected)


@pytest.mark.parametrize("mode", ["daric", "full_reuse"])
def test_a_repeated_request_takes_its_own_blocks(harness: Harness, mode: str) -> None:
    prompt = random_prompt(105 if mode == "daric" else 106, LENS)
    first, _ = harness.run(prompt.chunks, reuse=mode)
    second, _ = harness.run(prompt.chunks, reuse=mode)
    assert first.reuse.gpu_prefix_tokens == 0
    block_size = harness.engine.block_size
    assert second.reuse.gpu_prefix_tokens == (sum(LENS) - 1) // block_size * block_size
    assert second.reuse.generated_tokens == second.reuse.hit_tokens == 0
    assert second.token_ids == first.token_ids


def test_modes_share_no_blocks(harness: Harness) -> None:
    prompt = random_prompt(107, LENS)
    for mode in ("daric", "full_reuse", "off"):
        answer, _ = harness.run(prompt.chunks, reuse=mode)
        assert answer.reuse.gpu_prefix_tokens == 0, mode


def test_another_cut_of_the_same_tokens_shares_no_blocks(harness: Harness) -> None:
    prompt = random_prompt(108, LENS)
    first, second, *rest = prompt.chunks
    joined = Prompt((first + second, *rest))
    assert joined.token_ids == prompt.token_ids
    harness.run(prompt.chunks)
    answer, layout = harness.run(joined.chunks)
    assert answer.reuse.gpu_prefix_tokens == 0
    harness.check(answer, layout)


def test_a_conversation_cut_anew_does_not_spoil_the_store(harness: Harness) -> None:
    """Its own prefix may be approximate; what it saves must not be.

    A client that names one conversation but sends the earlier turn as a single chunk
    takes approximate blocks where its first chunk should be exact. Nobody else may
    ever load those.
    """
    turn = random_prompt(109, (150, 140, 160, 30))
    merged: TokenIds = turn.token_ids
    question: TokenIds = (31, 32, 33, 34)
    harness.run(turn.chunks, conversation="chat", max_tokens=1)
    second, _ = harness.run((merged, question), conversation="chat", max_tokens=1)
    assert second.reuse.gpu_prefix_tokens > 300
    harness.engine.clear_prefix_cache()
    for chunks in ((merged, question), ((17, 18), merged, question)):
        answer, layout = harness.run(chunks)
        harness.check(answer, layout)


WIRE = RequestWire(
    ends=(100, 200, 230),
    reusable=(True, True, False),
    mode="daric",
    config=DaricConfig(),
)
OTHER_WIRES = {
    "namespace": replace(WIRE, config=DaricConfig(namespace="other")),
    "policy": replace(WIRE, config=DaricConfig(policy="equal")),
    "budget": replace(WIRE, config=DaricConfig(avg_chunk_budget=33)),
    "ratio": replace(WIRE, config=DaricConfig(initial_ratio=0.2)),
    "mtaf": replace(WIRE, config=DaricConfig(mtaf="exp")),
    "alignment": replace(WIRE, config=DaricConfig(alignment="block")),
    "mode": replace(WIRE, mode="full_reuse"),
    "cut": replace(WIRE, ends=(100, 201, 230)),
    "reusable": replace(WIRE, reusable=(True, False, False)),
}


def chat(wire: RequestWire) -> RequestWire:
    return replace(wire, conversation="chat")


@pytest.mark.parametrize("name", OTHER_WIRES)
def test_whatever_changes_the_kv_changes_the_salt(name: str) -> None:
    assert salt_of(OTHER_WIRES[name]) != salt_of(WIRE)
    if name not in ("cut", "reusable"):
        assert salt_of(chat(OTHER_WIRES[name])) != salt_of(chat(WIRE))
    assert salt_of(chat(OTHER_WIRES[name])) != salt_of(OTHER_WIRES[name])


# ------------------------------------------------------------- tenants and restarts


@pytest.mark.usefixtures("no_engine")
def test_namespaces_share_a_folder_and_nothing_else(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    prompt = as_prompt(random_prompt(110, LENS))
    store = tmp_path / "store"

    @contextmanager
    def opened(namespace: str) -> Iterator[EmbeddedEngine]:
        with EmbeddedEngine(
            str(tiny_model(KIND)),
            store=store,
            config=DaricConfig(namespace=namespace),
            dtype="float32",
            max_model_len=4096,
        ) as engine:
            yield engine

    with opened("one") as engine:
        first = engine.generate(prompt, **OPTIONS)
        assert first.reuse.saved_tokens == sum(LENS[:-1])
    with opened("two") as engine:
        foreign = engine.generate(prompt, **OPTIONS)
        assert foreign.reuse.hit_tokens == 0
        assert foreign.reuse.generated_tokens == sum(LENS[1:-1])
        assert foreign.reuse.reason
    with opened("one") as engine:
        assert engine.store_stats().host.num_records == 0
        again = engine.generate(prompt, **OPTIONS)
        stats = engine.store_stats()
        assert again.reuse.hit_tokens == sum(LENS[:-1])
        assert again.reuse.generated_tokens == again.reuse.saved_tokens == 0
        assert stats.disk is not None
        assert stats.promoted == stats.disk.hits > 0
    for answer in (foreign, again):
        assert answer.token_ids == first.token_ids
        for mine, theirs in zip(*map(logprobs, (answer, first)), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


def logprobs(completion: Completion) -> tuple[dict[int, float], ...]:
    assert completion.logprobs is not None
    return completion.logprobs


def as_prompt(prompt: Prompt) -> TokenPrompt:
    return TokenPrompt([list(chunk) for chunk in prompt.chunks])


def test_a_foreign_salt_is_not_served(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever chose the salt freely could pass off one layout's blocks as another's."""
    prompt = random_prompt(81, (37, 129, 163, 23))
    monkeypatch.setattr("daric_rag.runtime.request_stream.salt_of", lambda wire: "mine")
    completion, layout = harness.run(prompt.chunks)
    assert "cache_salt" in completion.reuse.reason
    assert completion.reuse.hit_tokens == completion.reuse.saved_tokens == 0
    check_continuation(
        completion, harness.reference.full_greedy(layout.token_ids, NUM_TOKENS)
    )


@pytest.mark.usefixtures("no_engine")
def test_nothing_is_reused_once_weights_may_be_others(
    tiny_model: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The store's records are of the weights that the engine started with."""
    prompt = as_prompt(random_prompt(82, (37, 129, 163, 23)))
    model, fields = str(tiny_model(KIND)), {"dtype": "float32", "max_model_len": 4096}
    with EmbeddedEngine(model, store=":memory:", **fields) as engine:
        first = engine.generate(prompt, **OPTIONS)
        assert first.reuse.saved_tokens > 0
        reset = engine._loop.call(lambda vllm: vllm.reset_prefix_cache(False, True))
        assert reset
        assert "start another engine" in caplog.text
        records = engine.store_stats().host.num_records
        again = engine.generate(prompt, **OPTIONS)
        assert again.reuse.hit_tokens == again.reuse.saved_tokens == 0
        assert "caches were reset" in again.reuse.reason
        assert engine.store_stats().host.num_records == records
