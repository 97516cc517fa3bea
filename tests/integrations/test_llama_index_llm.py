"""`DaricLLM` on a fake engine: eight methods, prompts, structured answers."""

import asyncio
from dataclasses import asdict, replace

import pytest
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from daric_rag import engine
from daric_rag.engine import ChatPrompt, DocumentPart
from daric_rag.errors import PromptError
from daric_rag.integrations.llama_index import DaricLLM
from daric_rag.trace import ChunkTrace, RequestTrace
from tests.integrations import fake_engine
from tests.integrations.fake_engine import DONE, FakeEngine

HELLO = [ChatMessage("Hello?")]
USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}


@pytest.fixture
def fake():
    return FakeEngine()


@pytest.fixture
def llm(fake):
    return DaricLLM(engine=fake)


async def consumed(answers):
    return [answer async for answer in answers]


def asked(llm, messages, **kwargs):
    """The prompt that a chat comes to."""
    llm.chat(messages, **kwargs)
    return llm.engine.asked[-1][0]


def user(*blocks):
    return ChatMessage(list(blocks), role="user")


# -------------------------------------------------------------------------- answers


async def test_eight_methods_give_one_answer(llm, fake):
    chats = [
        llm.chat(HELLO),
        await llm.achat(HELLO),
        list(llm.stream_chat(HELLO))[-1],
        (await consumed(await llm.astream_chat(HELLO)))[-1],
    ]
    texts = [
        llm.complete("Hello?"),
        await llm.acomplete("Hello?"),
        list(llm.stream_complete("Hello?"))[-1],
        (await consumed(await llm.astream_complete("Hello?")))[-1],
    ]
    assert {answer.message.content for answer in chats} == {DONE.text}
    assert {answer.message.role.value for answer in chats} == {"assistant"}
    assert {answer.text for answer in texts} == {DONE.text}
    for answer in (*chats, *texts):
        assert answer.additional_kwargs == {
            **USAGE,
            "finish_reason": "stop",
            "cached_tokens": 6,
        }
        assert answer.raw["usage"] == {
            **USAGE,
            "prompt_tokens_details": {"cached_tokens": 6},
        }
        assert answer.raw["reuse"]["hit_tokens"] == 4
        assert (answer.raw["ttft_s"], answer.raw["token_ids"]) == (0.5, [1, 2])
    prompts = [(p.messages[0].parts(), p.messages[0].role) for p, _ in fake.asked]
    assert prompts == [(("Hello?",), "user")] * 8


async def test_streams_grow(llm):
    for answers in (
        list(llm.stream_chat(HELLO)),
        await consumed(await llm.astream_chat(HELLO)),
    ):
        assert [answer.delta for answer in answers] == ["Two ", "words."]
        assert [a.message.content for a in answers] == ["Two ", "Two words."]
        assert answers[0].raw is None
        assert answers[0].additional_kwargs == {}
    for texts in (
        list(llm.stream_complete("x")),
        await consumed(await llm.astream_complete("x")),
    ):
        assert [answer.delta for answer in texts] == ["Two ", "words."]
        assert [answer.text for answer in texts] == ["Two ", "Two words."]


def test_logprobs_have_the_generated_token_first(llm, fake):
    named = [["token_id:1", "token_id:5"], ["token_id:2", "token_id:6"]]
    whole = llm.chat(HELLO, logprobs=1).logprobs
    streamed = [a.logprobs[0] for a in llm.stream_complete("x", logprobs=1)]
    assert [[p.token for p in step] for step in whole] == named
    assert whole[1][0].logprob == -1.5
    assert streamed == whole
    assert llm.chat(HELLO).logprobs is None


def test_logprobs_have_texts_where_the_engine_has_a_tokenizer(llm, fake):
    fake.tokenizer = type("T", (), {"decode": staticmethod(lambda ids: f"<{ids[0]}>")})
    (first, _) = llm.chat(HELLO, logprobs=1).logprobs
    assert [p.token for p in first] == ["<1>", "<5>"]


def test_a_trace_is_told_in_plain_values(llm, monkeypatch):
    trace = RequestTrace(10, (ChunkTrace(0, 10, "recomputed"),))
    monkeypatch.setattr(fake_engine, "DONE", replace(DONE, trace=trace))
    told = llm.chat(HELLO, trace=True).raw["trace"]
    assert told == asdict(trace)
    assert told["prompt_len"] == 10


async def test_a_stream_that_is_left_is_aborted():
    class Aborted(FakeEngine):
        num_aborted = 0

        def stream(self, prompt, **options):
            try:
                yield from super().stream(prompt, **options)
            except GeneratorExit:
                self.num_aborted += 1
                raise

        async def astream(self, prompt, **options):
            deltas = self.stream(prompt, **options)
            for delta in deltas:
                try:
                    yield delta
                finally:
                    deltas.close()

    fake = Aborted()
    llm = DaricLLM(engine=fake)
    answers = llm.stream_chat(HELLO)
    next(answers)
    answers.close()
    assert fake.num_aborted == 1
    answers = await llm.astream_complete("x")
    await anext(answers)
    await answers.aclose()
    # Core's wrapper leaves its inner generator to the event loop.
    del answers
    for _ in range(5):
        await asyncio.sleep(0)
    assert fake.num_aborted == 2


# -------------------------------------------------------------------------- prompts


def test_a_conversation_with_documents_is_a_chat_prompt(llm):
    cited = CitableBlock(title="B", source="b.txt", content="Second.")
    prompt = asked(
        llm,
        [
            ChatMessage("Be brief.", role="developer"),
            ChatMessage("Who?", role="user"),
            ChatMessage("Me.", role="chatbot"),
            user(
                DocumentBlock(data=b"First.", title="A"),
                cited,
                TextBlock(text="Which"),
                TextBlock(text="one?"),
            ),
        ],
    )
    assert prompt == ChatPrompt(
        [
            engine.ChatMessage("system", ["Be brief."], tool_calls=[]),
            engine.ChatMessage("user", ["Who?"], tool_calls=[]),
            engine.ChatMessage("assistant", ["Me."], tool_calls=[]),
            engine.ChatMessage(
                "user",
                [
                    DocumentPart("First.", "A"),
                    DocumentPart("Second.", "B"),
                    "Which\none?",
                ],
                tool_calls=[],
            ),
        ],
        [],
    )


def test_tools_and_their_calls(llm):
    def lookup(word: str) -> str:
        """Looks a word up."""
        return word

    function = {"name": "lookup", "arguments": {"word": "a"}}
    call = {"id": "1", "type": "function", "function": function}
    block = ToolCallBlock(
        tool_call_id="1", tool_name="lookup", tool_kwargs={"word": "a"}
    )
    for assistant in (
        ChatMessage([ThinkingBlock(content="Hm."), block], role="assistant"),
        ChatMessage(role="assistant", additional_kwargs={"tool_calls": [call]}),
    ):
        told = {"tool_call_id": "1", "name": "lookup"}
        result = ChatMessage("A letter.", role="tool", additional_kwargs=told)
        tools = [FunctionTool.from_defaults(lookup), {"function": {"name": "own"}}]
        prompt = asked(llm, [*HELLO, assistant, result], tools=tools)
        assert prompt.messages[1].tool_calls == [call]
        assert prompt.messages[1].parts() == ()
        assert prompt.messages[2].tool_call_id == "1"
        assert prompt.messages[2].name == "lookup"
        names = [tool["function"]["name"] for tool in prompt.tools]
        assert names == ["lookup", "own"]
        assert "word" in prompt.tools[0]["function"]["parameters"]["properties"]


@pytest.mark.parametrize(
    ("block", "named"),
    [
        (ImageBlock(url="http://a/b.png"), "ImageBlock"),
        (DocumentBlock(url="http://a/b.txt"), "no local text"),
        (DocumentBlock(data=b"%PDF-1.4", document_mimetype="application/pdf"), "text"),
        (DocumentBlock(data=b"\xff\xfe\xfa", document_mimetype="text/plain"), "UTF-8"),
        (DocumentBlock(path="/no/such.txt", document_mimetype="text/plain"), "read"),
        (CitableBlock(title="", source="", content=[ImageBlock(image=b"1")]), "Image"),
    ],
)
def test_what_is_no_text_is_refused(llm, block, named):
    with pytest.raises(PromptError, match=named):
        llm.chat([user(block, TextBlock(text="What is it?"))])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "must end with a message to answer"),
        ([ChatMessage("Hi.", role="assistant")], "must end with a message to answer"),
        ([ChatMessage("", role="user")], "is empty"),
        ([{"role": "user", "content": "Hello?"}], "message 0 is a dict"),
    ],
)
async def test_what_cannot_be_answered_is_refused(llm, messages, named):
    with pytest.raises(PromptError, match=named):
        llm.chat(messages)
    with pytest.raises(PromptError, match=named):
        await llm.achat(messages)


def test_documents_of_files_and_cache_points(llm, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Of a file.")
    blocks = [DocumentBlock(path=path), CachePoint(cache_control={"type": "e"})]
    prompt = asked(llm, [user(*blocks, TextBlock(text="Q?"))])
    assert prompt.messages[0].parts() == (DocumentPart("Of a file."), "Q?")


def test_formatted_text_is_raw(llm, fake):
    llm.complete("<|user|>Hello", formatted=True)
    list(llm.stream_complete("<|user|>Hello", formatted=True))
    assert [prompt for prompt, _ in fake.asked] == ["<|user|>Hello"] * 2


# ----------------------------------------------------------------- structured answers


class Town(BaseModel):
    name: str
    founded: int


TOWN = Town(name="Skerrow", founded=1204)


async def test_structured_predictions_are_guided(llm, fake, monkeypatch):
    monkeypatch.setattr(fake_engine, "DONE", replace(DONE, text=TOWN.model_dump_json()))
    prompt = PromptTemplate("Which town is {what}?")
    found = [
        llm.structured_predict(Town, prompt, what="old", llm_kwargs={"seed": 1}),
        await llm.astructured_predict(Town, prompt, what="old"),
        llm.as_structured_llm(Town).chat(HELLO).raw,
        (await llm.as_structured_llm(Town).acomplete("Old?")).raw,
    ]
    assert found == [TOWN] * 4
    assert {o["json_schema"]["title"] for _, o in fake.asked} == {"Town"}
    assert fake.asked[0][1]["seed"] == 1


async def test_structured_streams_are_guided(llm, fake, monkeypatch):
    monkeypatch.setattr(fake_engine, "DONE", replace(DONE, text=TOWN.model_dump_json()))
    prompt = PromptTemplate("Which town is {what}?")
    partial = list(llm.stream_structured_predict(Town, prompt, what="old"))
    stream = await llm.astream_structured_predict(Town, prompt, what="old")
    for last in (partial[-1], (await consumed(stream))[-1]):
        assert (last.name, last.founded) == ("Skerrow", 1204)
    assert [o["json_schema"]["title"] for _, o in fake.asked] == ["Town"] * 2
