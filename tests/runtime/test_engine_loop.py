"""What one client's end does to the others; vLLM's engine here is a stand-in."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

from daric_rag import Delta, EngineError, TokenPrompt
from daric_rag.config import DaricConfig
from daric_rag.generation import GenerationOptions
from daric_rag.input_processor import InputProcessor
from daric_rag.runtime.engine_loop import EngineFacts, EngineLoop
from daric_rag.runtime.request_stream import RequestStream, Submission
from tests.remote.fake_server import LocalTokenizer


@dataclass
class BrokenEngine:
    """Stands for vLLM's engine; fails at the first step with two requests."""

    ids: list[str] = field(default_factory=list)
    engine_core: Any = None

    def add_request(self, request_id: str, *_: Any, **__: Any) -> str:
        self.ids.append(request_id)
        return request_id

    def has_unfinished_requests(self) -> bool:
        return len(self.ids) == 2

    def step(self) -> list[Any]:
        raise RuntimeError("the device is lost")


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    facts = EngineFacts(BrokenEngine(), None, 500, 16, 300, "fcfs")
    loop = EngineLoop(lambda: facts, lambda _: None)
    yield loop
    loop.close()


def submission() -> Submission:
    processor = InputProcessor(
        LocalTokenizer(), config=DaricConfig(), block_size=16, max_model_len=500
    )
    layout = processor.layout(TokenPrompt([[20] * 30, [22, 23]]))
    return Submission(layout, None, GenerationOptions())


def submitted(loop: EngineLoop, put: Callable[[Delta | BaseException], None]) -> None:
    loop.submit(RequestStream(submission(), put))


def test_a_client_that_cannot_hear_of_a_failure_keeps_it_from_nobody(
    loop: EngineLoop,
) -> None:
    def deaf(_: Delta | BaseException) -> None:
        raise ValueError("nobody listens")

    heard: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
    submitted(loop, deaf)
    submitted(loop, heard.put)
    error = heard.get(timeout=5)
    assert isinstance(error, EngineError)
    assert "the device is lost" in str(error)
