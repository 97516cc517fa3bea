"""ChatDaric on a fake engine: what it asks, and what it makes of the answers."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.load import dumps, load
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField
from pydantic import BaseModel, ValidationError

import daric_rag
from daric_rag import (
    ChatMessage,
    ConfigError,
    DaricConfig,
    Delta,
    DocumentPart,
    PromptError,
)
from daric_rag.integrations.langchain import ChatDaric, document_block
from tests.integrations.fakes import STATS, FakeEngine


def chat_on(engine: Any, **fields: Any) -> ChatDaric:
    return ChatDaric(engine=engine, **fields)


class Add(BaseModel):
    """Adds."""

    a: int


CALL = '{"name": "Add", "arguments": {"a": 3}}'


def test_importing_and_making_one_loads_neither_torch_nor_vllm() -> None:
    code = """
import sys
for name in ("torch", "vllm", "transformers"):
    sys.modules[name] = None  # importing it raises ImportError
from daric_rag.integrations.langchain import ChatDaric
print(ChatDaric(model="smollm2-135m")._llm_type)
print([name for name in sys.modules if name.startswith("daric_rag.runtime")])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "daric-chat\n[]\n", done.stderr


def test_an_ordinary_conversation() -> None:
    engine = FakeEngine("Four.")
    messages = [
        SystemMessage("Be brief."),
        HumanMessage("2 + 2?", name="ann"),
        AIMessage("4"),
        HumanMessage([{"type": "text", "text": "In words?"}]),
    ]
    answer = chat_on(engine, temperature=0.5, seed=3).invoke(messages)
    ((prompt, options),) = engine.requests
    assert prompt.messages == [
        ChatMessage("system", ["Be brief."]),
        ChatMessage("user", ["2 + 2?"], name="ann"),
        ChatMessage("assistant", ["4"]),
        ChatMessage("user", ["In words?"]),
    ]
    assert (options["temperature"], options["seed"], options["reuse"]) == (
        0.5,
        3,
        "daric",
    )
    assert answer.content == "Four."


def test_counts_reuse_and_ttft_are_told() -> None:
    answer = chat_on(FakeEngine("Four."), model=None).invoke("2 + 2?")
    assert answer.usage_metadata == {
        "input_tokens": 20,
        "output_tokens": 5,
        "total_tokens": 25,
        "input_token_details": {"cache_read": STATS.reused_tokens},
    }
    told = answer.response_metadata
    assert told["reuse"]["contiguous_hit_tokens"] == 8
    assert (told["finish_reason"], told["ttft_s"]) == ("stop", 0.5)
    assert told["model_provider"] == "daric"


async def test_all_four_ways_give_the_same() -> None:
    chat = chat_on(FakeEngine("Four <tool."))
    whole = chat.invoke("?")
    # The sums of all answers to a request, of which a stream has one.
    assert whole.response_metadata.pop("token_usage")["total_tokens"] == 31
    streamed = list(chat.stream("?"))
    assert len(streamed) > 5
    others: list[BaseMessage] = [await chat.ainvoke("?"), sum_of(streamed)]
    others.append(sum_of([chunk async for chunk in chat.astream("?")]))
    for other in others:
        assert isinstance(other, AIMessage)
        assert (other.text, other.usage_metadata) == (whole.text, whole.usage_metadata)
        other.response_metadata.pop("token_usage", None)
        assert other.response_metadata == whole.response_metadata
    assert [m.text for m in chat.batch(["?", "!"])] == [whole.text] * 2
    assert [m.text for m in await chat.abatch(["?", "!"])] == [whole.text] * 2


def sum_of(chunks: list[Any]) -> Any:
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


def test_log_probabilities_are_in_the_metadata() -> None:
    class Sure(FakeEngine):
        def generate(self, prompt: Any, **options: Any) -> Any:
            done = super().generate(prompt, **options)
            return replace(done, logprobs=({0: -0.5, 7: -2.0}, {1: -1.0}))

        def stream(self, prompt: Any, **options: Any) -> Any:
            done = self.generate(prompt, **options)
            yield Delta("Hm", (0,), done.logprobs[:1])
            yield Delta("m", (1,), done.logprobs[1:], done)

    chat = chat_on(Sure("Hm"), logprobs=2)
    for answer in (chat.invoke("?"), sum_of(list(chat.stream("?")))):
        first, second = answer.response_metadata["logprobs"]["content"]
        assert (first["token_id"], first["logprob"]) == (0, -0.5)
        assert first["top_logprobs"][1] == {"token_id": 7, "logprob": -2.0}
        assert second["logprob"] == -1.0


def test_a_stream_that_is_left_ends_the_request() -> None:
    ended: list[bool] = []

    class Watched(FakeEngine):
        def stream(self, prompt: Any, **options: Any) -> Any:
            try:
                yield from super().stream(prompt, **options)
            finally:
                ended.append(True)

    stream = chat_on(Watched("A long answer.")).stream("?")
    next(stream)
    stream.close()
    assert ended == [True]


def test_several_answers() -> None:
    chat = chat_on(FakeEngine("One.", "Two!!"), n=2, temperature=0.7)
    result = chat.generate([[HumanMessage("?")]])
    first, second = result.generations[0]
    assert (first.text, second.text) == ("One.", "Two!!")
    assert second.message.usage_metadata["output_tokens"] == 5  # type: ignore[union-attr]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["total_tokens"] == 20 + 4 + 5
    with pytest.raises(ConfigError, match="pass n=1"):
        list(chat.stream("?"))


def test_callbacks_hear_of_every_token_once() -> None:
    heard: list[str] = []

    class Handler(BaseCallbackHandler):
        def on_llm_new_token(self, token: Any, **_: Any) -> None:
            heard.append(token)

    chat = chat_on(FakeEngine("Four."), streaming=True)
    chat.invoke("?", config={"callbacks": [Handler()]})
    assert "".join(heard) == "Four."
    list(chat.stream("?", config={"callbacks": [Handler()]}))
    assert "".join(heard) == "Four.Four."


def test_the_rate_limiter_is_asked() -> None:
    asked: list[bool] = []

    class Limiter(InMemoryRateLimiter):
        def acquire(self, *, blocking: bool = True) -> bool:
            asked.append(blocking)
            return True

    chat_on(FakeEngine(), rate_limiter=Limiter()).invoke("?")
    assert asked == [True]


# ------------------------------------------------------------------------- documents


def test_documents_in_messages_are_chunks() -> None:
    engine = FakeEngine()
    blocks: list[Any] = [
        document_block("The mill.", "Mills"),
        {"type": "text", "text": "Whose?"},
    ]
    carried = [Document("A ferry.", metadata={"title": "Ferries"}), "Rain."]
    chat_on(engine).invoke(
        [HumanMessage(blocks, additional_kwargs={"documents": carried})]
    )
    ((prompt, _),) = engine.requests
    assert prompt.messages[0].parts() == (
        DocumentPart("A ferry.", "Ferries"),
        DocumentPart("Rain.", "Rain."),
        DocumentPart("The mill.", "Mills"),
        "Whose?",
    )


def test_delimited_text_is_cut_into_chunks() -> None:
    engine = FakeEngine()
    chat = chat_on(engine)
    chat.invoke("The mill.##Whose?")
    engine.config = DaricConfig(delimiter="##")  # type: ignore[attr-defined]
    chat = chat_on(engine)
    chat.invoke([AIMessage("a##b"), HumanMessage("The mill.##Rain.##Whose?")])
    plain, cut = [prompt.messages for prompt, _ in engine.requests]
    assert plain[0].parts() == ("The mill.##Whose?",)
    assert cut[0].parts() == ("a##b",)
    assert cut[1].parts() == (
        DocumentPart("The mill."),
        DocumentPart("Rain."),
        "Whose?",
    )


@pytest.mark.parametrize(
    ("messages", "mend"),
    [
        ([HumanMessage([{"type": "image", "url": "http://a"}])], "reads text only"),
        ([AIMessage([document_block("a")])], "message 0.*user, tool or system"),
        ([HumanMessage("a"), AIMessage("b")], "end with a message to answer"),
    ],
)
def test_what_no_prompt_can_be_made_of(messages: list[Any], mend: str) -> None:
    with pytest.raises(PromptError, match=mend):
        chat_on(FakeEngine()).invoke(messages)


def test_the_length_of_a_prompt() -> None:
    chat = chat_on(FakeEngine())
    shorter = chat.get_num_tokens_from_messages([HumanMessage("12345")])
    assert chat.get_num_tokens_from_messages([HumanMessage("1234567")]) == shorter + 2


# ----------------------------------------------------------------------------- tools


@pytest.mark.parametrize("has_tools", [True, False])
def test_a_call_that_is_asked_for_is_guided(has_tools: bool) -> None:
    engine = FakeEngine(CALL, has_tools=has_tools)
    chat = chat_on(engine).bind_tools([Add], tool_choice="any")
    for answer in (chat.invoke("?"), sum_of(list(chat.stream("?")))):
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("Add", {"a": 3})
        assert call["id"].startswith("call_")
        assert answer.text == ""
    prompt, options = engine.requests[0]
    assert options["json_schema"]["properties"]["name"] == {"const": "Add"}
    assert bool(prompt.tools) == has_tools
    assert prompt.messages[0].has_documents != has_tools


def test_calls_that_the_model_makes_itself() -> None:
    text = f"I add.<tool_call>{CALL}</tool_call>"
    engine = FakeEngine(text, has_tools=False)
    chat = chat_on(engine).bind_tools([Add])
    for answer in (chat.invoke("?"), sum_of(list(chat.stream("?")))):
        assert [call["args"] for call in answer.tool_calls] == [{"a": 3}]
        assert answer.text == "I add."
    assert "structural_tag" in engine.requests[0][1]
    (bare,) = [chat_on(FakeEngine(text)).invoke("?")]
    assert (bare.text, bare.tool_calls) == (text, [])


class ParsingEngine(FakeEngine):
    """Has one parser: calls are written ``name arguments`` behind a ``!``."""

    def tool_reader(self, name: str, tools: Any) -> Any:
        assert name == "exclaiming"
        assert tools[0]["function"]["name"] == "Add"
        return self.Reader()

    class Reader:
        skip_special_tokens = False
        text = ""

        def feed(self, text: str, token_ids: Any) -> str:
            assert token_ids
            before, self.text = self.text, self.text + text
            return "" if "!" in self.text else self.text[len(before) :]

        def finish(self) -> Any:
            return "", self.read(self.text)[1]

        def read(self, text: str) -> Any:
            before, _, call = text.partition("!")
            return before, [tuple(call.split(" ", 1))] if call else []


def test_a_named_parser_reads_calls() -> None:
    engine = ParsingEngine('I do.!Add {"a": 3}')
    chat = chat_on(engine, tool_parser="exclaiming").bind_tools([Add])
    for answer in (chat.invoke("?"), sum_of(list(chat.stream("?")))):
        assert [call["args"] for call in answer.tool_calls] == [{"a": 3}]
        assert answer.text == "I do."
    assert not engine.requests[0][1]["skip_special_tokens"]
    # One that must be made is guided, whatever form the model was trained for.
    engine = ParsingEngine(CALL)
    chat = chat_on(engine, tool_parser="exclaiming")
    answer = chat.bind_tools([Add], tool_choice="any").invoke("?")
    assert [call["args"] for call in answer.tool_calls] == [{"a": 3}]
    assert chat.invoke("?").text == CALL


def test_a_call_that_a_parser_reads_and_json_does_not_is_text() -> None:
    engine = ParsingEngine("!Add {a: 3}")
    chat = chat_on(engine, tool_parser="exclaiming").bind_tools([Add])
    for answer in (chat.invoke("?"), sum_of(list(chat.stream("?")))):
        assert (answer.text, answer.tool_calls) == ("Add({a: 3})", [])


def test_an_engine_without_parsers_is_told() -> None:
    chat = chat_on(FakeEngine(), tool_parser="hermes").bind_tools([Add])
    with pytest.raises(ConfigError, match="FakeEngine, has no parsers"):
        chat.invoke("?")


def test_no_tool_may_be_called() -> None:
    engine = FakeEngine(f"<tool_call>{CALL}</tool_call>")
    answer = chat_on(engine).bind_tools([Add], tool_choice="none").invoke("?")
    assert not answer.tool_calls
    assert not engine.requests[0][0].tools


def test_a_call_that_was_cut_short_stays_text() -> None:
    chat = chat_on(FakeEngine(CALL[:30])).bind_tools([Add], tool_choice="Add")
    for answer in (chat.invoke("?"), sum_of(list(chat.stream("?")))):
        assert not answer.tool_calls
        assert answer.text == CALL[:30]


def test_calls_and_results_of_earlier_turns() -> None:
    call = {"name": "Add", "args": {"a": 1}, "id": "7", "type": "tool_call"}
    blocks: list[Any] = [{"type": "text", "text": "I do."}, {"type": "tool_use"}]
    messages = [
        HumanMessage("Add."),
        AIMessage(blocks, tool_calls=[call]),
        ToolMessage("2", tool_call_id="7", name="Add"),
    ]
    with_template, without = FakeEngine(), FakeEngine(has_tools=False)
    for engine in (with_template, without):
        chat_on(engine).bind_tools([Add]).invoke(messages)
    *_, assistant, result = with_template.requests[0][0].messages
    assert assistant.tool_calls[0]["function"] == {"name": "Add", "arguments": {"a": 1}}
    assert assistant.parts() == ("I do.",)
    assert (result.role, result.tool_call_id) == ("tool", "7")
    assert without.requests[0][0].messages[-1].role == "user"


def test_a_guide_of_one_s_own_beside_tools() -> None:
    engine = FakeEngine(has_tools=False)
    chat = chat_on(engine)
    chat.bind_tools([Add], regex="a").invoke("?")
    options = engine.requests[0][1]
    assert "structural_tag" not in options
    assert options["regex"] == "a"
    with pytest.raises(ConfigError, match="json_schema and a tool call"):
        chat.bind_tools([Add], tool_choice="any", json_schema={}).invoke("?")


@pytest.mark.parametrize("choice", ["Subtract", {"type": "function"}])
def test_a_choice_of_no_tool_is_refused(choice: Any) -> None:
    with pytest.raises(ConfigError, match=r"tool_choice.*Add"):
        chat_on(FakeEngine()).bind_tools([Add], tool_choice=choice)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(method: Any) -> None:
    text = CALL if method == "function_calling" else '{"a": 3}'
    engine = FakeEngine(text)
    chat = chat_on(engine)
    assert chat.with_structured_output(Add, method=method).invoke("?") == Add(a=3)
    schema = engine.requests[0][1]["json_schema"]
    if method != "function_calling":
        assert schema == Add.model_json_schema()
    raw = chat.with_structured_output(Add, method=method, include_raw=True).invoke("?")
    assert isinstance(raw, dict)
    assert (raw["parsed"], raw["parsing_error"]) == (Add(a=3), None)
    assert isinstance(raw["raw"], AIMessage)


def test_structured_output_that_was_cut_short_says_so() -> None:
    chat = chat_on(FakeEngine('{"a": "three')).with_structured_output(
        Add, include_raw=True
    )
    raw = chat.invoke("?")
    assert isinstance(raw, dict)
    assert raw["parsed"] is None
    assert raw["parsing_error"] is not None


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("schema", [Add, Add.model_json_schema()])
def test_what_was_cut_short_is_not_completed(method: Any, schema: Any) -> None:
    """Half a JSON object would pass for a whole one, of a shorter number or text."""
    text = CALL if method == "function_calling" else '{"a": 3}'

    class Cut(FakeEngine):
        def generate(self, prompt: Any, **options: Any) -> Any:
            done = super().generate(prompt, **options)
            return replace(done, finish_reason="length")

    for engine in (Cut(text[:-1]), Cut(text), FakeEngine(text[:-1])):
        chat = chat_on(engine)
        with pytest.raises(OutputParserException, match="max_tokens"):
            chat.with_structured_output(schema, method=method).invoke("?")
        told = chat.with_structured_output(schema, method=method, include_raw=True)
        raw = told.invoke("?")
        assert isinstance(raw, dict)
        assert raw["parsed"] is None
        assert isinstance(raw["parsing_error"], OutputParserException)


def test_pieces_of_an_object_are_streamed() -> None:
    chat = chat_on(FakeEngine('{"a": 34}'))
    pieces = list(chat.with_structured_output(Add.model_json_schema()).stream("?"))
    assert pieces == [{}, {"a": 3}, {"a": 34}]


def test_json_of_whatever_fields() -> None:
    engine = FakeEngine('{"b": [1]}')
    chat = chat_on(engine).with_structured_output(method="json_mode")
    assert chat.invoke("?") == {"b": [1]}
    assert engine.requests[0][1]["json_object"] is True
    with pytest.raises(ConfigError, match="needs a schema"):
        chat_on(engine).with_structured_output()
    with pytest.raises(ConfigError, match="must be one of"):
        chat_on(engine).with_structured_output(Add, method="xml")  # type: ignore[arg-type]


# -------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": "a", "unknown": 1},
        {"model": "a", "temperature": -1},
        {"model": "a", "reuse": "on"},
        {"model": "a", "config": {"unknown": 1}},
        {"model": "a", "n": 2},
        {"engine": FakeEngine(), "store": "x"},
        {"base_url": "http://s", "engine_options": {"headers": {"x": "secret"}}},
    ],
)
def test_bad_settings_are_refused_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatDaric(**fields)


def test_unknown_keywords_and_other_models_are_refused() -> None:
    chat = chat_on(FakeEngine())
    with pytest.raises(ConfigError, match="'unknown' cannot be passed"):
        chat.invoke("?", unknown=1)
    with pytest.raises(ConfigError, match="another ChatDaric"):
        chat.invoke("?", model="b")


@pytest.mark.parametrize("change", [{"model": "b"}, {"config": {"mtaf": "exp"}}])
def test_another_engine_needs_another_object(change: dict[str, Any]) -> None:
    chat = ChatDaric(model="a").model_copy(update=change)
    with pytest.raises(ConfigError, match="make a new one"):
        chat.invoke("?")


def test_options_of_one_request() -> None:
    engine = FakeEngine()
    chat = chat_on(engine, stop=["a"])
    chat.invoke("?", reuse="off", max_tokens=5, stop=["b"])
    chat.bind(namespace="tenant").invoke("?")
    (_, first), (_, second) = engine.requests
    assert (first["reuse"], first["max_tokens"], first["stop"]) == ("off", 5, ["b"])
    assert (second["namespace"], second["stop"]) == ("tenant", ["a"])


def test_the_response_cache_does_not_mix_settings() -> None:
    """One cache for all: an answer is another's only if all that matters is equal."""
    cache = InMemoryCache()
    engine = FakeEngine()
    same: list[dict[str, Any]] = [{}, {}]
    others: list[dict[str, Any]] = [
        {"reuse": "off"},
        {"namespace": "b"},
        {"config": DaricConfig(avg_chunk_budget=8)},
        {"temperature": 0.5},
        {"stop": ["a"]},
        {"stop": ["b"]},
    ]
    for fields in [*same, *others]:
        fields = {"model": "a"} | fields
        chat = ChatDaric(cache=cache, **fields)
        chat._source._engine = engine
        chat.invoke("?")
        chat.invoke("?", max_tokens=5)
    assert len(engine.requests) == 2 * (1 + len(others))
    chat_on(FakeEngine("Other."), cache=cache).invoke("?")
    (other,) = [chat_on(FakeEngine("Else."), cache=cache).invoke("?")]
    assert other.text == "Else."


def test_secrets_are_nowhere_to_be_seen() -> None:
    secret = "the-secret-key"
    chat = ChatDaric(base_url="http://server", api_key=secret)  # type: ignore[arg-type]
    shown = [repr(chat), str(chat._identifying_params), dumps(chat)]
    shown += [chat._get_llm_string(), str(chat._get_ls_params())]
    assert not any(secret in text for text in shown)
    for options in ({"hf_token": secret}, {"dtype": "float32"}):
        other = ChatDaric(model="a", engine_options=options)
        shown += [repr(other), str(other._identifying_params), dumps(other)]
        shown += [other._get_llm_string(), str(other._get_ls_params())]
    assert not any(secret in text for text in shown)
    # Yet answers of the one are not the other's.
    assert shown[-2] != shown[-7]


class Holder(BaseModel):
    chat: ChatDaric


def test_a_field_of_another_model_keeps_its_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[FakeEngine] = []

    def open_engine(*_: Any, **__: Any) -> FakeEngine:
        opened.append(FakeEngine())
        return opened[-1]

    monkeypatch.setattr(daric_rag, "EmbeddedEngine", open_engine, raising=False)
    with ChatDaric(model="a") as chat:
        source = chat._source
        chat.invoke("?")
        assert Holder(chat=chat).chat._source is source
    assert opened[0].num_closed == 1


def test_a_configured_copy_streams_on_the_same_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[FakeEngine] = []

    def open_engine(*_: Any, **__: Any) -> FakeEngine:
        opened.append(FakeEngine("Four."))
        return opened[-1]

    monkeypatch.setattr(daric_rag, "EmbeddedEngine", open_engine, raising=False)
    with ChatDaric(model="a") as chat:
        told = chat.configurable_fields(temperature=ConfigurableField(id="t"))
        for temperature in (0.0, 0.5, 0.7):
            config: Any = {"configurable": {"t": temperature}}
            assert len(list(told.stream("?", config))) > 5
            gc.collect()
        assert len(opened) == 1
        options = [given["temperature"] for _, given in opened[0].requests]
        assert options == [0.0, 0.5, 0.7]
        assert opened[0].num_closed == 0


def test_a_dropped_queue_is_not_kept() -> None:
    chat = chat_on(FakeEngine())
    queue = chat.background_prewarm()
    gone = weakref.ref(queue)
    del queue
    gc.collect()
    assert gone() is None
    kept = chat.background_prewarm()
    chat.close()
    assert kept.submit(["late"]) == 0


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
def test_what_was_serialised_is_loaded_again() -> None:
    chat = ChatDaric(model="a", config=DaricConfig(avg_chunk_budget=8), reuse="off")
    loaded = load(
        chat.to_json(),
        allowed_objects=[ChatDaric],
        valid_namespaces=["daric_rag"],
    )
    assert loaded.asdict() == chat.asdict()
    assert loaded.config["avg_chunk_budget"] == 8


def test_tracing_names_model_and_settings() -> None:
    params = ChatDaric(model="a", max_tokens=7, stop=["x"])._get_ls_params()
    assert params == {
        "ls_provider": "daric",
        "ls_model_type": "chat",
        "ls_model_name": "a",
        "ls_temperature": 0.0,
        "ls_max_tokens": 7,
        "ls_stop": ["x"],
    }


# --------------------------------------------------------------- counting and pickling


def test_messages_that_are_no_conversation_are_counted_one_by_one() -> None:
    chat = chat_on(FakeEngine())
    call = {"name": "Add", "args": {"a": 1}, "id": "7", "type": "tool_call"}
    assert chat.get_num_tokens_from_messages([]) == 0
    halves = [HumanMessage("12345"), AIMessage("123"), AIMessage("")]
    alone = [[HumanMessage("12345")], [HumanMessage("123")]]
    lens = [chat.get_num_tokens_from_messages(messages) for messages in alone]
    assert chat.get_num_tokens_from_messages(halves) == sum(lens)
    calling = [AIMessage("", tool_calls=[call])]
    assert chat.get_num_tokens_from_messages(calling) > 20
    messages = [HumanMessage("1" * 50), AIMessage("2" * 50), HumanMessage("3" * 50)]
    kept = trim_messages(messages, max_tokens=125, token_counter=chat)
    assert [message.text[0] for message in kept] == ["2", "3"]


def test_tokens_are_the_engine_s() -> None:
    class Tokenizer:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [ord(char) for char in text]

    engine = FakeEngine()
    with pytest.raises(ConfigError, match="custom_get_token_ids="):
        chat_on(engine).get_token_ids("ab")
    engine.tokenizer = Tokenizer()  # type: ignore[attr-defined]
    assert chat_on(engine).get_token_ids("ab") == [97, 98]
    assert chat_on(engine).get_num_tokens("abc") == 3


async def test_asking_for_a_template_does_not_hold_up_the_event_loop() -> None:
    class Slow(FakeEngine):
        def layout(self, prompt: Any) -> Any:
            threads.append(threading.current_thread())
            return super().layout(prompt)

    threads: list[threading.Thread] = []
    chat = chat_on(Slow(CALL)).bind_tools([Add])
    await chat.ainvoke("?")
    assert len([chunk async for chunk in chat_on(Slow()).astream("?", tools=[])]) > 1
    chat = chat_on(Slow(CALL)).bind_tools([Add])
    assert [chunk async for chunk in chat.astream("?")]
    assert len(threads) == 2
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("is_open", [False, True])
def test_pickling(monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
    monkeypatch.setattr(
        daric_rag, "RemoteEngine", lambda *_, **__: FakeEngine(), raising=False
    )
    key = "the-secret-key"
    chat = ChatDaric(base_url="http://s", api_key=key, seed=3)  # type: ignore[arg-type]
    if is_open:
        chat.invoke("?")
    pickled = pickle.dumps(chat)
    assert key.encode() not in pickled
    monkeypatch.setenv("DARIC_API_KEY", "another")
    loaded = pickle.loads(pickled)
    assert (loaded.base_url, loaded.seed) == ("http://s", 3)
    assert loaded.api_key.get_secret_value() == "another"
    assert not loaded._source.is_open
    loaded.close()
    chat.close()
    with pytest.raises(TypeError, match="engine="):
        pickle.dumps(chat_on(FakeEngine()))


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_an_answer_s_schema_needs_no_title(method: Any) -> None:
    engine = FakeEngine('{"a": 3}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat = chat_on(engine).with_structured_output(schema, method=method)
    assert chat.invoke("?") == {"a": 3}
    assert engine.requests[0][1]["json_schema"]["properties"] == schema["properties"]
