"""What ends a request or an engine closes its connections."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref

import pytest

from daric_rag import (
    ChunkedPrompt,
    ConfigError,
    DaricError,
    EngineClosedError,
    RemoteEngine,
)
from tests.remote.fake_server import (
    DONE,
    FIRST,
    PROMPT,
    FakeServer,
    error_reply,
    event,
    forever,
    open_engine,
    remote_threads,
    streamed,
    until,
    vllm_error,
)

_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT


def test_closing_a_stream_closes_its_connection(
    server: FakeServer, engine: RemoteEngine
) -> None:
    streamed(server, FIRST, forever)
    stream = engine.stream(PROMPT)
    assert next(stream).text == "a"
    assert not server.streams[0].closed
    stream.close()  # type: ignore[attr-defined]
    until(lambda: server.streams[0].closed)
    assert list(stream) == []


def test_dropping_a_stream_closes_its_connection(
    server: FakeServer, engine: RemoteEngine
) -> None:
    streamed(server, FIRST, forever)
    stream = engine.stream(PROMPT)
    next(stream)
    del stream
    until(lambda: server.streams[0].closed)


def test_a_stream_s_error_is_dropped_with_its_caller(
    server: FakeServer, engine: RemoteEngine
) -> None:
    """No garbage collection is needed."""
    server.script = [error_reply(400, vllm_error("bad", 400))]
    gc.collect()
    gc.disable()
    try:
        try:
            next(engine.stream(PROMPT))
        except ConfigError as error:
            dropped = weakref.ref(error)
        until(lambda: dropped() is None)
    finally:
        gc.enable()


async def test_cancelling_closes_the_connection(server: FakeServer) -> None:
    async with open_engine(server) as engine:
        for call in (engine.agenerate, lambda prompt: anext(engine.astream(prompt))):
            streamed(server, forever)
            task = asyncio.ensure_future(call(PROMPT))
            while not server.streams:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stream = server.streams.pop()
            while not stream.closed:
                await asyncio.sleep(0.001)


def test_one_failure_in_a_batch_ends_the_others(
    server: FakeServer, engine: RemoteEngine
) -> None:
    async def both_there() -> None:
        while len(server.streams) < 2:
            await asyncio.sleep(0.001)

    streamed(server, both_there, event(vllm_error("bad", 400)), DONE)
    streamed(server, forever)
    with pytest.raises(ConfigError, match="bad"):
        engine.generate_batch([PROMPT, PROMPT])
    until(lambda: all(stream.closed for stream in server.streams))


def test_closing_the_engine_wakes_who_waits(server: FakeServer) -> None:
    engine = open_engine(server)
    streamed(server, FIRST, forever)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            engine.generate(PROMPT)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: bool(server.streams))
    engine.close()
    thread.join(5)
    (error,) = errors
    assert isinstance(error, EngineClosedError)
    assert server.streams[0].closed


def test_a_forked_process_has_no_thread_to_ask(
    server: FakeServer, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(EngineClosedError, match="forked"):
            engine.generate(PROMPT)
        with pytest.raises(EngineClosedError, match="forked"):
            engine.layout(ChunkedPrompt(question="new"))
    assert engine.generate(PROMPT).text


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_waits_for_no_lock_of_its_parent(
    server: FakeServer, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child copies the lock under which the parent is having a text tokenised."""
    new = ChunkedPrompt(question="new")
    waiting, answered = threading.Event(), threading.Event()
    encode = engine.tokenizer.encode

    def slow(*args: object, **options: object) -> list[int]:
        waiting.set()
        answered.wait(10)
        return encode(*args, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", slow)
    parent = threading.Thread(target=engine.layout, args=(new,))
    parent.start()
    assert waiting.wait(5)
    child = os.fork()
    if not child:
        os._exit(_num_refused(engine, new))
    try:
        until(lambda: os.waitid(os.P_PID, child, _LOOK) is not None)
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        answered.set()
        parent.join()
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 4


def _num_refused(engine: RemoteEngine, prompt: ChunkedPrompt) -> int:
    calls = (
        lambda: engine.layout(prompt),
        lambda: engine.generate(prompt),
        lambda: engine.prewarm(["new"]),
        lambda: asyncio.run(engine.agenerate(prompt)),
    )
    num = 0
    for call in calls:
        try:
            call()
        except EngineClosedError:
            num += 1
    return num


def test_no_thread_outlives_its_engine(server: FakeServer) -> None:
    engine = open_engine(server)
    assert remote_threads()
    engine.close()
    assert not remote_threads()


def test_a_dropped_engine_is_closed_at_once(server: FakeServer) -> None:
    """No garbage collection is needed, whatever errors its callers have seen."""
    engine = open_engine(server)
    server.script = [error_reply(400, vllm_error("bad", 400))]
    server.missing = {"/tokenize"}
    gc.collect()
    gc.disable()
    try:
        for prompt in (PROMPT, ChunkedPrompt(question="new")):
            with pytest.raises(DaricError):
                engine.generate(prompt)
        del engine
        until(lambda: not remote_threads())
    finally:
        gc.enable()
