"""`DaricLLM` on a fake engine: options, settings, secrets, events."""

import pickle
import subprocess
import sys
from copy import deepcopy

import pytest
from llama_index.core.base.llms.types import (
    ChatMessage,
)
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.prompts import PromptTemplate
from pydantic import ValidationError

import daric_rag
from daric_rag import DaricConfig
from daric_rag.errors import ConfigError, EngineClosedError
from daric_rag.integrations.llama_index import DaricLLM
from tests.integrations.fake_engine import DONE, FakeEngine

HELLO = [ChatMessage("Hello?")]
SECRET = "sk-very-secret"


@pytest.fixture
def fake():
    return FakeEngine()


@pytest.fixture
def llm(fake):
    return DaricLLM(engine=fake)


async def consumed(answers):
    return [answer async for answer in answers]


# -------------------------------------------------------------------------- options


async def test_options_of_the_object_and_of_the_call(fake):
    llm = DaricLLM(
        engine=fake, max_tokens=5, stop=["x"], additional_kwargs={"priority": 3}
    )
    llm.chat(HELLO, temperature=0.5, seed=1)
    await llm.acomplete("x", reuse="off", priority=1)
    first, second = (options for _, options in fake.asked)
    assert first == {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 1.0,
        "stop": ["x"],
        "seed": 1,
        "logprobs": None,
        "reuse": "daric",
        "namespace": None,
        "conversation": None,
        "priority": 3,
    }
    assert (second["reuse"], second["priority"], second["seed"]) == ("off", 1, None)


@pytest.mark.parametrize("method", ["chat", "stream_chat", "complete"])
def test_unknown_options_of_a_call_are_refused(llm, method):
    with pytest.raises(ConfigError, match="'top_q' is not a generation option"):
        getattr(llm, method)(HELLO if "chat" in method else "Hello?", top_q=1)


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"top_q": 1}, ValidationError, "top_q"),
        ({"additional_kwargs": {"top_q": 1}}, ConfigError, "'top_q'"),
        ({"additional_kwargs": {"n": 2}}, ConfigError, "hold one answer"),
        ({"temperature": -1}, ConfigError, "temperature is -1"),
        ({"max_tokens": 0}, ConfigError, "max_tokens is 0"),
        ({"reuse": "some"}, ValidationError, "reuse"),
        ({"context_window": 0}, ValidationError, "context_window"),
        ({"messages_to_prompt": str}, ConfigError, "chat template"),
        ({"completion_to_prompt": str}, ConfigError, "formatted=True"),
        ({"store": "kv"}, ConfigError, "store with engine="),
        ({"api_key": SECRET}, ConfigError, "api_key with engine="),
    ],
)
def test_settings_that_cannot_be_used(fake, fields, error, named):
    with pytest.raises(error, match=named):
        DaricLLM(engine=fake, **fields)


def test_a_configuration_may_be_a_mapping():
    config = DaricConfig(avg_chunk_budget=64)
    assert DaricLLM("m", config={"avg_chunk_budget": 64}).config == config
    with pytest.raises(ValidationError, match="avg_chunk_budget"):
        DaricLLM("m", config={"avg_chunk_budge": 64})


# --------------------------------------------------------------------------- engine


def test_the_engine_opens_on_first_use_with_the_settings(monkeypatch):
    opened = []

    def open_engine(*arguments, **options):
        opened.append((arguments, options))
        return FakeEngine()

    # Looked up there first; to ask for the real one would import vLLM.
    monkeypatch.setitem(vars(daric_rag), "EmbeddedEngine", open_engine)
    monkeypatch.setattr(FakeEngine, "close", lambda self: None, raising=False)
    llm = DaricLLM(
        "m", store="kv", context_window=50, engine_options={"dtype": "float32"}
    )
    assert llm.metadata.context_window == 50
    assert llm.to_payload()["model_name"] == "m"
    assert opened == []
    with llm:
        llm.chat(HELLO)
        llm.chat(HELLO)
    ((arguments, options),) = opened
    assert arguments == ("m",)
    assert options == {"store": "kv", "config": DaricConfig(), "dtype": "float32"}
    with pytest.raises(EngineClosedError):
        llm.chat(HELLO)


async def test_a_server_is_asked_with_the_key_of_the_environment(monkeypatch):
    opened = []

    def open_engine(*arguments, **options):
        opened.append((arguments, options))
        return FakeEngine()

    monkeypatch.setitem(vars(daric_rag), "RemoteEngine", open_engine)
    monkeypatch.setattr(FakeEngine, "close", lambda self: None, raising=False)
    monkeypatch.setenv("DARIC_API_KEY", SECRET)
    async with DaricLLM(base_url="http://host:8000") as llm:
        assert (await llm.achat(HELLO)).message.content == DONE.text
    ((arguments, options),) = opened
    assert arguments == ("http://host:8000",)
    assert options == {"api_key": SECRET, "model": None, "config": DaricConfig()}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "model is missing"),
        ({"model": "m", "api_key": SECRET}, "api_key is for a server"),
        ({"base_url": "http://host", "store": "kv"}, "a server has its own store"),
    ],
)
def test_settings_that_no_engine_opens_with(fields, named):
    with pytest.raises(ConfigError, match=named):
        DaricLLM(**fields)


def test_a_given_engine_is_not_closed(llm, fake):
    # The fake has no close() to call.
    llm.close()
    assert fake.asked == []


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"store": "kv"}, {"engine_options": {"dtype": "x"}}]
)
async def test_a_changed_copy_is_refused(change):
    llm = DaricLLM("m", context_window=50)
    with pytest.raises(ValidationError, match="frozen"):
        setattr(llm, *next(iter(change.items())))
    copy = llm.model_copy(update=change)
    with pytest.raises(ConfigError, match="make a new one"):
        copy.chat(HELLO)
    with pytest.raises(ConfigError, match="make a new one"):
        await copy.achat(HELLO)


def test_a_copy_may_have_other_options(llm, fake):
    llm.model_copy(update={"seed": 5}).chat(HELLO)
    deepcopy(llm).chat(HELLO, seed=6)
    assert [options["seed"] for _, options in fake.asked] == [5, 6]


def test_metadata(llm, fake):
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output) == (100, 256)
    assert metadata.is_chat_model
    assert metadata.model_name == "unknown"
    assert DaricLLM("m", engine=fake).metadata.model_name == "m"
    blind = type("Blind", (FakeEngine,), {"max_model_len": None})()
    with pytest.raises(ConfigError, match="pass DaricLLM\\(context_window"):
        _ = DaricLLM(engine=blind).metadata
    assert DaricLLM(engine=blind, context_window=7).metadata.context_window == 7


def test_secrets_stay_inside(monkeypatch):
    monkeypatch.setenv("DARIC_API_KEY", SECRET)
    options = {"headers": {"x-gateway": SECRET}}
    llm = DaricLLM("m", base_url="http://host", engine_options=options)
    assert llm.api_key.get_secret_value() == SECRET
    assert DaricLLM("m").api_key is None
    shown = [repr(llm), str(llm), llm.to_json(), str(llm.to_dict())]
    shown += [str(llm.to_payload())]
    assert not any(SECRET in text for text in shown)
    with pytest.raises(TypeError, match="headers in engine_options"):
        pickle.dumps(llm)
    llm = DaricLLM("m", base_url="http://host", engine_options={"max_retries": 0})
    assert SECRET not in str(pickle.dumps(llm))
    monkeypatch.delenv("DARIC_API_KEY")
    again = pickle.loads(pickle.dumps(llm))
    assert (again.base_url, again.api_key) == ("http://host", None)
    assert again.engine_options == {"max_retries": 0}


def test_settings_survive_serialisation():
    llm = DaricLLM("m", store="kv", seed=3, config=DaricConfig(mtaf="exp"))
    for again in (DaricLLM.from_json(llm.to_json()), pickle.loads(pickle.dumps(llm))):
        assert again.to_dict() == llm.to_dict()
        assert again.config.mtaf == "exp"


def test_one_with_an_engine_is_not_pickled(llm):
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(llm)


# --------------------------------------------------------------------------- events


class Events(BaseEventHandler):
    names: list

    def handle(self, event, **_):
        self.names.append(event.class_name())


@pytest.fixture
def events():
    handler, root = Events(names=[]), get_dispatcher()
    root.add_event_handler(handler)
    yield handler.names
    root.event_handlers.remove(handler)


async def test_events_are_those_of_core(llm, events):
    llm.chat(HELLO)
    assert events == ["LLMChatStartEvent", "LLMChatEndEvent"]
    events.clear()
    await consumed(await llm.astream_complete("x"))
    inner = ["LLMCompletionInProgressEvent"] * 2
    assert events == ["LLMCompletionStartEvent", *inner, "LLMCompletionEndEvent"]
    events.clear()
    assert llm.predict(PromptTemplate("Say {what}"), what="it") == DONE.text
    assert "LLMPredictEndEvent" in events


def test_tokens_are_counted_by_callbacks(fake):
    counter = TokenCountingHandler(tokenizer=str.split)
    llm = DaricLLM(engine=fake, callback_manager=CallbackManager([counter]))
    llm.chat(HELLO)
    list(llm.stream_complete("x"))
    assert counter.prompt_llm_token_count == 20
    assert counter.completion_llm_token_count == 4


def test_importing_takes_neither_torch_nor_vllm():
    code = """
import sys
for name in ("torch", "vllm", "transformers", "diskcache", "langchain_core"):
    sys.modules[name] = None
import daric_rag.integrations.llama_index as it
it.DaricLLM("m").to_payload()
assert not [name for name in sys.modules if name.startswith("daric_rag.runtime")]
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
