"""LlamaIndex on an embedded engine with the real model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from llama_index.core import SummaryIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import BaseModel

from daric_rag import ChunkedPrompt, EmbeddedEngine, PromptBuilder
from daric_rag.data import load_demo_sets
from daric_rag.integrations.llama_index import (
    DaricLLM,
    DaricPrewarmTransform,
    DaricQueryEngine,
    DaricSynthesizer,
)

pytestmark = [pytest.mark.engine, pytest.mark.real_model]

RECORD = load_demo_sets()["town_archive"][0]
BUILDER = PromptBuilder(system=RECORD.system)
NODES = [
    NodeWithScore(node=TextNode(text=text, metadata={"read": index}), score=1 / index)
    for index, text in enumerate(RECORD.chunks[:6], start=1)
]
MESSAGES = [
    ChatMessage("Answer in one sentence.", role="system"),
    ChatMessage("What is a bridge?", role="user"),
]


@pytest.fixture(scope="module")
def engine(real_model: Path) -> Iterator[EmbeddedEngine]:
    options = {"dtype": "float32", "max_model_len": 2048}
    with EmbeddedEngine(str(real_model), store=":memory:", **options) as engine:
        yield engine


@pytest.fixture
def llm(engine: EmbeddedEngine) -> DaricLLM:
    return DaricLLM(engine=engine, max_tokens=12)


class Answers(BaseEventHandler):
    """Keeps the token ids of every answer."""

    token_ids: list

    def handle(self, event: Any, **_: Any) -> None:
        if event.class_name() == "LLMChatEndEvent":
            self.token_ids.append(event.response.raw["token_ids"])


@pytest.fixture
def answers() -> Iterator[list[list[int]]]:
    handler, root = Answers(token_ids=[]), get_dispatcher()
    root.add_event_handler(handler)
    yield handler.token_ids
    root.event_handlers.remove(handler)


async def last(answers: AsyncIterator[Any]) -> Any:
    return [answer async for answer in answers][-1]


def document_len(engine: EmbeddedEngine, nodes: list[NodeWithScore]) -> int:
    """Tokens of the documents among a prompt's chunks."""
    chunks = engine.layout(BUILDER.build(nodes, "Why?").prompt).chunks
    return sum(chunk.end - chunk.start for chunk in chunks[1:-1])


async def test_eight_methods(llm: DaricLLM, engine: EmbeddedEngine) -> None:
    expected = engine.generate(
        ChunkedPrompt(system="Answer in one sentence.", question="What is a bridge?"),
        max_tokens=12,
    )
    chats = [
        llm.chat(MESSAGES),
        await llm.achat(MESSAGES),
        list(llm.stream_chat(MESSAGES))[-1],
        await last(await llm.astream_chat(MESSAGES)),
    ]
    assert {answer.message.content for answer in chats} == {expected.text}
    question = "What is a bridge?"
    texts = [
        llm.complete(question),
        await llm.acomplete(question),
        list(llm.stream_complete(question))[-1],
        await last(await llm.astream_complete(question)),
    ]
    assert len({answer.text for answer in texts}) == 1
    for answer in (*chats, *texts):
        assert answer.additional_kwargs["completion_tokens"] == 12
        assert answer.additional_kwargs["finish_reason"] == "length"
    for answer in chats:
        assert answer.raw["token_ids"] == list(expected.token_ids)
        assert answer.additional_kwargs["prompt_tokens"] == expected.reuse.prompt_tokens


def test_stop_and_logprobs(llm: DaricLLM) -> None:
    whole = llm.chat(MESSAGES, logprobs=2)
    text = whole.message.content
    assert "".join(step[0].token for step in whole.logprobs) == text
    assert {len(step) for step in whole.logprobs} <= {2, 3}
    word = text.split()[3]
    cut = llm.chat(MESSAGES, stop=[word])
    assert cut.message.content == text[: text.index(word)]
    assert cut.additional_kwargs["finish_reason"] == "stop"


def test_raw_text_has_no_template(llm: DaricLLM, engine: EmbeddedEngine) -> None:
    raw = llm.complete("One, two,", formatted=True)
    assert raw.raw["usage"]["prompt_tokens"] == len(
        engine.tokenizer.encode("One, two,")
    )
    assert (
        raw.raw["usage"]["prompt_tokens"]
        < llm.complete("One, two,").raw["usage"]["prompt_tokens"]
    )


async def test_concurrent_chats_answer_as_in_turn(llm: DaricLLM) -> None:
    asked = [[ChatMessage(f"What is {n} plus one?", role="user")] for n in range(8)]
    in_turn = [llm.chat(messages).message.content for messages in asked]
    together = await asyncio.gather(*(llm.achat(messages) for messages in asked))
    assert [answer.message.content for answer in together] == in_turn


def test_the_synthesizer_answers_as_the_engine_by_hand(
    llm: DaricLLM, engine: EmbeddedEngine, answers: list[list[int]]
) -> None:
    orders = (NODES, NODES[::-1])
    for order in orders:
        # Cold in a tenant of its own, so that neither profits from the other.
        by_hand = engine.generate(
            BUILDER.build(order, RECORD.question).prompt,
            max_tokens=12,
            namespace="hand",
        )
        synthesizer = DaricSynthesizer(llm, builder=BUILDER)
        response = synthesizer.synthesize(RECORD.question, order, namespace="synthesis")
        assert answers.pop() == list(by_hand.token_ids)
        assert response.response == by_hand.text
        report = response.metadata["daric"]
        assert report["reuse"]["hit_tokens"] == by_hand.reuse.hit_tokens


@pytest.mark.parametrize("streaming", [False, True])
def test_a_second_query_in_another_order_reuses(
    engine: EmbeddedEngine, streaming: bool
) -> None:
    llm = DaricLLM(engine=engine, max_tokens=4, namespace=f"streaming {streaming}")
    for number, order in enumerate((NODES, NODES[::-1], NODES[2:] + NODES[:2])):
        index = SummaryIndex([scored.node for scored in order])
        query_engine = DaricQueryEngine.from_index(
            index, llm, builder=BUILDER, streaming=streaming
        )
        response = query_engine.query(RECORD.question)
        assert str(response)
        cached = response.metadata["daric"]["usage"]["prompt_tokens_details"]
        share = cached["cached_tokens"] / document_len(engine, order)
        assert share < 0.1 if number == 0 else share > 0.8


async def test_indexed_nodes_are_hits_at_the_first_query(
    engine: EmbeddedEngine,
) -> None:
    llm = DaricLLM(engine=engine, max_tokens=4, namespace="indexed")
    transform = DaricPrewarmTransform(llm=llm, builder=BUILDER)
    await transform.acall([scored.node for scored in NODES])
    synthesizer = DaricSynthesizer(llm, builder=BUILDER)
    response = await synthesizer.asynthesize(RECORD.question, NODES)
    hit_tokens = response.metadata["daric"]["reuse"]["hit_tokens"]
    assert hit_tokens == document_len(engine, NODES)


def test_nodes_beyond_the_context_are_dropped(llm: DaricLLM) -> None:
    many = [
        NodeWithScore(node=TextNode(text=f"{n}: {RECORD.chunks[0]}"), score=n)
        for n in range(60)
    ]
    response = DaricSynthesizer(llm).synthesize(RECORD.question, many, max_tokens=4)
    report = response.metadata["daric"]
    kept, dropped = report["kept"], report["dropped"]
    assert len(kept) + len(dropped) == 60
    assert kept == [scored.node_id for scored in many[-len(kept) :]]
    num_tokens = report["usage"]["prompt_tokens"]
    longest = num_tokens // len(kept) + 10
    assert 2044 - longest <= num_tokens <= 2044


class Verdict(BaseModel):
    answer: Literal["yes", "no"]


async def test_answers_are_objects(llm: DaricLLM) -> None:
    synthesizer = DaricSynthesizer(llm, builder=BUILDER, output_cls=Verdict)
    question = "Is a bridge named in the documents?"
    first = synthesizer.synthesize(question, NODES[:2], max_tokens=24)
    second = await synthesizer.asynthesize(question, NODES[:2], max_tokens=24)
    assert isinstance(first.response, Verdict)
    assert second.response == first.response
    prompt = PromptTemplate("Is the {what} wet?")
    assert llm.structured_predict(
        Verdict, prompt, llm_kwargs={"max_tokens": 24}, what="sea"
    ).answer in ("yes", "no")
