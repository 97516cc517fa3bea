"""A remote engine's answers, against a server that lives in the transport."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from daric_rag import (
    ChunkedPrompt,
    Completion,
    ConfigError,
    DaricConfig,
    Delta,
    EngineClosedError,
    EngineError,
    PromptError,
    PromptTooLongError,
    RemoteEngine,
    ReuseStats,
    TokenPrompt,
)
from daric_rag.keys import document_hash
from daric_rag.wire import decode_request, encode_reuse, salt_of
from tests.core.test_trace import TRACE
from tests.remote.fake_server import (
    MAX_MODEL_LEN,
    MODEL,
    PROMPT,
    TEXTS,
    TOKENS,
    VOCAB_SIZE,
    FakeServer,
    event,
    open_engine,
)

WHOLE = "".join(TEXTS)


def without_times(completion: Completion) -> Completion:
    return replace(completion, ttft_s=0.0)


def check_whole(completion: Completion) -> None:
    assert completion.text == WHOLE
    assert completion.token_ids == TOKENS
    assert completion.finish_reason == "length"
    assert completion.ttft_s > 0
    assert completion.reuse == ReuseStats(
        num_chunks=3, disjoint_hit_tokens=9, load_s=0.5
    )


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 10_000])
async def test_every_way_of_asking_gives_the_same_answer(cut: int) -> None:
    """Whatever the pieces are that the network cuts characters and events into."""
    server = FakeServer(cut=cut)
    options = {"logprobs": 2, "max_tokens": 5}
    async with open_engine(server) as engine:
        one = engine.generate(PROMPT, **options)
        check_whole(one)
        batch = engine.generate_batch([PROMPT, PROMPT], **options)
        deltas = list(engine.stream(PROMPT, **options))
        awaited = await engine.agenerate(PROMPT, **options)
        streamed = [delta async for delta in engine.astream(PROMPT, **options)]
    for other in (*batch, deltas[-1].completion, awaited, streamed[-1].completion):
        assert other is not None
        assert without_times(other) == without_times(one)
    assert deltas[:-1] == streamed[:-1]
    assert [delta.text for delta in deltas if delta.token_ids] == [*TEXTS]
    assert sum((delta.token_ids for delta in deltas), ()) == TOKENS
    assert all(delta.completion is None for delta in deltas[:-1])
    assert one.logprobs == ({11: -0.5, 100: -1.5, 101: -2.5}, *one.logprobs[1:])
    assert sum((delta.logprobs or () for delta in deltas), ()) == one.logprobs


def test_a_request_carries_what_the_scheduler_side_checks(
    server: FakeServer, engine: RemoteEngine
) -> None:
    engine.generate(
        PROMPT, max_tokens=3, stop="x", seed=4, namespace="n", conversation="c"
    )
    (body,), (headers,) = server.bodies, server.headers
    wire = decode_request(body["kv_transfer_params"])
    assert wire is not None
    assert wire.ends == (30, 70, 72)
    assert (wire.config.namespace, wire.conversation) == ("n", "c")
    assert body["cache_salt"] == salt_of(wire)
    assert body["prompt"] == [20] * 30 + [21] * 40 + [22, 23]
    assert (body["model"], body["seed"], body["stop"]) == (MODEL, 4, ["x"])
    # What a model's generation_config.json would change behind the caller's back.
    neutral = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert [body[name] for name in neutral] == [0.0, 1.0, 0, 0.0, 1.0]
    assert len(headers["x-request-id"]) == 32


def test_sampling_and_guides_travel_by_vllms_names(
    server: FakeServer, engine: RemoteEngine
) -> None:
    sampling = {
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
    }
    engine.generate(PROMPT, json_schema={"type": "object"}, **sampling)
    engine.generate(PROMPT)
    guided, plain = server.bodies
    assert {name: guided[name] for name in sampling} == sampling
    assert guided["structured_outputs"] == {"json": {"type": "object"}}
    assert "structured_outputs" not in plain


def test_every_request_has_an_id_of_its_own(
    server: FakeServer, engine: RemoteEngine
) -> None:
    engine.generate_batch([PROMPT] * 20)
    assert len({headers["x-request-id"] for headers in server.headers}) == 20


def test_a_request_without_reuse_is_an_ordinary_one(
    server: FakeServer, engine: RemoteEngine
) -> None:
    reuse = engine.generate(PROMPT, reuse="off").reuse
    assert "kv_transfer_params" not in server.bodies[0]
    assert "cache_salt" not in server.bodies[0]
    assert "x-daric-reuse" not in server.headers[0]
    assert reuse == ReuseStats(
        prompt_tokens=72,
        num_chunks=3,
        gpu_prefix_tokens=7,
        recomputed_tokens=65,
        reason='reuse="off"',
    )


def test_answers_stop_at_the_context_s_end(
    server: FakeServer, engine: RemoteEngine
) -> None:
    long = TokenPrompt([[20] * (MAX_MODEL_LEN - 3), [22]])
    assert engine.generate(long, max_tokens=50).token_ids == TOKENS[:2]
    assert server.bodies[0]["max_tokens"] == 2


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        (PROMPT, {"max_token": 1}, ConfigError),
        (PROMPT, {"max_tokens": 0}, ConfigError),
        (TokenPrompt([[20] * MAX_MODEL_LEN]), {}, PromptTooLongError),
        (TokenPrompt([[VOCAB_SIZE], [20]]), {}, PromptError),
        (TokenPrompt([[20], []]), {}, PromptError),
    ],
)
def test_bad_input_is_refused_before_the_server_hears_of_it(
    server: FakeServer, engine: RemoteEngine, prompt: Any, options: Any, error: Any
) -> None:
    with pytest.raises(error):
        engine.generate_batch([PROMPT, prompt], **options)
    assert server.bodies == []


def test_block_alignment_pads_to_the_server_s_blocks(server: FakeServer) -> None:
    with open_engine(server, config=DaricConfig(alignment="block")) as engine:
        layout = engine.layout(PROMPT)
    assert [chunk.start for chunk in layout.chunks] == [0, 32, 80]
    assert layout.token_ids[30:32] == (1, 1)


def test_prewarming_stores_to_the_last_token(
    server: FakeServer, engine: RemoteEngine
) -> None:
    server.counts = ReuseStats(saved_tokens=5)
    assert engine.prewarm(["one", "two", "one", " "]) == 2
    server.counts = ReuseStats(saved_tokens=0)
    assert engine.prewarm(["one"]) == 0
    for body in server.bodies:
        assert body["kv_transfer_params"]["daric"]["save_tail"] == 1
        assert body["max_tokens"] == 1


def test_prewarming_each_tells_of_every_document(
    server: FakeServer, engine: RemoteEngine
) -> None:
    server.counts = ReuseStats(saved_tokens=5)
    long = "long " * MAX_MODEL_LEN
    good, empty, too_long, wrong = engine.prewarm_each(["one", " ", long, 7])
    layout = engine.document_layout("one")
    assert good.document_hash == document_hash(layout.token_ids)
    assert (good.num_tokens, good.saved_tokens) == (layout.prompt_len, 5)
    assert good.error == ""
    assert [one.document_hash for one in (empty, too_long, wrong)] == [None] * 3
    assert "empty" in empty.error
    assert "the limit is" in too_long.error
    assert "without text" in wrong.error
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        (ReuseStats(disjoint_hit_tokens=3), ""),
        (ReuseStats(gpu_prefix_tokens=3), ""),
        (ReuseStats(reason="the store is read-only"), "the store is read-only"),
        (ReuseStats(), "the store did not take it"),
        (None, "did not tell"),
    ],
)
def test_a_document_is_stored_only_if_the_server_says_so(
    server: FakeServer, engine: RemoteEngine, counts: Any, error: str
) -> None:
    server.counts = counts
    (outcome,) = engine.prewarm_each(["one"])
    assert outcome.saved_tokens == 0
    assert error in outcome.error
    assert bool(error) == bool(outcome.error)


def test_counts_that_the_server_could_not_tell_are_not_zero_in_silence(
    server: FakeServer, engine: RemoteEngine
) -> None:
    server.counts = None
    assert "did not tell" in engine.generate(PROMPT).reuse.reason


def test_a_trace_comes_with_the_counts(
    server: FakeServer, engine: RemoteEngine
) -> None:
    told = event({"kv_transfer_params": encode_reuse(ReuseStats(), TRACE)})
    choice = {"index": 0, "text": "a", "token_ids": [11], "finish_reason": "stop"}

    def reply(*_: Any) -> Any:
        return server.stream(event({"choices": [choice]}), told, b"data: [DONE]\n\n")

    server.script = [reply, reply]
    assert engine.generate(PROMPT, trace=True).trace == TRACE
    assert server.bodies[0]["kv_transfer_params"]["daric"]["trace"] == 1
    assert engine.generate(PROMPT).trace is None


def part(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
    token = {"text": text, "token_ids": [ord(text)], "finish_reason": reason}
    return {"choices": [{"index": index, **token}]}


def test_several_answers_have_counts_of_their_own(
    server: FakeServer, engine: RemoteEngine
) -> None:
    counts = [ReuseStats(disjoint_hit_tokens=9), ReuseStats(gpu_prefix_tokens=9)]
    told = [
        {"index": index, "kv_transfer_params": encode_reuse(stats)}
        for index, stats in enumerate(counts)
    ]
    events = [part(1, "x"), part(0, "a"), part(1, "y", "stop"), part(0, "b", "length")]
    done = b"data: [DONE]\n\n"
    server.script = [lambda *_: server.stream(*map(event, [*events, *told]), done)]
    deltas = list(engine.stream(PROMPT, n=2, temperature=1.0, seed=5))
    last = deltas[-1].completion
    assert last is not None
    assert [(answer.text, answer.finish_reason) for answer in last.answers] == [
        ("ab", "length"),
        ("xy", "stop"),
    ]
    reuse = [replace(answer.reuse, num_chunks=0) for answer in last.answers]
    assert reuse == counts
    assert [(d.index, d.text) for d in deltas if d.text] == [
        (1, "x"),
        (0, "a"),
        (1, "y"),
        (0, "b"),
    ]
    assert (server.bodies[0]["n"], server.headers[0]["x-daric-reuse"]) == (2, "2")


@pytest.mark.parametrize("events", [[part(0, "a", "stop")], [part(2, "a", "stop")]])
def test_answers_that_are_not_those_asked_for(
    server: FakeServer, engine: RemoteEngine, events: list[Any]
) -> None:
    done = b"data: [DONE]\n\n"
    server.script = [lambda *_: server.stream(*map(event, events), done)]
    with pytest.raises(EngineError, match=r"without an answer|another form"):
        engine.generate(PROMPT, n=2, temperature=1.0)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priorities_need_a_server_that_has_them(
    server: FakeServer, policy: str
) -> None:
    server.policy = policy
    with open_engine(server) as engine:
        if policy == "priority":
            engine.generate(PROMPT, priority=-3)
            assert server.bodies[0]["priority"] == -3
        else:
            with pytest.raises(ConfigError, match="--scheduling-policy=priority"):
                engine.generate(PROMPT, priority=-3)


def test_the_lowest_log_probability_is_minus_infinity(
    server: FakeServer, engine: RemoteEngine
) -> None:
    top = {"token_id:11": -0.5, "token_id:12": -9999.0}
    choice = {"index": 0, "text": "a", "token_ids": [11], "finish_reason": "stop"}
    choice["logprobs"] = {"top_logprobs": [top]}
    server.script = [
        lambda *_: server.stream(event({"choices": [choice]}), b"data: [DONE]\n\n")
    ]
    (entry,) = engine.generate(PROMPT, logprobs=1).logprobs or ()
    assert entry == {11: -0.5, 12: float("-inf")}


async def test_requests_run_concurrently(server: FakeServer) -> None:
    """Each answer waits until all have arrived, so that one after the other hangs."""
    arrived: list[None] = []
    num = 12

    async def all_there() -> None:
        arrived.append(None)
        while len(arrived) < num:
            await asyncio.sleep(0.001)

    choice = {"index": 0, "text": "a", "token_ids": [11], "finish_reason": "stop"}
    server.script = [
        lambda *_: server.stream(
            all_there, event({"choices": [choice]}), b"data: [DONE]\n\n"
        )
    ] * num
    async with open_engine(server) as engine:
        done = await asyncio.gather(*(engine.agenerate(PROMPT) for _ in range(num)))
    assert [completion.text for completion in done] == ["a"] * num


def test_deltas_arrive_before_the_answer_is_whole(
    server: FakeServer, engine: RemoteEngine
) -> None:
    seen: list[Delta] = []

    async def first_seen() -> None:
        while not seen:
            await asyncio.sleep(0.001)

    choice = {"index": 0, "text": "a", "token_ids": [11], "finish_reason": None}
    last = choice | {"finish_reason": "stop"}
    server.script = [
        lambda *_: server.stream(
            event({"choices": [choice]}),
            first_seen,
            event({"choices": [last]}),
            b"data: [DONE]\n\n",
        )
    ]
    for delta in engine.stream(PROMPT):
        seen.append(delta)
    assert [delta.text for delta in seen] == ["a", "a", ""]


def test_a_closed_engine_says_so(server: FakeServer) -> None:
    engine = open_engine(server)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError, match="open a new RemoteEngine"):
        engine.generate(PROMPT)
    with pytest.raises(EngineClosedError):
        engine.layout(ChunkedPrompt(question="new to it"))
