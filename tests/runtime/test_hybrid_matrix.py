"""Hit patterns, alignments, lengths of a pass, and company: one reference for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from daric_rag import Completion, DaricConfig, TokenPrompt
from daric_rag.layout import PromptLayout
from tests.reference.outputs import KVCache
from tests.reference.prompts import Prompt, TokenIds, random_chunks, random_prompt
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import (
    NUM_TOKENS,
    Harness,
    check_continuation,
    common_len,
    finished,
)

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
SHAPES = ("all_hit", "all_miss", "holes", "reordered", "extended", "shortened")
# System prompt, documents and question. No document lies in the recompute set as a
# whole; two documents and the question, which is the last window, exceed a short pass.
LENS = (37, 129, 63, 190, 95, 150)
PASS_LEN = 128
OPTIONS: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "logprobs": 20,
    "ignore_eos": True,
}


@dataclass(frozen=True)
class Case:
    """A prompt and what an engine has of it already.

    Attributes:
        prompt: The prompt.
        stored: Chunks that are in the store, or None if that is not counted.
        prefix: What vLLM's prefix cache holds, or None.
        options: Of the request.
    """

    prompt: Prompt
    stored: Sequence[TokenIds] | None = None
    prefix: KVCache | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def prefix_len(self) -> int:
        return self.prefix.num_tokens if self.prefix is not None else 0


# The module's scope keeps the cases of one engine together.
@pytest.fixture(
    params=[*product(("exact", "block"), ("whole", "chunked"))],
    ids="-".join,
    scope="module",
)
def engine(request: pytest.FixtureRequest) -> tuple[str, str]:
    """How prompts are aligned, and how many passes they need."""
    alignment, passes = request.param
    return alignment, passes


@pytest.fixture
def harness(harness_of: HarnessPool, engine: tuple[str, str]) -> Harness:
    alignment, passes = engine
    options: dict[str, Any] = {"config": DaricConfig(alignment=alignment)}  # type: ignore[arg-type]
    if passes == "chunked":
        options["max_num_batched_tokens"] = PASS_LEN
    return harness_of(KIND, **options)


def layout_of(harness: Harness, prompt: Prompt) -> PromptLayout:
    return harness.engine.layout(TokenPrompt(prompt.chunks))


def prepared(harness: Harness, shape: str, seed: int) -> Case:
    """Brings an engine to where a shape begins."""
    prompt = random_prompt(seed, LENS)
    documents = prompt.chunks[:-1]
    if shape == "extended":
        return extended(harness, prompt, seed)
    if shape == "shortened":
        return shortened(harness, prompt, seed)
    stored = {"all_miss": (), "holes": documents[::2]}.get(shape, documents)
    harness.store(stored)
    if shape == "reordered":
        prompt = prompt.reordered([0, 4, 3, 2, 1, 5])
    return Case(prompt, stored)


def extended(harness: Harness, prompt: Prompt, seed: int) -> Case:
    """Its first chunks were asked about; one of the new documents is known."""
    harness.store(prompt.chunks[3:4])
    (question,) = random_chunks(seed + 1, (40,), 512)
    earlier = Prompt((*prompt.chunks[:3], question))
    talk = f"extended {seed}"
    first, _ = harness.run(earlier.chunks, conversation=talk)
    longer = Prompt((*earlier.chunks, first.token_ids, *prompt.chunks[3:]))
    return next_turn(harness, earlier, first, longer, talk)


def shortened(harness: Harness, prompt: Prompt, seed: int) -> Case:
    """All of it was asked about, and now less."""
    (question,) = random_chunks(seed + 1, LENS[-1:], 512)
    shorter = Prompt((*prompt.chunks[:3], question))
    talk = f"shortened {seed}"
    first, _ = harness.run(prompt.chunks, conversation=talk)
    return next_turn(harness, prompt, first, shorter, talk)


def next_turn(
    harness: Harness, earlier: Prompt, first: Completion, prompt: Prompt, talk: str
) -> Case:
    """The prefix keeps what the first turn made of it, in whole blocks."""
    before = layout_of(harness, earlier)
    harness.check(first, before)
    held = (*before.token_ids, *first.token_ids[:-1])
    shared = common_len(held, layout_of(harness, prompt).token_ids)
    block_size = harness.engine.block_size
    prefix_len = shared // block_size * block_size
    # The recompute set of either turn begins before the prefix's end.
    assert before.windows[0][0] < prefix_len
    prefix = harness.cache_after(first, before).between(0, prefix_len)
    return Case(prompt, None, prefix, {"conversation": talk})


@pytest.mark.parametrize("shape", SHAPES)
def test_alone(harness: Harness, engine: tuple[str, str], shape: str) -> None:
    """KV of every layer, log-probabilities and 21 greedy tokens are the reference's."""
    case = prepared(harness, shape, 5000 + 10 * SHAPES.index(shape))
    since = len(harness.spy.step_lens)
    answer, layout = harness.run(case.prompt.chunks, **case.options)
    harness.check(answer, layout, prefix=case.prefix)
    check_reuse(case, answer, layout)
    prefill = [lens for lens in harness.spy.step_lens[since:] if max(lens) > 1]
    if engine[1] == "whole":
        assert len(prefill) == 1
    else:
        assert len(prefill) > 1
        assert max(map(max, prefill)) <= PASS_LEN
        assert layout.windows[-1][1] - layout.windows[-1][0] > PASS_LEN


def check_reuse(case: Case, answer: Completion, layout: PromptLayout) -> None:
    """Hits, misses and the prefix are counted as what they were."""
    reuse = answer.reuse
    assert reuse.gpu_prefix_tokens == case.prefix_len
    if case.stored is None:
        return
    lens = [end - start for start, end in layout.spans]
    hits = [chunk in case.stored for chunk in case.prompt.chunks]
    hit_len = sum(n for n, hit in zip(lens, hits, strict=True) if hit)
    assert reuse.hit_tokens == hit_len
    # The first chunk is computed in place, and the question always is.
    missing_len = layout.prompt_len - hit_len - lens[-1]
    assert reuse.generated_tokens == missing_len - (0 if hits[0] else lens[0])
    assert reuse.saved_tokens == missing_len


@pytest.mark.parametrize("shape", SHAPES)
def test_with_others(harness: Harness, shape: str) -> None:
    """Two that share documents with it, and an ordinary one: each as if alone."""
    seed = 5200 + 10 * SHAPES.index(shape)
    case = prepared(harness, shape, seed)
    others = [sharing(case.prompt, index, seed + 3 + index) for index in range(2)]
    (ordinary,) = random_chunks(seed + 5, (150,), 512)
    asked: list[tuple[Prompt, dict[str, Any]]] = [
        (others[0], {}),
        (case.prompt, case.options),
        (Prompt((ordinary,)), {"reuse": "off"}),
        (others[1], {}),
    ]
    with harness.together():
        streams = [
            harness.engine.stream(TokenPrompt(prompt.chunks), **OPTIONS, **options)
            for prompt, options in asked
        ]
    other, answer, plain, another = map(finished, streams)

    harness.check(answer, layout_of(harness, case.prompt), kv=False, prefix=case.prefix)
    assert answer.reuse.gpu_prefix_tokens == case.prefix_len
    for prompt, one in zip(others, (other, another), strict=True):
        harness.check(one, layout_of(harness, prompt), kv=False)
    check_continuation(plain, harness.reference.full_greedy(ordinary, NUM_TOKENS))
    if case.stored is not None:
        made = [one.reuse.generated_tokens for one in (other, answer, another)]
        prompts = [case.prompt, *others]
        assert sum(made) == missing_len(harness, prompts, case.stored)


def sharing(prompt: Prompt, index: int, seed: int) -> Prompt:
    """Two documents of another prompt between chunks of its own."""
    system, document, question = random_chunks(seed, (33, 88, 41), 512)
    shared, also_shared = prompt.chunks[2 - index], prompt.chunks[-2]
    return Prompt((system, shared, document, also_shared, question))


def missing_len(
    harness: Harness, prompts: Sequence[Prompt], stored: Sequence[TokenIds]
) -> int:
    """Tokens of documents that are generated, each document once."""
    lens = {}
    for prompt in prompts:
        spans = layout_of(harness, prompt).spans
        for chunk, (start, end) in zip(prompt.chunks[1:-1], spans[1:-1], strict=True):
            lens[chunk] = end - start
    return sum(n for chunk, n in lens.items() if chunk not in stored)
