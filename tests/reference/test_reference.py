"""Holds the dense reference against transformers' own forward, and against itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.reference.dense import DenseReference, window_positions
from tests.reference.outputs import KVCache, Prefill
from tests.reference.prompts import (
    Prompt,
    head_windows,
    random_prompt,
    scattered_windows,
)
from tests.reference.tiny_models import KINDS

LENS = (19, 41, 1, 63, 33, 11)
WHOLE = random_prompt(7, LENS).prompt_len

Load = Callable[[str], DenseReference]


@pytest.fixture(params=KINDS)
def reference(request: pytest.FixtureRequest, tiny_reference: Load) -> DenseReference:
    """The dense reference, for every kind in turn."""
    return tiny_reference(request.param)


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    """Six chunks, 168 tokens."""
    return random_prompt(7, LENS)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Asserts equality to `tolerance` of the largest expected magnitude.

    Elementwise relative tolerance would ask more of small entries than float32 sums
    of large ones can give.
    """
    error = float((actual - expected).abs().max())
    assert error <= tolerance * max(1.0, float(expected.abs().max())), error


def close_prefill(actual: Prefill, expected: Prefill) -> None:
    """Asserts equal caches and log-probabilities."""
    close(actual.cache.keys, expected.cache.keys)
    close(actual.cache.values, expected.cache.values)
    close(actual.logprobs, expected.logprobs)


def stacked(cache: Any) -> KVCache:
    """A transformers cache as ours: `[layers, tokens, kv_heads, head_dim]`."""
    keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers])
    values = torch.stack([layer.values[0].transpose(0, 1) for layer in cache.layers])
    return KVCache(keys, values)


def hf_forward(
    reference: DenseReference, token_ids: tuple[int, ...], past: KVCache | None = None
) -> Prefill:
    """Transformers' forward of `token_ids` after `past`."""
    cache = DynamicCache()
    for index in range(reference.num_layers if past else 0):
        assert past is not None
        cache.update(
            past.keys[index].transpose(0, 1).unsqueeze(0),
            past.values[index].transpose(0, 1).unsqueeze(0),
            index,
        )
    with torch.no_grad():
        out = reference.model(torch.tensor([token_ids]), past_key_values=cache)
    return Prefill(stacked(out.past_key_values), out.logits[0, -1])


def test_full_prefill_is_transformers_forward(
    reference: DenseReference, prompt: Prompt
) -> None:
    close_prefill(
        reference.full_prefill(prompt.token_ids),
        hf_forward(reference, prompt.token_ids),
    )


def test_daric_is_transformers_forward_window_by_window(
    reference: DenseReference, prompt: Prompt
) -> None:
    """A window depends on earlier positions only, so one after another is the same."""
    windows = head_windows(prompt, head_len=9, latest_len=30)
    cache = reference.assemble(prompt.token_ids, prompt.spans)
    keys, values = cache.keys.clone(), cache.values.clone()
    for start, end in windows:
        before = KVCache(keys[:, :start], values[:, :start])
        out = hf_forward(reference, prompt.token_ids[start:end], before)
        keys[:, start:end] = out.cache.keys[:, start:]
        values[:, start:end] = out.cache.values[:, start:]
    close_prefill(
        reference.daric_prefill(prompt.token_ids, prompt.spans, windows),
        Prefill(KVCache(keys, values), out.logits),
    )


def test_greedy_is_transformers_generate(
    reference: DenseReference, prompt: Prompt
) -> None:
    ours = reference.full_greedy(prompt.token_ids, 8)
    ids = torch.tensor([prompt.token_ids])
    theirs = reference.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=8,
        min_new_tokens=8,
        eos_token_id=-1,
    )
    assert ours.token_ids == tuple(theirs[0, prompt.prompt_len :].tolist())


def test_recompute_everything_is_full_prefill(
    reference: DenseReference, prompt: Prompt
) -> None:
    everything = reference.daric_prefill(prompt.token_ids, prompt.spans, [(0, WHOLE)])
    full = reference.full_prefill(prompt.token_ids)
    assert torch.equal(everything.cache.keys, full.cache.keys)
    assert torch.equal(everything.cache.values, full.cache.values)
    assert torch.equal(everything.logits, full.logits)


def test_one_chunk_is_full_prefill(reference: DenseReference, prompt: Prompt) -> None:
    one = reference.daric_prefill(prompt.token_ids, [(0, WHOLE)], [(WHOLE - 1, WHOLE)])
    close_prefill(one, reference.full_prefill(prompt.token_ids))


def test_first_chunk_is_reused_exactly(
    reference: DenseReference, prompt: Prompt
) -> None:
    end = prompt.spans[0][1]
    windows = head_windows(prompt, head_len=4)
    daric = reference.daric_prefill(prompt.token_ids, prompt.spans, windows)
    chunk = reference.chunk_kv(prompt.chunks[0])
    assert torch.equal(daric.cache.keys[:, :end], chunk.keys)
    assert torch.equal(daric.cache.values[:, :end], chunk.values)
    full = reference.full_prefill(prompt.token_ids)
    close(daric.cache.keys[:, :end], full.cache.keys[:, :end])


def test_reencode_zero_is_identity_and_round_trips(
    reference: DenseReference, prompt: Prompt
) -> None:
    keys = reference.chunk_kv(prompt.chunks[3]).keys
    before = keys.clone()
    assert torch.equal(reference.reencode(keys, 0), keys)
    moved = reference.reencode(keys, 1234)
    close(reference.reencode(moved, -1234), keys)
    close(moved.norm(dim=-1), keys.norm(dim=-1))
    assert torch.equal(keys, before), "the stored keys were changed in place"


@pytest.mark.parametrize("shift", [1, 32, 149])
def test_reencode_is_computing_elsewhere(reference: DenseReference, shift: int) -> None:
    """Layer 0's keys depend on embedding and position alone, so they move exactly."""
    before, chunk = random_prompt(3, (shift, 63)).chunks
    there = reference.full_prefill(before + chunk).cache
    here = reference.chunk_kv(chunk)
    # Angles are float32 products: up to 149 radians, each off by 1e-5 or so.
    close(reference.reencode(here.keys[0], shift), there.keys[0, shift:], 2e-5)
    close(here.values[0], there.values[0, shift:])


def test_windows_are_a_set(tiny_reference: Load, prompt: Prompt) -> None:
    """Order, overlaps, splits and empty windows do not matter."""
    reference = tiny_reference("qwen3")
    args = prompt.token_ids, prompt.spans
    windows = [(19, 40), (60, 61), (100, 130), (WHOLE - 3, WHOLE)]
    shuffled = [(WHOLE - 3, WHOLE), (110, 130), (19, 30), (60, 61), (25, 40), (5, 5)]
    split = [(100, 112)]
    expected = reference.daric_prefill(*args, windows)
    actual = reference.daric_prefill(*args, shuffled + split)
    assert torch.equal(actual.cache.keys, expected.cache.keys)
    assert torch.equal(actual.logits, expected.logits)


def test_waves_are_one_pass(tiny_reference: Load, prompt: Prompt) -> None:
    """Windows computed in ascending waves end in the same cache."""
    reference = tiny_reference("llama-gqa-tied")
    windows = scattered_windows(5, prompt, 20)
    positions = window_positions(windows, WHOLE)
    cache = reference.assemble(prompt.token_ids, prompt.spans)
    for wave in positions.split(7):
        waved = reference._compute(prompt.token_ids, wave, cache)
        cache = waved.cache
    once = reference.daric_prefill(prompt.token_ids, prompt.spans, windows)
    close_prefill(waved, once)


def test_positions_outside_windows_are_left_alone(
    reference: DenseReference, prompt: Prompt
) -> None:
    windows = scattered_windows(2, prompt, 12)
    kept = torch.ones(WHOLE, dtype=torch.bool)
    kept[window_positions(windows, WHOLE)] = False
    base = reference.assemble(prompt.token_ids, prompt.spans)
    daric = reference.daric_prefill(prompt.token_ids, prompt.spans, windows)
    assert torch.equal(daric.cache.keys[:, kept], base.keys[:, kept])
    assert torch.equal(daric.cache.values[:, kept], base.values[:, kept])
    assert daric.cache.keys.isfinite().all()
    assert daric.cache.values.isfinite().all()


def test_forced_output_is_scored_under_its_own_context(
    tiny_reference: Load, prompt: Prompt
) -> None:
    reference = tiny_reference("llama-mha")
    prefill = reference.full_prefill(prompt.token_ids)
    forced = reference.decode(prefill, 4, forced=(400, 401, 402))
    assert forced.token_ids[:3] == (400, 401, 402)
    assert torch.equal(forced.logprobs[0], prefill.logprobs)
    longer = reference.full_prefill((*prompt.token_ids, 400, 401, 402))
    close(forced.logprobs[3], longer.logprobs)
    assert forced.chosen_logprobs[1] == forced.logprobs[1, 401]


def test_following_an_output_is_decoding_it(
    tiny_reference: Load, prompt: Prompt
) -> None:
    reference = tiny_reference("llama-mha")
    prefill = reference.full_prefill(prompt.token_ids)
    for forced in ((400, 401, 402, 403), (400,)):
        step_by_step = reference.decode(prefill, len(forced), forced=forced)
        at_once, cache = reference.follow(prefill, forced)
        assert at_once.token_ids == step_by_step.token_ids
        close(at_once.logprobs, step_by_step.logprobs)
        # The last token is never computed.
        whole = reference.full_prefill((*prompt.token_ids, *forced[:-1]))
        close(cache.keys, whole.cache.keys)
        close(cache.values, whole.cache.values)


def test_a_prefix_is_taken_as_it_is(tiny_reference: Load, prompt: Prompt) -> None:
    """Its end is inside a chunk, and inside that chunk's head."""
    reference = tiny_reference("llama-gqa-tied")
    args = prompt.token_ids, prompt.spans, head_windows(prompt, head_len=9)
    alone = reference.daric_prefill(*args)
    end = prompt.spans[3][0] + 4
    own = reference.daric_prefill(*args, prefix=alone.cache.between(0, end))
    close_prefill(own, alone)
    exact = reference.full_prefill(prompt.token_ids).cache.between(0, end)
    other = reference.daric_prefill(*args, prefix=exact)
    assert torch.equal(other.cache.keys[:, :end], exact.keys)
    assert torch.equal(other.cache.values[:, :end], exact.values)
    windows = [(start, stop) for start, stop in args[2] if stop > end]
    windows[0] = (end, windows[0][1])
    base = reference.assemble(*args[:2])
    base = exact.then(base.between(end, base.num_tokens))
    positions = window_positions(windows, WHOLE)
    expected = reference._compute(prompt.token_ids, positions, base)
    close_prefill(other, expected)
    assert (other.logprobs - alone.logprobs).abs().max() > 1e-3


def test_query_rows_do_not_matter(
    tiny_reference: Load, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tiny_reference("llama-rope-yarn")
    expected = reference.full_prefill(prompt.token_ids)
    monkeypatch.setattr("tests.reference.attention._QUERY_ROWS", 13)
    close_prefill(reference.full_prefill(prompt.token_ids), expected)


@pytest.mark.parametrize(
    ("spans", "windows", "message"),
    [
        ([(0, 9), (10, WHOLE)], [(0, WHOLE)], "partition"),
        ([(0, 9), (9, 9), (9, WHOLE)], [(0, WHOLE)], "partition"),
        ([(0, WHOLE - 1)], [(0, WHOLE)], "partition"),
        ([], [(0, WHOLE)], "partition"),
        ([(0, WHOLE)], [(0, WHOLE + 1)], "outside"),
        ([(0, WHOLE)], [(3, 9)], "last prompt token"),
        ([(0, WHOLE)], [], "last prompt token"),
    ],
)
def test_misuse_is_refused(
    tiny_reference: Load,
    prompt: Prompt,
    spans: list[tuple[int, int]],
    windows: list[tuple[int, int]],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_reference("llama-mqa").daric_prefill(prompt.token_ids, spans, windows)
