"""Engines whose store holds one byte per element: smaller records, nearly the same KV.

The dense reference stores nothing, so it bounds how far KV and answer may move. That
what was just computed and what is loaded later are the same must hold exactly.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from daric_rag import Completion, DaricConfig
from daric_rag.layout import PromptLayout
from daric_rag.storage.format import payload_len_of
from tests.reference.outputs import KVCache
from tests.reference.prompts import Prompt, random_chunks, random_prompt
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import Harness

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
LENS = (37, 129, 300, 132, 23)
DOCUMENTS_LEN = sum(LENS[:-1])
DTYPE_NAMES = {"int8": "int8", "fp8": "float8_e4m3"}
# Of an element, as a part of its vector's largest one.
ERRORS = {"int8": 1 / 254 + 1 / 2048, "fp8": 1 / 16 + 1 / 2048}


@pytest.fixture(scope="module", params=DTYPE_NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """A value of `kv_storage`; all tests of one run before the other's."""
    return str(request.param)


def harness_for(pool: HarnessPool, name: str, **options: str) -> Harness:
    return pool(KIND, config=DaricConfig(kv_storage=name), **options)  # type: ignore[arg-type]


def all_hit(
    harness: Harness, prompt: Prompt
) -> tuple[Completion, PromptLayout, KVCache]:
    """A request whose documents are all stored; its answer, layout and KV."""
    harness.engine.clear_prefix_cache()
    completion, layout = harness.run(prompt.chunks)
    assert completion.reuse.generated_tokens == 0
    return completion, layout, harness.last_cache(layout.prompt_len)


def test_a_miss_leaves_what_a_hit_loads(harness_of: HarnessPool, name: str) -> None:
    harness = harness_for(harness_of, name)
    prompt = random_prompt(1, LENS)
    # vLLM itself computes a first chunk that is not stored, in full precision.
    harness.store(prompt.chunks[:1])

    miss, layout = harness.run(prompt.chunks)
    after_miss = harness.last_cache(layout.prompt_len)
    assert miss.reuse.generated_tokens > 0
    hit, _, after_hit = all_hit(harness, prompt)

    assert torch.equal(after_miss.keys, after_hit.keys)
    assert torch.equal(after_miss.values, after_hit.values)
    assert hit.token_ids == miss.token_ids
    assert hit.logprobs == miss.logprobs


@pytest.mark.parametrize("index_knows", [False, True])
def test_nothing_is_computed_on_top_of_what_is_left_of_a_document(
    harness_of: HarnessPool, name: str, index_knows: bool
) -> None:
    """Or the answer would depend on which records happened to survive."""
    harness = harness_for(harness_of, name)
    prompt = random_prompt(7 + index_knows, LENS)
    harness.store(prompt.chunks[:1])
    miss, layout = harness.run(prompt.chunks)
    after_miss = harness.last_cache(layout.prompt_len)
    plan = next(plan for plan in reversed(harness.spy.plans) if plan.requests)
    (document,) = [chunk for chunk in plan.requests[-1].chunks if chunk.keys[1:]]

    harness.on_worker(lambda worker: worker._side.store.delete(document.keys[-1]))
    if index_knows:
        harness.scheduler_side(lambda side: side._view.forget(document.keys[-1:]))
    harness.engine.clear_prefix_cache()
    again, _ = harness.run(prompt.chunks)

    assert again.reuse.generated_tokens == document.num_tokens
    cache = harness.last_cache(layout.prompt_len)
    assert torch.equal(cache.keys, after_miss.keys)
    assert torch.equal(cache.values, after_miss.values)
    assert again.token_ids == miss.token_ids


def test_loaded_kv_is_off_by_half_a_code_at_most(
    harness_of: HarnessPool, name: str
) -> None:
    harness = harness_for(harness_of, name)
    prompt = random_prompt(2, LENS)
    harness.store(prompt.chunks[:-1])

    _, layout, cache = all_hit(harness, prompt)

    exact = harness.reference.assemble(layout.token_ids, layout.spans)
    recomputed = [p for start, end in layout.windows for p in range(start, end)]
    kept = torch.ones(layout.prompt_len, dtype=torch.bool)
    kept[recomputed] = False
    # Re-encoding turns pairs of elements, and with them their errors.
    for mine, theirs, turned in (
        (cache.keys, exact.keys, 2**0.5),
        (cache.values, exact.values, 1.0),
    ):
        error = (mine - theirs).abs().amax(dim=-1)[:, kept]
        pairs = theirs.unflatten(-1, (2, -1)).norm(dim=-2) if turned > 1 else theirs
        scale = pairs.abs().amax(dim=-1)[:, kept]
        assert (error <= scale * ERRORS[name] * turned + 2e-4).all()
        assert error.max() > 2e-3, "nothing was quantised"


def test_the_answer_moves_less_than_by_another_document(
    harness_of: HarnessPool, name: str
) -> None:
    harness = harness_for(harness_of, name)
    prompt = random_prompt(3, LENS)
    harness.store(prompt.chunks[:-1])

    completion, layout, _ = all_hit(harness, prompt)

    (random_chunk,) = random_chunks(6, LENS[2:3], vocab=512)
    expected = _logprobs(harness, prompt, layout)
    other = _logprobs(harness, prompt.replaced(2, random_chunk), layout)
    assert completion.logprobs is not None
    likeliest = completion.logprobs[0]
    moved = max(abs(value - expected[token]) for token, value in likeliest.items())
    by_document = max(abs(other[token] - expected[token]) for token in likeliest)
    assert moved < by_document / 10


def _logprobs(harness: Harness, prompt: Prompt, layout: PromptLayout) -> list[float]:
    """The first output token's, by the reference."""
    windows = [*layout.windows]
    prefill = harness.reference.daric_prefill(prompt.token_ids, prompt.spans, windows)
    return prefill.logprobs.tolist()


def test_records_take_one_byte_per_element(harness_of: HarnessPool, name: str) -> None:
    harness = harness_for(harness_of, name)
    before = harness.engine.store_stats().host
    harness.store(random_prompt(4, LENS).chunks[:-1])
    after = harness.engine.store_stats().host

    reference = harness.reference
    heads = (reference.num_kv_heads, reference.head_dim)
    payload_len = payload_len_of(
        (reference.num_layers, DOCUMENTS_LEN, *heads), DTYPE_NAMES[name]
    )
    per_record = (after.nbytes - before.nbytes - payload_len) / (
        after.num_records - before.num_records
    )
    assert 0 < per_record < 1024, "header and side data"


def test_another_storage_is_another_store(
    harness_of: HarnessPool, tmp_path: Path
) -> None:
    """Records of one kind are no hits for another, and outlive it."""
    store, prompt = str(tmp_path / "store"), random_prompt(5, LENS)
    reused = []
    for name in ("int8", "model", "int8"):
        harness = harness_for(harness_of, name, store=store)
        completion, layout = harness.run(prompt.chunks)
        reused.append(completion.reuse.hit_tokens > 0)
        if name == "model":
            harness.check(completion, layout)
        harness.engine.flush()
        harness_of.close()
    assert reused == [False, False, True]
