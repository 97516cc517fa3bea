"""Engines of several processes: ranks of a model, and an engine process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from daric_rag import Completion, EmbeddedEngine, TokenPrompt
from daric_rag.runtime.ranks import record_keys
from daric_rag.storage import DiskTier
from tests.reference.dense import DenseReference
from tests.reference.prompts import TokenIds
from tests.runtime.harness import NUM_LOGPROBS, QUESTION, check_continuation

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("all_cpus")]

KIND = "llama-mha"
NUM_TOKENS = 8
A, B, C = (tuple(range(first, first + 96)) for first in (20, 140, 260))


class Processes:
    """Opens engines of one model on one folder, and holds them against a reference."""

    def __init__(self, model: Path, reference: DenseReference, store: Path) -> None:
        self._model, self._reference, self._store = model, reference, store

    @contextmanager
    def open(self, **options: Any) -> Iterator[EmbeddedEngine]:
        engine = EmbeddedEngine(
            str(self._model),
            store=self._store,
            **{"dtype": "float32", "max_model_len": 1024} | options,
        )
        with engine:
            yield engine

    def checked(self, engine: EmbeddedEngine, *chunks: TokenIds) -> Completion:
        prompt = TokenPrompt([*map(list, chunks), list(QUESTION)])
        completion = engine.generate(
            prompt, max_tokens=NUM_TOKENS, logprobs=NUM_LOGPROBS, ignore_eos=True
        )
        engine.clear_prefix_cache()
        layout = engine.layout(prompt)
        prefill = self._reference.daric_prefill(
            layout.token_ids, layout.spans, [*layout.windows]
        )
        check_continuation(completion, self._reference.decode(prefill, NUM_TOKENS))
        return completion


@pytest.fixture
def processes(
    tiny_model: Callable[[str | Path], Path],
    reference_of: Callable[[str | Path], DenseReference],
    tmp_path: Path,
    no_engine: None,
) -> Processes:
    return Processes(tiny_model(KIND), reference_of(KIND), tmp_path / "store")


def partner_of(key: bytes) -> bytes:
    """The other rank's key of the same segment, of two ranks."""
    mask_0, mask_1 = (int.from_bytes(k) for k in record_keys(bytes(32), 2))
    return (int.from_bytes(key) ^ mask_0 ^ mask_1).to_bytes(32)


@pytest.mark.timeout(170)
def test_two_ranks_answer_as_one(processes: Processes, tmp_path: Path) -> None:
    with processes.open(tensor_parallel_size=2) as engine:
        assert processes.checked(engine, A, B, C).reuse.hit_tokens == 0
        assert processes.checked(engine, A, B, C).reuse.hit_tokens == 192
        processes.checked(engine, C, A, B)
        hit = processes.checked(engine, B, C, A).reuse
        assert (hit.hit_tokens, hit.generated_tokens) == (192, 0)
        engine.flush()

        other = DiskTier(tmp_path / "store", 1 << 30)
        held = set(other.keys())
        key = min(held)
        assert {partner_of(k) for k in held} == held
        # A record that one rank alone has lost is generated again on both.
        for lost in (key, partner_of(key)):
            other.delete(lost)
            engine.clear_host()
            done = [processes.checked(engine, *order) for order in ((A, B, C), (C, A))]
            assert sum(each.reuse.generated_tokens for each in done) == 96
            engine.flush()
            assert other.contains(lost)
        other.close()
        disk = engine.store_stats().disk
        assert disk is not None
        assert disk.num_records == 6

    with processes.open(tensor_parallel_size=2) as engine:
        assert processes.checked(engine, C, B, A).reuse.hit_tokens == 192
    # One rank's KV is of other shapes: nothing of two ranks serves it.
    with processes.open() as engine:
        assert processes.checked(engine, A, B, C).reuse.hit_tokens == 0


@pytest.mark.timeout(120)
def test_an_engine_process_serves_as_this_one_does(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with processes.open() as engine:
        processes.checked(engine, A, B)
        whole = processes.checked(engine, A, B)
        assert whole.reuse.hit_tokens == 192
        # The stop string is seen here, where nobody knows the counts.
        prompt = TokenPrompt([list(A), list(B), list(QUESTION)])
        stop = whole.text[2:4]
        stopped = engine.generate(prompt, max_tokens=NUM_TOKENS, stop=stop)
        assert stopped.finish_reason == "stop"
        assert stopped.reuse.prompt_tokens == whole.reuse.prompt_tokens
        assert stopped.reuse.reason == ""
        engine.flush()
        stats = engine.store_stats()
        assert stats.disk is not None
        assert stats.disk.num_records == stats.host.num_records == 2
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    with processes.open() as engine:
        assert processes.checked(engine, B, A).reuse.hit_tokens == 192
