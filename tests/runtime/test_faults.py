"""A store may lose or damage anything at any time: it costs time, never the answer."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daric_rag import Completion, DaricConfig
from daric_rag.errors import EngineError, StoreError
from daric_rag.storage import saver
from daric_rag.storage.format import HEADER_LEN
from tests.reference.prompts import Prompt, random_prompt
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import Harness

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
# No chunk lies in the recompute set as a whole. The fourth has three segments, so that
# a hole can be inside a chunk.
LENS = (37, 129, 163, 600, 132, 195, 23)
DOCUMENTS_LEN = sum(LENS[:-1])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "store"


@pytest.fixture
def harness(harness_of: HarnessPool, store: Path) -> Harness:
    return harness_of(KIND, store=str(store))


@pytest.fixture
def memory(harness_of: HarnessPool) -> Harness:
    return harness_of(KIND)


def files_of(store: Path) -> set[Path]:
    return set(store.glob("??/??/*.val"))


def stored(harness: Harness, store: Path, prompt: Prompt) -> list[Path]:
    """Runs a prompt, puts its records on disk only, and returns their files."""
    before = files_of(store)
    cold, layout = harness.run(prompt.chunks)
    harness.check(cold, layout)
    harness.engine.flush()
    only_on_disk(harness)
    return sorted(files_of(store) - before)


def only_on_disk(harness: Harness) -> None:
    harness.engine.flush()
    harness.engine.clear_host()
    harness.engine.clear_prefix_cache()


# Each takes all files and the ones to damage.


def flip_payload(files: list[Path]) -> None:
    for path in files:
        _edit(path, lambda content: content.__setitem__(-1, content[-1] ^ 1))


def flip_header(files: list[Path]) -> None:
    for path in files:
        _edit(path, lambda content: content.__setitem__(20, content[20] ^ 1))


def truncate(files: list[Path]) -> None:
    for path in files:
        _edit(path, lambda content: content.__delitem__(slice(-100, None)))


def truncate_to_header(files: list[Path]) -> None:
    for path in files:
        _edit(path, lambda content: content.__delitem__(slice(HEADER_LEN, None)))


def empty(files: list[Path]) -> None:
    for path in files:
        path.write_bytes(b"")


def delete(files: list[Path]) -> None:
    for path in files:
        path.unlink()


def swap(files: list[Path]) -> None:
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


DAMAGES = (
    flip_payload,
    flip_header,
    truncate,
    truncate_to_header,
    empty,
    delete,
    swap,
)


def _edit(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def check_counts(
    answer: Completion, *, min_lost: int, max_lost: int = DOCUMENTS_LEN
) -> None:
    """Every document token was either loaded or computed, and is counted once."""
    reuse = answer.reuse
    assert min_lost <= reuse.generated_tokens <= max_lost
    assert reuse.hit_tokens + reuse.generated_tokens == DOCUMENTS_LEN
    assert reuse.saved_tokens == reuse.generated_tokens


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_records_are_generated_again(
    harness: Harness, store: Path, damage: Callable[[list[Path]], None]
) -> None:
    prompt = random_prompt(200 + DAMAGES.index(damage), LENS)
    files = stored(harness, store, prompt)
    assert len(files) == 8
    # Some.
    damage(files[::2])
    answer, layout = harness.run(prompt.chunks)
    harness.check(answer, layout)
    check_counts(answer, min_lost=4, max_lost=DOCUMENTS_LEN - 4)
    assert answer.reuse.reason == ""
    # They were saved again: nothing is lost the next time.
    only_on_disk(harness)
    healed, _ = harness.run(prompt.chunks)
    harness.check(healed, layout)
    assert healed.reuse.hit_tokens == DOCUMENTS_LEN
    assert healed.reuse.generated_tokens == 0
    # All.
    only_on_disk(harness)
    damage([path for path in files_of(store) if path.stat().st_size])
    answer, _ = harness.run(prompt.chunks)
    harness.check(answer, layout)
    check_counts(answer, min_lost=DOCUMENTS_LEN)
    assert "lost or damaged" in answer.reuse.reason


def test_damage_while_closed(harness_of: HarnessPool, store: Path) -> None:
    """All kinds at once, and found by an engine that never knew the records."""
    prompt = random_prompt(210, LENS)
    files = stored(harness_of(KIND, store=str(store)), store, prompt)
    harness_of.close()
    # Not the smallest ones, whatever names they were given: the system prompt's record
    # stays, because what is lost of the first chunk may be computed in place.
    files.sort(key=lambda path: -path.stat().st_size)
    for path, damage in zip(files[:6], DAMAGES[:6], strict=True):
        damage([path])
    harness = harness_of(KIND, store=str(store))
    answer, layout = harness.run(prompt.chunks)
    harness.check(answer, layout)
    check_counts(answer, min_lost=6)
    assert answer.reuse.hit_tokens == LENS[0]
    only_on_disk(harness)
    healed, _ = harness.run(prompt.chunks)
    harness.check(healed, layout)
    assert healed.reuse.hit_tokens == DOCUMENTS_LEN


def test_a_full_disk_stops_saving_and_nothing_else(
    harness_of: HarnessPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    harness = harness_of(KIND, store=str(tmp_path / "store"))
    monkeypatch.setattr(saver, "write_record_file", full)
    prompt = random_prompt(220, LENS)
    with caplog.at_level(logging.WARNING, logger="daric_rag"):
        answer, layout = harness.run(prompt.chunks)
        harness.check(answer, layout)
        only_on_disk(harness)
    stats = harness.engine.store_stats()
    assert stats.disk is not None
    assert stats.disk.failed_writes > 0
    assert stats.disk.num_records == 0
    assert caplog.text.count("is paused") == 1
    # The host tier still has them: nothing that is not on disk was dropped.
    warm, _ = harness.run(prompt.chunks)
    harness.check(warm, layout)
    assert warm.reuse.hit_tokens == DOCUMENTS_LEN


@pytest.mark.parametrize("error", [StoreError("out of order"), RuntimeError("a bug")])
def test_a_store_that_cannot_write(
    memory: Harness,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    prompt = random_prompt(230 + isinstance(error, StoreError), LENS)
    monkeypatch.setattr(memory.spy.side._bound_mover, "_warned", set())
    with monkeypatch.context() as patch:
        patch.setattr(memory.spy.side.store, "write", _raiser(error))
        for _ in range(2):
            answer, layout = memory.run(prompt.chunks)
            memory.check(answer, layout)
            assert answer.reuse.hit_tokens == answer.reuse.saved_tokens == 0
            assert answer.reuse.reason
            memory.engine.clear_prefix_cache()
    assert caplog.text.count("cannot be saved") == 1
    # Better times: saved now, hit then.
    answer, _ = memory.run(prompt.chunks)
    assert answer.reuse.saved_tokens == DOCUMENTS_LEN
    memory.engine.clear_prefix_cache()
    answer, layout = memory.run(prompt.chunks)
    memory.check(answer, layout)
    assert answer.reuse.hit_tokens == DOCUMENTS_LEN


@pytest.mark.parametrize("error", [OSError("i/o"), RuntimeError("a bug")])
def test_a_store_that_cannot_read(
    memory: Harness,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    prompt = random_prompt(240 + isinstance(error, OSError), LENS)
    memory.run(prompt.chunks, max_tokens=1)
    memory.engine.clear_prefix_cache()
    monkeypatch.setattr(memory.spy.side._bound_mover, "_warned", set())
    with monkeypatch.context() as patch:
        patch.setattr(memory.spy.side.store, "read_many", _raiser(error))
        answer, layout = memory.run(prompt.chunks)
        memory.check(answer, layout)
        check_counts(answer, min_lost=DOCUMENTS_LEN)
        assert "lost or damaged" in answer.reuse.reason
    assert caplog.text.count("cannot be read") == 1
    memory.engine.clear_prefix_cache()
    answer, _ = memory.run(prompt.chunks)
    memory.check(answer, layout)
    assert answer.reuse.hit_tokens == DOCUMENTS_LEN


def _raiser(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_host_tier_of_few_records(harness_of: HarnessPool) -> None:
    """Each prompt pushes the other's records out, and even its own."""
    # 2,048 bytes per token in float32: three records of a full segment.
    config = DaricConfig(host_bytes=3 * 256 * 2048 + 3 * HEADER_LEN)
    harness = harness_of(KIND, config=config)
    prompts = [random_prompt(seed, LENS) for seed in (250, 251)]
    lost = 0
    for prompt in (*prompts, *prompts, prompts[0], prompts[0]):
        answer, layout = harness.run(prompt.chunks)
        harness.check(answer, layout)
        reuse = answer.reuse
        assert reuse.hit_tokens + reuse.generated_tokens <= DOCUMENTS_LEN
        assert reuse.reason or reuse.hit_tokens
        lost += bool(reuse.generated_tokens)
        harness.engine.clear_prefix_cache()
    stats = harness.engine.store_stats()
    assert stats.host.evicted > 0
    assert stats.host.nbytes <= stats.host.capacity_bytes
    assert lost >= 4


def test_evicted_documents_are_indexed_again(harness_of: HarnessPool) -> None:
    """Generated once after their loss, not at every other request."""
    config = DaricConfig(host_bytes=3 * 256 * 2048 + 3 * HEADER_LEN)
    harness = harness_of(KIND, config=config)
    small = random_prompt(252, (40, 190, 180, 20))
    other = random_prompt(253, (30, 500, 20))
    harness.run(small.chunks, max_tokens=1)
    harness.run(other.chunks, max_tokens=1)
    harness.run(random_prompt(254, (30, 250, 20)).chunks, max_tokens=1)
    harness.engine.clear_prefix_cache()
    lost, _ = harness.run(small.chunks)
    assert lost.reuse.generated_tokens >= 370
    harness.engine.clear_prefix_cache()
    again, layout = harness.run(small.chunks)
    harness.check(again, layout)
    assert again.reuse.hit_tokens == 410
    assert again.reuse.generated_tokens == 0


def test_a_record_larger_than_the_store(
    harness_of: HarnessPool, caplog: pytest.LogCaptureFixture
) -> None:
    config = DaricConfig(host_bytes=100 * 2048)
    harness = harness_of(KIND, config=config)
    prompt = random_prompt(255, LENS)
    for _ in range(2):
        answer, layout = harness.run(prompt.chunks)
        harness.check(answer, layout)
        harness.engine.clear_prefix_cache()
    assert caplog.text.count("raise host_bytes or lower max_segment_len") == 1


def test_a_failed_pass_saves_nothing(harness_of: HarnessPool, tmp_path: Path) -> None:
    """vLLM finalises a connector after a pass that raised, too: nothing is computed."""
    store, prompt = str(tmp_path / "store"), random_prompt(71, LENS)
    harness = harness_of(KIND, store=store)

    def break_forward(worker: Any) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of memory")

        worker.model_runner._model_forward = fail

    harness.on_worker(break_forward)
    with pytest.raises(EngineError, match="out of memory"):
        harness.run(prompt.chunks)
    harness_of.close()
    again = harness_of(KIND, store=store)
    completion, layout = again.run(prompt.chunks)
    assert completion.reuse.hit_tokens == 0
    again.check(completion, layout)
    harness_of.close()
