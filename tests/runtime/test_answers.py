"""Several answers to one prompt: each its own, the prompt's KV made once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from daric_rag import Completion, Delta
from daric_rag.errors import ConfigError
from tests.reference.dense import DenseReference
from tests.reference.prompts import Prompt, random_prompt
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import Harness, check_continuation, finished
from tests.runtime.pressure import (
    TIGHT,
    as_prompt,
    check_drawn,
    check_nothing_is_left,
    note_preemptions,
)

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
LENS = (37, 129, 163, 301, 132, 195, 23)
PROMPT_LEN = sum(LENS)
DOCUMENTS_LEN = sum(LENS[1:-1])
SHORT_LENS = (20, 90, 100, 15)
SHORT_MADE_LEN = 90  # the other document lies in the recompute set
GREEDY: dict[str, Any] = {"max_tokens": 12, "logprobs": 20, "ignore_eos": True}
DRAWN: dict[str, Any] = GREEDY | {"temperature": 1.0}


@pytest.fixture
def harness(harness_of: HarnessPool) -> Harness:
    return harness_of(KIND)


def ask(harness: Harness, prompt: Prompt, **options: Any) -> tuple[Completion, ...]:
    return harness.engine.generate(as_prompt(prompt), **DRAWN | options).answers


# --------------------------------------------------------------------------- answers


@pytest.mark.parametrize("warm", [False, True])
def test_every_answer_is_right_and_the_prompt_is_made_once(
    harness: Harness, warm: bool
) -> None:
    prompt = random_prompt(700 + warm, LENS)
    if warm:
        harness.run(prompt.chunks, max_tokens=1)
        harness.engine.clear_prefix_cache()
    answers = ask(harness, prompt, n=4, trace=True)
    assert len(answers) == 4
    assert len({answer.token_ids for answer in answers}) == 4
    for answer in answers:
        check_drawn(harness, prompt, answer)
        decode = harness.engine.tokenizer.decode
        whole = decode(answer.token_ids, skip_special_tokens=True)
        assert whole.startswith(answer.text)  # the last character may be incomplete
        assert len(answer.text) > len(whole) - 4
        assert answer.finish_reason == "length"
        assert answer.ttft_s > 0
        assert answer.trace is not None
        assert answer.reuse.prompt_tokens == PROMPT_LEN
        assert answer.reuse.num_chunks == len(LENS)
    first, *others = answers
    assert first.reuse.generated_tokens == (0 if warm else DOCUMENTS_LEN)
    assert first.reuse.saved_tokens == (0 if warm else PROMPT_LEN - LENS[-1])
    assert first.reuse.hit_tokens == (PROMPT_LEN - LENS[-1] if warm else 0)
    for answer in others:
        assert answer.alternatives == ()
        # All blocks of the prompt but the last one, which is not full.
        assert answer.reuse.gpu_prefix_tokens == PROMPT_LEN // 32 * 32
        assert answer.reuse.generated_tokens == answer.reuse.saved_tokens == 0
        assert answer.reuse.recomputed_tokens == PROMPT_LEN % 32
        assert answer.reuse.reason == ""
    check_nothing_is_left(harness)


def test_one_answer_has_no_alternatives(harness: Harness) -> None:
    (answer,) = ask(harness, random_prompt(702, LENS))
    assert answer.alternatives == ()


def test_answer_i_is_that_of_seed_plus_i(harness: Harness) -> None:
    prompt = random_prompt(703, LENS)
    ask(harness, prompt, seed=0)  # From here on all come from the same cached blocks.
    together = ask(harness, prompt, n=4, seed=5)
    alone = [ask(harness, prompt, seed=5 + index)[0] for index in range(4)]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert len({a.token_ids for a in alone}) == 4
    again = ask(harness, prompt, n=4, seed=5)
    assert [a.token_ids for a in again] == [a.token_ids for a in together]


def test_ordinary_requests_draw_several_answers_too(
    harness: Harness, reference_of: Callable[[str], DenseReference]
) -> None:
    prompt, reference = random_prompt(704, LENS), reference_of(KIND)
    answers = ask(harness, prompt, n=3, reuse="off", trace=True)
    assert len(answers) == 3
    prefill = reference.full_prefill(prompt.token_ids)
    for answer in answers:
        drawn = answer.token_ids
        check_continuation(answer, reference.decode(prefill, len(drawn), forced=drawn))
        assert answer.reuse.reason == 'reuse="off"'
        assert answer.trace is None
    computed = sum(answer.reuse.recomputed_tokens for answer in answers)
    assert computed == PROMPT_LEN + 2 * (PROMPT_LEN % 32)


def test_several_greedy_answers_are_refused_before_any_work(harness: Harness) -> None:
    steps = len(harness.spy.plans)
    with pytest.raises(ConfigError, match="temperature above 0"):
        harness.engine.generate(as_prompt(random_prompt(705, LENS)), n=2)
    assert len(harness.spy.plans) == steps


def test_beside_others_in_a_batch(
    harness: Harness, reference_of: Callable[[str], DenseReference]
) -> None:
    prompts = [random_prompt(710 + i, LENS) for i in range(4)]
    with harness.together():
        several, single, ordinary, more = (
            harness.engine.stream(as_prompt(prompt), **options)
            for prompt, options in zip(
                prompts,
                (DRAWN | {"n": 3}, GREEDY, GREEDY | {"reuse": "off"}, DRAWN | {"n": 2}),
                strict=True,
            )
        )
    for prompt, stream, num_answers in (
        (prompts[0], several, 3),
        (prompts[1], single, 1),
        (prompts[3], more, 2),
    ):
        answers = finished(stream).answers
        assert len(answers) == num_answers
        for answer in answers:
            check_drawn(harness, prompt, answer)
        made = sum(answer.reuse.generated_tokens for answer in answers)
        assert made == DOCUMENTS_LEN
    expected = reference_of(KIND).full_greedy(prompts[2].token_ids, 12)
    check_continuation(finished(ordinary), expected)


async def test_every_method_returns_all_answers(harness: Harness) -> None:
    prompts = [as_prompt(random_prompt(714 + i, LENS)) for i in range(2)]
    options = DRAWN | {"n": 2, "seed": 3}
    engine = harness.engine
    # The first round is from other blocks than the rounds after it.
    await asyncio.gather(*(engine.agenerate(prompt, **options) for prompt in prompts))
    batch = await asyncio.to_thread(engine.generate_batch, prompts, **options)
    tasks = [engine.agenerate(prompt, **options) for prompt in prompts]
    for one, other in zip(batch, await asyncio.gather(*tasks), strict=True):
        ids = [answer.token_ids for answer in one.answers]
        assert ids == [answer.token_ids for answer in other.answers]
        assert len(set(ids)) == 2


# -------------------------------------------------------------------------- streaming


def joined(deltas: list[Delta], index: int) -> tuple[str, tuple[int, ...], Any]:
    own = [delta for delta in deltas if delta.index == index]
    return (
        "".join(delta.text for delta in own),
        sum((delta.token_ids for delta in own), ()),
        sum((delta.logprobs or () for delta in own), ()),
    )


def test_deltas_say_which_answer_they_continue(harness: Harness) -> None:
    prompt = as_prompt(random_prompt(720, LENS))
    deltas = list(harness.engine.stream(prompt, n=3, **DRAWN))
    *early, last = deltas
    assert all(delta.completion is None for delta in early)
    assert last.completion is not None
    for index, answer in enumerate(last.completion.answers):
        assert joined(deltas, index) == (
            answer.text,
            answer.token_ids,
            answer.logprobs,
        )
    # Interleaved: a batch, not one answer after the other.
    assert {delta.index for delta in deltas[:6]} == {0, 1, 2}


async def test_an_async_stream_has_all_answers(harness: Harness) -> None:
    prompt = as_prompt(random_prompt(721, LENS))
    deltas = [d async for d in harness.engine.astream(prompt, n=3, **DRAWN)]
    assert deltas[-1].completion is not None
    for index, answer in enumerate(deltas[-1].completion.answers):
        assert joined(deltas, index)[1] == answer.token_ids


@pytest.mark.parametrize("num_taken", [0, 1, 8])
def test_closing_a_stream_ends_all_answers(harness: Harness, num_taken: int) -> None:
    prompt = random_prompt(722, LENS)
    options = DRAWN | {"max_tokens": 3000, "n": 4}
    deltas = harness.engine.stream(as_prompt(prompt), **options)
    for _ in range(num_taken):
        next(deltas)
    deltas.close()
    check_nothing_is_left(harness)
    for answer in ask(harness, prompt, n=2):
        check_drawn(harness, prompt, answer)


def test_closing_a_stream_some_of_whose_answers_are_over(harness: Harness) -> None:
    """A stop string ends the second answer only, and the others run on for long."""
    prompt = random_prompt(723, LENS)
    ask(harness, prompt, seed=0)
    answers = ask(harness, prompt, n=3, seed=7)
    stop = unique_piece(answers, 1)
    options = DRAWN | {"max_tokens": 3000, "n": 3, "seed": 7, "stop": stop}
    deltas = harness.engine.stream(as_prompt(prompt), **options)
    for _ in range(60):
        next(deltas)
    deltas.close()
    check_nothing_is_left(harness)


async def test_cancelling_ends_all_answers(harness: Harness) -> None:
    prompt = as_prompt(random_prompt(724, LENS))
    options = DRAWN | {"max_tokens": 3000, "n": 4}
    task = asyncio.create_task(harness.engine.agenerate(prompt, **options))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(check_nothing_is_left, harness)


# ----------------------------------------------------------------------- stop strings


def unique_piece(answers: tuple[Completion, ...], index: int) -> str:
    """Some characters from the middle of one answer that no other answer has."""
    text = answers[index].text
    others = [a.text for i, a in enumerate(answers) if i != index]
    for start in range(len(text) // 3, len(text) - 3):
        piece = text[start : start + 3]
        if not any(piece in other for other in others):
            return piece
    raise AssertionError("the answers are too alike; choose another prompt")


def test_a_stop_string_ends_the_answers_that_have_it(harness: Harness) -> None:
    prompt = random_prompt(730, LENS)
    ask(harness, prompt, seed=0)
    whole = ask(harness, prompt, n=3, seed=1)
    for index in range(3):
        stop = unique_piece(whole, index)
        answers = ask(harness, prompt, n=3, seed=1, stop=["never in there", stop])
        for answer, uncut in zip(answers, whole, strict=True):
            if stop not in uncut.text:
                assert answer.text == uncut.text
                assert answer.finish_reason == "length"
            else:
                assert answer.text == uncut.text[: uncut.text.index(stop)]
                assert answer.finish_reason == "stop"
                assert len(answer.token_ids) < 12
            # Of a stopped answer vLLM's front end has no counts.
            assert answer.reuse.gpu_prefix_tokens == PROMPT_LEN // 32 * 32
            assert answer.reuse.reason == ""
    check_nothing_is_left(harness)


def test_every_stopped_answer_has_its_own_counts(harness: Harness) -> None:
    """All are stopped by some letter, the first having made the prompt's KV."""
    prompt = random_prompt(731, LENS)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    first, second = ask(harness, prompt, n=2, seed=1, max_tokens=200, stop=letters)
    assert first.finish_reason == second.finish_reason == "stop"
    assert first.reuse.generated_tokens == DOCUMENTS_LEN
    assert second.reuse.generated_tokens == 0
    assert second.reuse.gpu_prefix_tokens == PROMPT_LEN // 32 * 32


# ----------------------------------------------------------------------- small engines


@pytest.fixture
def tight(harness_of: HarnessPool) -> Harness:
    return harness_of(KIND, **TIGHT)


def test_preempted_answers_are_right(
    tight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = note_preemptions(tight, monkeypatch)
    prompt = random_prompt(740, SHORT_LENS)
    answers = ask(tight, prompt, n=4, max_tokens=400)
    assert preempted, "nothing was preempted: the test is too small"
    for answer in answers:
        check_drawn(tight, prompt, answer)
        assert answer.reuse.prompt_tokens == sum(SHORT_LENS)
    made = [answer.reuse.generated_tokens for answer in answers]
    assert made == [SHORT_MADE_LEN, 0, 0, 0]
    check_nothing_is_left(tight)


@pytest.fixture
def cramped(harness_of: HarnessPool) -> Harness:
    """Cold prompts wait for their blocks, and four requests have seats."""
    return harness_of(KIND, **TIGHT, max_num_batched_tokens=64, max_num_seqs=4)


def test_cold_answers_wait_for_the_first_ones_blocks(cramped: Harness) -> None:
    """Of which they then need nothing but the last one, which is not full."""
    prompt = random_prompt(739, (20, 190, 200, 15))
    first, *others = ask(cramped, prompt, n=4)
    assert first.reuse.generated_tokens == 390
    assert first.reuse.gpu_prefix_tokens == 0
    for answer in (first, *others):
        check_drawn(cramped, prompt, answer)
    for answer in others:
        assert answer.reuse.gpu_prefix_tokens == 425 // 32 * 32
        assert answer.reuse.recomputed_tokens == 425 % 32
    check_nothing_is_left(cramped)


def test_more_answers_than_seats(cramped: Harness) -> None:
    prompt = random_prompt(741, SHORT_LENS)
    answers = ask(cramped, prompt, n=10)
    assert len(answers) == 10
    for answer in answers:
        check_drawn(cramped, prompt, answer)
    made = sum(answer.reuse.generated_tokens for answer in answers)
    assert made == SHORT_MADE_LEN
    check_nothing_is_left(cramped)


@pytest.mark.parametrize("num_taken", [0, 1, 30])
def test_closing_while_some_answers_wait(cramped: Harness, num_taken: int) -> None:
    """Some run, some wait until their blocks are filled, some for a seat."""
    prompt = random_prompt(742 + num_taken, (20, 190, 200, 15))
    options = DRAWN | {"max_tokens": 500, "n": 8}
    deltas = cramped.engine.stream(as_prompt(prompt), **options)
    for _ in range(num_taken):
        next(deltas)
    deltas.close()
    check_nothing_is_left(cramped)
    for answer in ask(cramped, prompt, n=3):
        check_drawn(cramped, prompt, answer)
