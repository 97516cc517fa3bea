"""Bytes flipped in a live store, and its other writers killed: no answer ever changes.

Two processes work on the folder of a running engine. One writes the same documents'
records, and deletes some; it is killed at a random moment, and another takes its place.
One flips bytes in whatever files there are. Meanwhile the engine, its copies in memory
dropped each time, answers prompts as it did over an empty store.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from daric_rag import DaricConfig
from tests.reference.prompts import Prompt, random_prompt
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import Harness
from tests.storage.writer_server import WriterServer

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
# System prompt, documents of one to three segments, question.
LENS = (37, 129, 263, 600, 132, 395, 210, 301, 150, 23)
NUM_DOCUMENTS = 5  # of a prompt
NUM_PROMPTS = 10
NUM_TOKENS = 8
FLIP_INTERVAL_S = 0.01


@dataclass(frozen=True)
class Golden:
    """What an engine answered over an empty store, and the records it left.

    Attributes:
        folder: Its store, which nobody uses any more.
        nbytes: Of all records.
        answers: Prompts, and the token ids that must always follow.
    """

    folder: Path
    nbytes: int
    answers: list[tuple[Prompt, list[int]]]


@pytest.fixture(scope="module")
def golden(harness_of: HarnessPool, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Prompts that share documents in various orders, held against the reference."""
    pool, rng = random_prompt(300, LENS), random.Random(300)
    folder = tmp_path_factory.mktemp("golden") / "store"
    harness = harness_of(KIND, store=str(folder))
    answers = []
    for _ in range(NUM_PROMPTS):
        documents = rng.sample(range(1, len(LENS) - 1), NUM_DOCUMENTS)
        prompt = pool.reordered([0, *documents, len(LENS) - 1])
        completion, layout = harness.run(prompt.chunks, max_tokens=NUM_TOKENS)
        harness.check(completion, layout)
        answers.append((prompt, list(completion.token_ids)))
    harness.engine.flush()
    disk = harness.engine.store_stats().disk
    assert disk is not None
    harness_of.close()
    return Golden(folder, disk.nbytes, answers)


@dataclass
class Trouble:
    """What happens to a store from outside.

    Attributes:
        live: The store's folder.
        source: A store with the records that are written to it.
        capacity: Budget of the writers in bytes.
        num_kills: Writers killed so far.
        num_flips: Bytes flipped so far in records' files.
        num_index_flips: The same in the index and its journal.
        num_written: Records that the writers wrote.
        ends: How they ended.
    """

    live: Path
    source: Path
    capacity: int
    num_kills: int = 0
    num_flips: int = 0
    num_index_flips: int = 0
    num_written: int = 0
    ends: list[int] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    @contextmanager
    def going_on(self, *, also_index: bool) -> Iterator[None]:
        """Let it happen meanwhile."""
        threads = [
            threading.Thread(target=self._kill_writers),
            threading.Thread(target=self._flip_bytes, args=[also_index]),
        ]
        self._threads = threads
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def has_failed(self) -> bool:
        """Whether a writer ended by itself, or nobody is there to start them."""
        is_alive = all(thread.is_alive() for thread in self._threads)
        return not is_alive or not set(self.ends) <= {-signal.SIGKILL}

    def _kill_writers(self) -> None:
        rng = random.Random(1)
        common = {"folder": str(self.live), "source": str(self.source)}
        common |= {"capacity": self.capacity}
        with WriterServer() as server:
            while not self._is_over.is_set():
                (pid,) = server.start("copy", common | {"seed": self.num_kills})
                time.sleep(rng.uniform(0.0, 0.2))
                with suppress(ProcessLookupError):  # It failed, as `ends` will tell.
                    os.kill(pid, signal.SIGKILL)
                for told in server.reports():
                    self.num_written += "written" in told
                    if "status" in told:
                        self.ends.append(told["status"])
                self.num_kills += 1

    def _flip_bytes(self, also_index: bool) -> None:
        arguments: dict[str, Any] = {"folder": str(self.live), "seed": 2}
        arguments |= {"interval_s": FLIP_INTERVAL_S, "also_index": also_index}
        with WriterServer() as server:
            (pid,) = server.start("damage", arguments)
            for told in server.reports():
                if "flipped" in told:
                    is_index = told["flipped"].startswith("cache.db")
                    self.num_index_flips += is_index
                    self.num_flips += not is_index
                    if self._is_over.is_set():
                        # It may have ended by itself meanwhile.
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)


def on_disk_only(harness: Harness) -> None:
    harness.engine.clear_host()
    harness.engine.clear_prefix_cache()


@pytest.mark.parametrize(
    ("also_index", "min_kills", "min_flips"), [(False, 130, 800), (True, 100, 100)]
)
def test_answers_stay_the_same(
    harness_of: HarnessPool,
    golden: Golden,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    also_index: bool,
    min_kills: int,
    min_flips: int,
) -> None:
    live, source = tmp_path / "live", tmp_path / "source"
    shutil.copytree(golden.folder, source)
    capacity = golden.nbytes * 9 // 10  # Something is always evicted.
    options = {"store": str(live), "config": DaricConfig(disk_bytes=capacity)}
    harness = harness_of(KIND, **options)
    trouble = Trouble(live, source, capacity)
    rng = random.Random(3)
    hit_tokens = 0
    with trouble.going_on(also_index=also_index):
        while not trouble.has_failed() and (
            trouble.num_kills < min_kills
            or trouble.num_flips < min_flips
            or trouble.num_index_flips < min_flips * also_index
        ):
            prompt, expected = rng.choice(golden.answers)
            on_disk_only(harness)
            answer, _ = harness.run(prompt.chunks, max_tokens=NUM_TOKENS)
            assert list(answer.token_ids) == expected
            hit_tokens += answer.reuse.hit_tokens

    disk = harness.engine.store_stats().disk
    assert disk is not None
    # What was damaged or lost was never trouble for anybody.
    assert set(trouble.ends) == {-signal.SIGKILL}
    assert trouble.num_kills >= min_kills
    assert "documents cannot be" not in caplog.text
    assert not [one for one in caplog.records if one.levelno > logging.WARNING]
    # It was no idle run: records came from the disk, and damage was noticed.
    assert disk.hits > 20
    assert disk.corrupt > 5
    assert hit_tokens > 5_000
    assert trouble.num_written > 100
    if also_index:
        # Saving may have paused for a minute; whoever opens the store begins anew.
        harness_of.close()
        harness = harness_of(KIND, **options)
    else:
        assert disk.failed_writes == 0
    check_healed(harness, golden)


def check_healed(harness: Harness, golden: Golden) -> None:
    """What is computed now is saved, and hit the next time."""
    for prompt, expected in golden.answers[:3]:
        for _ in range(2):
            harness.engine.flush()
            on_disk_only(harness)
            answer, _ = harness.run(prompt.chunks, max_tokens=NUM_TOKENS)
            assert list(answer.token_ids) == expected
        assert answer.reuse.generated_tokens == 0
        assert answer.reuse.hit_tokens == sum(map(len, prompt.chunks[:-1]))
