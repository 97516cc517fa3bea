"""Engines open late, are shared by equal settings, and close with their last user."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import time
import weakref
from typing import Any

import pytest

import daric_rag
from daric_rag import ConfigError, DaricConfig, EngineClosedError, ModelNotFoundError
from daric_rag.integrations._engine_source import EngineSettings, EngineSource
from tests.integrations.fakes import FakeEngine

SETTINGS = EngineSettings(model="a", engine_options={"dtype": "float32"})


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was opened: arguments and engine."""
    made: list[Any] = []

    def open_engine(*args: Any, **keywords: Any) -> FakeEngine:
        if "missing" in args:
            raise ModelNotFoundError("no such model")
        made.append((args, keywords, FakeEngine()))
        return made[-1][2]

    monkeypatch.setattr(daric_rag, "EmbeddedEngine", open_engine, raising=False)
    monkeypatch.setattr(daric_rag, "RemoteEngine", open_engine, raising=False)
    return made


def test_equal_settings_share_an_engine_until_the_last_closes(
    opened: list[Any],
) -> None:
    equal = EngineSettings(model="a", engine_options={"dtype": "float32"})
    first, second = EngineSource(SETTINGS), EngineSource(equal)
    assert not opened
    assert not first.is_open
    assert first.get() is second.get() is first.get()
    ((args, keywords, engine),) = opened
    assert args == ("a",)
    assert keywords == {"store": None, "config": DaricConfig(), "dtype": "float32"}
    first.close()
    first.close()
    assert engine.num_closed == 0
    with pytest.raises(EngineClosedError, match="make a new one"):
        first.get()
    second.close()
    assert engine.num_closed == 1
    third = EngineSource(SETTINGS)
    assert third.get() is not engine
    third.close()
    assert len(opened) == 2


@pytest.mark.parametrize(
    "other",
    [
        EngineSettings(model="b", engine_options={"dtype": "float32"}),
        EngineSettings(model="a"),
        EngineSettings(
            model="a", store=":memory:", engine_options={"dtype": "float32"}
        ),
        EngineSettings(
            model="a",
            config=DaricConfig(avg_chunk_budget=8),
            engine_options={"dtype": "float32"},
        ),
    ],
)
def test_other_settings_are_another_engine(
    opened: list[Any], other: EngineSettings
) -> None:
    sources = [EngineSource(SETTINGS), EngineSource(other)]
    assert sources[0].get() is not sources[1].get()
    for source in sources:
        source.close()
    assert [engine.num_closed for _, _, engine in opened] == [1, 1]


def test_a_dropped_source_gives_its_engine_back(opened: list[Any]) -> None:
    source = EngineSource(SETTINGS)
    copied = copy.deepcopy(source)
    assert copied.get() is source.get()
    del source
    gc.collect()
    assert opened[0][2].num_closed == 0
    del copied
    gc.collect()
    wait_for_closing(opened[0][2])


def wait_for_closing(engine: FakeEngine) -> None:
    deadline = time.monotonic() + 10
    while not engine.num_closed and time.monotonic() < deadline:
        time.sleep(0.001)
    assert engine.num_closed == 1


def test_dropping_one_in_an_engine_s_own_thread_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A garbage collection may come in the thread that a closing engine waits for."""
    source, other = EngineSource(SETTINGS), EngineSource(EngineSettings(model="b"))
    dropped = [other]
    gone = weakref.ref(other)
    del other

    class Joining(FakeEngine):
        def close(self) -> None:
            thread = threading.Thread(target=dropped.clear, daemon=True)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
            super().close()

    engine = Joining()
    monkeypatch.setattr(daric_rag, "EmbeddedEngine", lambda *_, **__: engine)
    dropped[0].get()
    source.get()
    source.close()
    assert gone() is None
    assert engine.num_closed >= 1


def test_who_has_not_asked_yet_counts_too(opened: list[Any]) -> None:
    first, asking = EngineSource(SETTINGS), EngineSource(SETTINGS)
    asking.get()
    asking.close()
    assert first.get() is opened[0][2]
    assert len(opened) == 1
    first.close()
    assert opened[0][2].num_closed == 1


def test_making_one_does_not_wait_for_an_engine_that_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening, may_open = threading.Event(), threading.Event()

    def open_engine(*_: Any, **__: Any) -> FakeEngine:
        opening.set()
        assert may_open.wait(10)
        return FakeEngine()

    monkeypatch.setattr(daric_rag, "EmbeddedEngine", open_engine, raising=False)
    source = EngineSource(SETTINGS)
    thread = threading.Thread(target=source.get)
    thread.start()
    assert opening.wait(10)
    other = EngineSource(SETTINGS)
    may_open.set()
    thread.join()
    source.close()
    other.close()


def test_an_engine_that_failed_is_nobody_s_new_one(opened: list[Any]) -> None:
    first, second = EngineSource(SETTINGS), EngineSource(SETTINGS)
    failed: Any = first.get()
    failed.is_open = False
    assert second.get() is not failed
    assert failed.num_closed == 1
    first.close()
    second.close()
    assert [engine.num_closed for _, _, engine in opened] == [1, 1]


def test_an_engine_that_is_passed_in_stays_open() -> None:
    engine = FakeEngine()
    source = EngineSource(engine)
    assert source.is_open
    assert source.get() is engine
    source.close()
    assert engine.num_closed == 0
    with pytest.raises(EngineClosedError):
        source.get()


def test_a_failure_to_open_is_tried_again(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = EngineSource(EngineSettings(model="missing"))
    for _ in range(2):
        with pytest.raises(ModelNotFoundError):
            source.get()
    source.close()


async def test_opening_does_not_hold_up_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_open, engine = threading.Event(), FakeEngine()

    def open_engine(*_: Any, **__: Any) -> FakeEngine:
        assert may_open.wait(10)
        return engine

    monkeypatch.setattr(daric_rag, "EmbeddedEngine", open_engine, raising=False)
    source = EngineSource(SETTINGS)
    asking = [asyncio.ensure_future(source.aget()) for _ in range(3)]
    await asyncio.sleep(0.01)
    may_open.set()
    assert await asyncio.gather(*asking) == [engine] * 3
    assert await source.aget() is engine
    await source.aclose()
    assert engine.num_closed == 1


def test_a_server_is_opened_with_its_key(opened: list[Any]) -> None:
    settings = EngineSettings(base_url="http://server", api_key="the-secret-key")
    assert "secret" not in repr(settings)
    source = EngineSource(settings)
    source.get()
    ((args, keywords, _),) = opened
    assert args == ("http://server",)
    assert keywords["api_key"] == "the-secret-key"
    source.close()


@pytest.mark.parametrize(
    ("settings", "mend"),
    [
        (EngineSettings(), "model is missing"),
        (EngineSettings(model="a", api_key="k"), "pass base_url="),
        (EngineSettings(base_url="http://s", store="x"), "serve-command"),
    ],
)
def test_settings_that_open_nothing(settings: EngineSettings, mend: str) -> None:
    with pytest.raises(ConfigError, match=mend):
        settings.check()
