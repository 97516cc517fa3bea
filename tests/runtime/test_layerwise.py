"""Engines that load and save layer by layer: on a CPU, watched as if it were a GPU.

What vLLM does in its passes is watched too, where it writes new keys and values into
its blocks and where it attends to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from daric_rag.runtime import connector, worker_side
from daric_rag.runtime.step_builder import StepBuilder, SubRequest, empty_step
from daric_rag.runtime.stream_transfers import StreamTransfers
from daric_rag.runtime.transfers import KvAccess, LayerSave
from tests.reference.dense import DenseReference
from tests.reference.prompts import random_prompt, scenarios
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import Harness
from tests.runtime.watched_streams import ENGINE, LOAD, WatchedLayout, WatchedStreams

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
SCENARIOS = [scenario.name for scenario in scenarios(0)]
LENS = (37, 129, 163, 23)
NULL_BLOCK = 0


class CountedTransfers(StreamTransfers):
    """Counts saves that are complete when their pass is over."""

    num_saved = 0

    def finish_save(self, save: LayerSave) -> bool:
        saved = super().finish_save(save)
        self.num_saved += saved
        return saved


class Watched:
    """An engine with watched transfers, whose attention is watched.

    Attributes:
        num_overlaps: Passes that began to attend while something was being loaded.
        fails: Whether attention to the second layer raises.
    """

    def __init__(self, open_harness: Callable[[], Harness]) -> None:
        self.streams = WatchedStreams()
        self.num_overlaps = 0
        self.fails = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_side, "transfers_for", self._transfers_for)
            self.harness = open_harness()
        self.harness.on_worker(self._watch)

    def _transfers_for(
        self, access: KvAccess, layers: Sequence[Tensor]
    ) -> StreamTransfers:
        layout = WatchedLayout(self.streams, access.layout, len(layers))
        self.transfers = CountedTransfers(replace(access, layout=layout), self.streams)
        return self.transfers

    def _watch(self, worker: Any) -> None:
        context = worker.model_runner.compilation_config.static_forward_context
        for index, layer in enumerate(context.values()):
            self._watch_kernel(index, layer.impl)

    def _watch_kernel(self, index: int, kernel: Any) -> None:
        write, attend = kernel.do_kv_cache_update, kernel.forward

        def watched_write(layer: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
            self.streams.touch_slots(index, slots, write=True)
            write(layer, k, v, cache, slots)

        def watched_attend(
            layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, **rest: Any
        ) -> Any:
            if index == 0:
                self.num_overlaps += self._is_loading()
            if index == 1 and self.fails:
                raise RuntimeError("the kernel is out of order")
            lens = metadata.seq_lens.tolist()
            for table, seq_len in zip(metadata.block_table, lens, strict=False):
                positions = torch.arange(seq_len)
                size = cache.shape[2]
                slots = table[positions // size] * size + positions % size
                self.streams.touch_slots(index, slots, write=False)
            return attend(layer, q, k, v, cache, metadata, **rest)

        kernel.do_kv_cache_update, kernel.forward = watched_write, watched_attend

    def _is_loading(self) -> bool:
        clocks = self.streams.clocks
        return clocks[ENGINE][LOAD] < clocks[LOAD][LOAD]


@pytest.fixture(scope="module")
def watched(
    harness_of: HarnessPool,
    tiny_model: Callable[[str | Path], Path],
    reference_of: Callable[[str | Path], DenseReference],
) -> Iterator[Watched]:
    harness_of.close()
    watched = Watched(lambda: Harness(tiny_model(KIND), reference_of(KIND)))
    yield watched
    watched.harness.close()


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_is_the_reference(watched: Watched, name: str) -> None:
    """And nothing that vLLM does could overtake a load or a save."""
    harness, before = watched.harness, watched.num_overlaps
    scenario = next(s for s in scenarios(SCENARIOS.index(name)) if s.name == name)
    harness.store([c for c in scenario.prompt.chunks if c in scenario.stored])
    completion, layout = harness.run(scenario.prompt.chunks)
    harness.check(completion, layout)
    # Loads ran beside a pass wherever there was something to load, the chunks that
    # were just generated included.
    assert (watched.num_overlaps > before) == (name != "monolithic")


def test_generated_chunks_are_saved_beside_the_pass_that_completes_them(
    watched: Watched,
) -> None:
    """In the step that admits them, and over several steps."""
    harness = watched.harness
    for seed, lens, num_segments in (
        (72, LENS, 1 + 1 + 1),
        (73, (37, 1500, 600, 1400, 23), 1 + 6 + 3 + 6),
    ):
        before = watched.transfers.num_saved
        completion, layout = harness.run(random_prompt(seed, lens).chunks)
        harness.check(completion, layout)
        assert watched.transfers.num_saved == before + num_segments
        harness.engine.clear_prefix_cache()
        completion, layout = harness.run(random_prompt(seed, lens).chunks)
        harness.check(completion, layout)
        assert completion.reuse.hit_tokens == sum(lens[:-1])


def test_what_a_pass_completes_in_place_is_saved_beside_it(watched: Watched) -> None:
    harness, before = watched.harness, watched.transfers.num_saved
    prompt = random_prompt(70, LENS)
    harness.run(prompt.chunks[:1] + prompt.chunks[-1:], max_tokens=1)
    assert watched.transfers.num_saved == before + 1
    harness.engine.clear_prefix_cache()
    completion, layout = harness.run(prompt.chunks)
    harness.check(completion, layout)
    assert completion.reuse.contiguous_hit_tokens == LENS[0]


def test_a_pass_without_hooks_waits_for_all_layers_before_it_begins(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is replayed from a CUDA graph as a whole."""
    monkeypatch.setattr(connector, "replays_whole_graph", lambda: True)
    harness, prompt = watched.harness, random_prompt(72, LENS)
    overlaps, saved = watched.num_overlaps, watched.transfers.num_saved
    harness.store(prompt.chunks[:-1])
    completion, layout = harness.run(prompt.chunks)
    harness.check(completion, layout)
    assert completion.reuse.generated_tokens == 0
    assert watched.num_overlaps == overlaps
    assert watched.transfers.num_saved == saved


def test_a_pass_that_fails_leaves_nothing_under_way(watched: Watched) -> None:
    """The last test of this engine, whose next pass would not be as it should."""
    watched.harness.store(random_prompt(71, LENS).chunks[:2])

    def failing_pass(worker: Any) -> bool:
        side = worker._side
        record = side.store.read(side.store.keys()[0], side._fingerprint)
        side._bound_mover.place(
            record,
            [NULL_BLOCK],
            chunk_start=0,
            segment_start=0,
            place_from=0,
            place_until=4,
        )
        sub = SubRequest(range(4), 0, 4, [NULL_BLOCK])
        watched.fails = True
        with pytest.raises(RuntimeError, match="out of order"):
            worker._run_pass(StepBuilder().alone(empty_step(), [sub], first=True))
        return watched.streams.has_happened(LOAD)

    before = watched.streams.clocks[LOAD][LOAD]
    assert watched.harness.on_worker(failing_pass)
    assert watched.streams.clocks[LOAD][LOAD] > before
