"""Documents cached in the background: order, bounds, failures and the end."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from daric_rag import ConfigError, DocumentPart, PromptBuilder, PromptError
from daric_rag.prewarm_queue import BackgroundPrewarm, PrewarmStats


class FakeEngine:
    """Remembers what it computed; waits while `open` is cleared."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.namespaces: set[str | None] = set()
        self.stored: set[str] = set()
        self.open = threading.Event()
        self.open.set()

    def prewarm(
        self, documents: Sequence[DocumentPart], *, namespace: str | None = None
    ) -> int:
        assert self.open.wait(10)
        texts = [part.text for part in documents]
        if any("too long" in text for text in texts):
            raise PromptError("too long")
        self.batches.append(texts)
        self.namespaces.add(namespace)
        new = set(texts) - self.stored
        self.stored |= new
        return len(new)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def queue_on(engine: Any, **options: Any) -> BackgroundPrewarm:
    return BackgroundPrewarm(lambda: engine, **options)


def test_documents_are_cached_in_their_order_and_once(engine: FakeEngine) -> None:
    queue = queue_on(engine)
    texts = [f"text {number}" for number in range(10)]
    assert queue.submit([*texts, "text 0", " "]) == 10
    assert queue.flush(10)
    assert [text for batch in engine.batches for text in batch] == texts
    assert queue.submit(texts) == 0
    assert queue.stats == PrewarmStats(num_submitted=10, num_known=10, num_computed=10)
    queue.close()


def test_submitting_never_waits_and_what_is_queued_is_known(engine: FakeEngine) -> None:
    engine.open.clear()
    queue = queue_on(engine)
    assert queue.submit(["a"]) == 1
    assert queue.submit(["a", "b"]) == 1
    assert not queue.flush(0.01)
    engine.open.set()
    assert queue.flush(10)
    assert engine.stored == {"a", "b"}
    queue.close()


def test_the_builder_writes_what_prompts_look_up(engine: FakeEngine) -> None:
    builder = PromptBuilder(document_template="{title}: {text}")
    queue = queue_on(engine, builder=builder, namespace="tenant")
    document = {"title": "Mill", "text": "Built in 1820.", "score": 0.3}
    queue.submit([document])
    assert queue.flush(10)
    assert engine.stored == set(builder.document_texts([document]))
    assert engine.namespaces == {"tenant"}
    queue.close()


def test_a_full_queue_drops_what_comes_on_top(engine: FakeEngine) -> None:
    engine.open.clear()
    queue = queue_on(engine, max_pending=2)
    taken = queue.submit([f"text {number}" for number in range(9)])
    # The thread may have taken up to two from the queue meanwhile.
    assert 2 <= taken < 9
    assert queue.stats.num_dropped == 9 - taken
    engine.open.set()
    assert queue.flush(10)
    assert len(engine.stored) == taken
    queue.close()


def test_one_bad_document_fails_alone_and_is_logged(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    queue = queue_on(engine)
    engine.open.clear()
    queue.submit(["a", "too long", "b"])
    engine.open.set()
    assert queue.flush(10)
    queue.close()
    assert engine.stored == {"a", "b"}
    assert queue.stats.num_failed == 1
    assert "PromptError: too long" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    queue = queue_on(engine)
    assert queue.submit([object()]) == 0
    assert queue.stats.num_failed == 1
    queue.close()


def test_a_failed_document_may_come_again(engine: FakeEngine) -> None:
    sources: list[Any] = [engine]

    def source() -> Any:
        return sources.pop()

    queue = BackgroundPrewarm(source)
    sources.clear()
    queue.submit(["a"])  # IndexError: no engine
    assert queue.flush(10)
    sources.append(engine)
    assert queue.submit(["a"]) == 1
    assert queue.flush(10)
    assert engine.stored == {"a"}
    queue.close()


def test_closing_gives_up_what_waits_and_joins_the_thread(engine: FakeEngine) -> None:
    engine.open.clear()
    queue = queue_on(engine)
    queue.submit([f"text {number}" for number in range(20)])
    timer = threading.Timer(0.05, engine.open.set)
    timer.start()
    queue.close()
    queue.close()
    timer.join()
    assert len(engine.stored) <= 4
    assert queue.stats.num_dropped >= 16
    assert queue.submit(["late"]) == 0
    assert queue.flush(0)
    assert "daric-prewarm" not in [thread.name for thread in threading.enumerate()]


def test_a_dropped_queue_closes_and_holds_no_engine() -> None:
    engine = FakeEngine()
    queue = queue_on(engine)
    queue.submit(["a"])
    assert queue.flush(10)
    gone = weakref.ref(engine)
    del queue, engine
    gc.collect()
    wait_for_the_end()
    assert gone() is None


def wait_for_the_end() -> None:
    deadline = time.monotonic() + 10
    names = ["daric-prewarm"]
    while "daric-prewarm" in names and time.monotonic() < deadline:
        time.sleep(0.001)
        names = [thread.name for thread in threading.enumerate()]
    assert "daric-prewarm" not in names


def test_dropping_one_does_not_wait_for_its_batch(engine: FakeEngine) -> None:
    engine.open.clear()
    queue = queue_on(engine)
    queue.submit(["a"])
    started_s = time.monotonic()
    del queue
    gc.collect()
    # The engine gives up after ten seconds.
    assert time.monotonic() - started_s < 5
    engine.open.set()
    wait_for_the_end()


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2"])
def test_bad_bounds_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="max_pending"):
        BackgroundPrewarm(lambda: None, max_pending=wrong)  # type: ignore[arg-type,return-value]


def test_a_forked_child_waits_for_nothing(engine: FakeEngine) -> None:
    engine.open.clear()
    queue = queue_on(engine)
    queue.submit(["a"])
    assert not queue.flush(0.01)
    child = os.fork()
    if child == 0:
        # The thread is the parent's, and so is what it works on.
        is_over = queue.submit(["b"]) == 0 and queue.flush(5)
        queue.close()
        os._exit(0 if is_over else 1)
    assert os.waitpid(child, 0)[1] == 0
    engine.open.set()
    assert queue.flush(10)
    assert engine.stored == {"a"}
    queue.close()
