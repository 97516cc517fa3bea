"""A server whose tokeniser does not answer: what goes on, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from daric_rag import ChunkedPrompt, EngineClosedError, EngineUnavailableError
from tests.remote.fake_server import PROMPT, FakeServer, forever, open_engine

NEW = ChunkedPrompt(question="new")
NUM_THREADS = 2


@dataclass
class SilentServer(FakeServer):
    """Answers but for its tokeniser.

    Attributes:
        silence: What /tokenize does instead of an answer: an exception to raise, or
            something to await.
        num_silent: How often it did.
        timeouts: What was asked for last, by path.
    """

    silence: Any = None
    num_silent: int = 0
    timeouts: dict[str, dict[str, float]] = field(default_factory=dict)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.timeouts[path] = request.extensions["timeout"]
        if path == "/tokenize" and self.silence is not None:
            self.num_silent += 1
            if isinstance(self.silence, Exception):
                raise self.silence
            await self.silence()
        return await super().handle_async_request(request)


@contextmanager
def few_threads() -> Iterator[None]:
    """Give the running event loop so many threads of its own."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        yield


@pytest.fixture
def server() -> SilentServer:
    return SilentServer()


async def test_a_silent_tokeniser_keeps_neither_others_nor_aclose_waiting(
    server: SilentServer,
) -> None:
    with few_threads(), open_engine(server) as engine:
        server.silence = forever
        asking = [
            asyncio.ensure_future(engine.agenerate(NEW)) for _ in range(NUM_THREADS)
        ]
        while not server.num_silent:
            await asyncio.sleep(0.001)
        async with asyncio.timeout(5):
            assert await asyncio.to_thread(lambda: 1) == 1
            assert (await engine.agenerate(PROMPT)).text
            await engine.aclose()
            for task in asking:
                with pytest.raises(EngineClosedError):
                    await task


async def test_aclose_frees_all_threads_that_wait_for_an_answer(
    server: SilentServer,
) -> None:
    """Those of the event loop, in which a caller may have had the sync calls run."""
    with few_threads(), open_engine(server) as engine:
        server.silence = forever
        asking = [
            asyncio.ensure_future(asyncio.to_thread(engine.generate, NEW))
            for _ in range(NUM_THREADS)
        ]
        while not server.num_silent:
            await asyncio.sleep(0.001)
        async with asyncio.timeout(5):
            await engine.aclose()
        for task in asking:
            with pytest.raises(EngineClosedError):
                await task


@pytest.mark.parametrize(
    ("timeout_s", "waited_s", "mend"), [(600.0, 30.0, "log"), (7.5, 7.5, "timeout_s")]
)
def test_what_needs_no_model_is_waited_for_only_shortly(
    server: SilentServer, timeout_s: float, waited_s: float, mend: str
) -> None:
    with open_engine(server, timeout_s=timeout_s) as engine:
        engine.generate(NEW)
        for path in ("/v1/models", "/v1/daric", "/tokenize"):
            assert server.timeouts[path]["read"] == waited_s
            assert server.timeouts[path]["connect"] == 10.0
        assert server.timeouts["/v1/completions"]["read"] == timeout_s
        server.silence = httpx.ReadTimeout("")
        with pytest.raises(EngineUnavailableError) as caught:
            engine.layout(ChunkedPrompt(question="newer"))
    assert f"silent for {waited_s:g} s" in str(caught.value)
    assert mend in str(caught.value)
    assert ("raise timeout_s" in str(caught.value)) == (mend == "timeout_s")
