"""What the engines share; requests here are answered by hand."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable

import pytest

from daric_rag import Delta, Engine, TokenPrompt
from daric_rag.config import DaricConfig
from daric_rag.engine import Prompt
from daric_rag.errors import EngineClosedError
from daric_rag.input_processor import InputProcessor
from daric_rag.layout import PromptLayout
from daric_rag.runtime.client import ClientEngine
from daric_rag.runtime.request_stream import RequestStream, Submission
from daric_rag.runtime.submissions import SubmissionMaker
from tests.remote.fake_server import PROMPT, LocalTokenizer


class NoLoop:
    """Stands for an engine's thread."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def check_process(self) -> None:
        pass

    def check_open(self) -> None:
        if "close" in self._calls:
            raise EngineClosedError("closed")

    def stop(self) -> None:
        self._calls.append("stop")

    def close(self) -> None:
        self._calls.append("close")


class HandEngine(ClientEngine):
    """Runs nothing.

    Attributes:
        submissions: Its requests.
        puts: What their outputs would go to.
        calls: How it was closed.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        super().__init__(NoLoop(self.calls))
        processor = InputProcessor(
            LocalTokenizer(), config=DaricConfig(), block_size=16, max_model_len=500
        )
        self._maker = SubmissionMaker(processor)
        self.submissions: list[Submission] = []
        self.puts: list[Callable[[Delta | BaseException], None]] = []

    def _submit(
        self, submission: Submission, put: Callable[[Delta | BaseException], None]
    ) -> RequestStream:
        self.submissions.append(submission)
        self.puts.append(put)
        return RequestStream(submission, put)


def test_an_event_loop_that_closes_is_no_failure_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(*_: object) -> None:
        raise RuntimeError("Event loop is closed")

    async def cancelled() -> None:
        asking = asyncio.ensure_future(engine.agenerate(PROMPT))
        async with asyncio.timeout(10):
            while not engine.puts:
                await asyncio.sleep(0.001)
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as closing:
            # Closed between any look and the call.
            closing.setattr(loop, "call_soon_threadsafe", closed)
            engine.puts[0](Delta("a", (11,)))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    engine = HandEngine()
    asyncio.run(cancelled())
    engine.puts[0](Delta("b", (12,)))


async def test_every_engine_is_closed_by_async_with() -> None:
    async with HandEngine() as engine:
        assert engine.calls == []
        assert engine.is_open
    assert engine.calls == ["stop", "close"]
    assert not engine.is_open


@pytest.mark.parametrize(
    "name", [name for name in vars(Engine) if not name.startswith("_")]
)
def test_every_engine_has_the_methods_of_the_protocol(name: str) -> None:
    wanted = inspect.signature(getattr(Engine, name))
    assert inspect.signature(getattr(ClientEngine, name)) == wanted


async def test_closing_ends_the_threads_that_lay_out() -> None:
    before = set(threading.enumerate())
    engine = HandEngine()
    asking = asyncio.ensure_future(engine.agenerate(PROMPT))
    async with asyncio.timeout(10):
        while not engine.puts:
            await asyncio.sleep(0.001)
    assert set(threading.enumerate()) > before
    engine.close()
    assert set(threading.enumerate()) <= before
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_closed_engine_says_so_where_its_threads_are_gone() -> None:
    engine = HandEngine()
    engine.close()
    with pytest.raises(EngineClosedError, match="closed"):
        await engine.agenerate(PROMPT)
    assert not engine.puts


async def test_requests_carry_when_their_clients_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever thread lays them out first."""
    engine, laid_out = HandEngine(), threading.Event()
    layout = engine._maker.processor.layout

    def waiting(prompt: Prompt) -> PromptLayout:
        if prompt is first:
            assert laid_out.wait(10)
        done = layout(prompt)
        laid_out.set()
        return done

    monkeypatch.setattr(InputProcessor, "layout", lambda _, given: waiting(given))
    first, second = TokenPrompt([[30] * 8, [31]]), TokenPrompt([[40] * 8, [41]])
    asking = [asyncio.ensure_future(engine.agenerate(one)) for one in (first, second)]
    async with asyncio.timeout(10):
        while len(engine.submissions) < 2:
            await asyncio.sleep(0.001)
    came = {one.layout.token_ids[0]: one.arrival_time for one in engine.submissions}
    assert came[30] is not None
    assert came[40] is not None
    assert came[30] <= came[40]
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    engine.close()
