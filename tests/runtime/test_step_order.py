"""The order of work that shared blocks depend on, on fakes: no engine, no model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from daric_rag.chunk_plan import ChunkPlan
from daric_rag.config import DaricConfig
from daric_rag.keys import ModelFingerprint, SegmentKey, segment_keys
from daric_rag.runtime.background_reads import (
    BackgroundReads,
    PendingRead,
    _Clock,
)
from daric_rag.runtime.chunk_blocks import ChunkRead, MissingChunk
from daric_rag.runtime.fill_queue import FillQueue
from daric_rag.runtime.metadata import DaricWorkerMetadata
from daric_rag.runtime.pace import Pace
from daric_rag.runtime.scheduler_side import SchedulerSide
from daric_rag.runtime.scratch import ScratchBlocks
from daric_rag.runtime.step_builder import SubRequest
from daric_rag.runtime.step_run import StepRun
from daric_rag.runtime.store_view import StoreView
from daric_rag.selection import ReuseMode
from daric_rag.steps import Limits, RequestStep, StepPlan
from daric_rag.wire import RequestWire, encode_request, salt_of

BLOCK_SIZE = 16
ROOT = ModelFingerprint(bytes(32))
IDS = tuple(range(400))
# Ids tell requests apart in sub-requests.
OTHER_IDS = tuple(range(1000, 1400))


def chunk(key: int, start: int, end: int) -> ChunkPlan:
    keys = (SegmentKey(bytes([key]) * 32),)
    return ChunkPlan(start, end, keys, 256, 0, start, contiguous=False)


def request(
    req_id: str,
    *chunks: ChunkPlan,
    windows: Sequence[tuple[int, int]] = (),
    ids: Sequence[int] = IDS,
    waits: bool = True,
) -> RequestStep:
    blocks = tuple(range(25))
    return RequestStep(
        req_id, ids, blocks, chunks, tuple(windows), 380, ROOT, "default", waits
    )


class Chunks:
    """A store that has nothing but what is `arriving`, by chunk."""

    def __init__(self) -> None:
        self.arriving: dict[ChunkPlan, PendingRead] = {}
        self.placed: list[tuple[str, ChunkPlan]] = []
        self.harvested: list[tuple[SegmentKey, tuple[int, ...], set[str]]] = []

    def start_reading(self, step: RequestStep) -> list[ChunkRead]:
        return [ChunkRead(part, self.arriving.get(part)) for part in step.chunks]

    def settled(self, reads: Sequence[PendingRead]) -> list[bool]:
        return [read.is_settled for read in reads]

    def place(
        self,
        step: RequestStep,
        parts: Sequence[ChunkRead],
        missing: dict[SegmentKey, MissingChunk],
    ) -> None:
        for part in parts:
            chunk = part.chunk
            if part.read is not None and part.read.take() is not None:
                self.placed.append((step.req_id, chunk))
                continue
            ids = tuple(step.token_ids[chunk.start : chunk.end])
            entry = missing.setdefault(chunk.keys[-1], MissingChunk(chunk, ids, []))
            entry.wanted.append((step, chunk))

    def seed(self, entry: MissingChunk, blocks: Sequence[int]) -> None:
        """Nothing was loaded."""

    def expect_saves(self, entry: MissingChunk, blocks: Sequence[int]) -> None:
        """Saved when it is harvested."""

    def harvest(self, entry: MissingChunk, blocks: Sequence[int]) -> set[str]:
        wanted = {step.req_id for step, _ in entry.wanted}
        self.harvested.append((entry.key, tuple(blocks), wanted))
        return wanted


class Filling:
    """A queue, its store, and passes of a fixed size."""

    def __init__(self, num_tokens: int = 32, num_scratch: int = 20) -> None:
        self.queue, self.chunks = FillQueue(BLOCK_SIZE), Chunks()
        self.limits = Limits(num_tokens, 8)
        self.queue.hold(tuple(range(100, 100 + num_scratch)))

    def add(self, *requests: RequestStep) -> None:
        self.queue.add(requests, self.chunks)  # type: ignore[arg-type]

    def read(self, part: ChunkPlan, allowed_s: float = 60.0) -> PendingRead:
        """Have a chunk arrive from now on."""
        clock = _Clock(time.perf_counter(), time.perf_counter())
        arriving = PendingRead(part.keys, allowed_s, clock, Future())
        self.chunks.arriving[part] = arriving
        return arriving

    def next_pass(self) -> list[SubRequest]:
        self.queue.take_reads(self.chunks, DaricWorkerMetadata())  # type: ignore[arg-type]
        return self.queue.next_pass(self.limits, self.chunks)  # type: ignore[arg-type]

    def complete(self) -> None:
        report = DaricWorkerMetadata()
        self.queue.complete(self.chunks, report, 0.0)  # type: ignore[arg-type]

    def run(self) -> list[tuple[int, int]]:
        subs = self.next_pass()
        self.complete()
        return [(sub.start, sub.end) for sub in subs]


# ---------------------------------------------------------------------- the fill queue


def test_chunks_come_before_windows_and_both_are_cut() -> None:
    filling = Filling()
    filling.add(request("a", chunk(1, 100, 150), windows=[(10, 20), (100, 140)]))
    assert filling.queue.backlog_len == 50 + 50
    assert filling.run() == [(0, 32)]
    assert filling.run() == [(32, 50)]
    assert filling.run() == [(10, 20), (100, 122)]
    assert filling.queue.take_filled() == set()
    assert filling.run() == [(122, 140)]
    assert filling.queue.take_filled() == {"a"}
    assert filling.queue.backlog_len == 0


def test_a_failed_pass_computed_nothing() -> None:
    """What it was to compute is computed by the next one."""
    filling = Filling()
    filling.add(request("a", chunk(1, 100, 130), windows=[(10, 20)]))
    filling.next_pass()  # and fails
    assert filling.run() == [(0, 30)]
    filling.next_pass()
    assert filling.run() == [(10, 20)]
    assert filling.queue.take_filled() == {"a"}


def test_a_shared_chunk_is_generated_once_and_outlives_who_asked_first() -> None:
    filling = Filling()
    shared = chunk(1, 100, 150)
    filling.add(request("a", shared))
    filling.run()
    filling.add(request("b", chunk(1, 200, 250)))
    assert filling.queue.backlog_len == 18
    filling.queue.drop(["a"])
    assert filling.queue.take_filled() == {"a"}
    assert filling.run() == [(32, 50)]
    ((_, blocks, wanted),) = filling.chunks.harvested
    assert wanted == {"b"}
    assert len(blocks) == 4
    assert filling.queue.take_filled() == {"b"}


def test_dropping_the_last_who_wants_a_chunk_drops_it() -> None:
    filling = Filling()
    filling.add(request("a", chunk(1, 100, 150)))
    filling.run()
    filling.queue.drop(["a", "never here"])
    assert filling.run() == []
    assert filling.queue.take_filled() == {"a"}
    assert filling.queue.backlog_len == 0


def test_the_urgent_go_first() -> None:
    filling = Filling()
    calm = request("calm", chunk(1, 100, 150), windows=[(10, 20)])
    urgent = request("urgent", chunk(2, 200, 232), windows=[(40, 50)])
    filling.add(calm, replace(urgent, priority=-1))
    assert filling.run() == [(0, 32)]
    assert filling.run() == [(40, 50), (0, 22)]
    assert filling.queue.take_filled() == {"urgent"}


def test_scratch_blocks_have_one_chunk_at_a_time() -> None:
    """The next in line gets them; nobody smaller overtakes it."""
    filling = Filling(num_tokens=64, num_scratch=5)
    filling.add(
        request("a", chunk(1, 100, 130)),
        request("b", chunk(2, 100, 170)),
        request("c", chunk(3, 100, 116)),
    )
    assert filling.run() == [(0, 30)]
    assert filling.run() == [(0, 64)]
    assert filling.run() == [(64, 70)]
    assert filling.run() == [(0, 16)]
    assert filling.queue.take_filled() == {"a", "b", "c"}


def test_a_chunk_too_long_for_the_scratch_is_computed_in_place() -> None:
    filling = Filling(num_tokens=200, num_scratch=5)
    filling.add(request("a", chunk(1, 100, 200), windows=[(90, 110)]))
    assert filling.run() == [(90, 200)]
    assert filling.queue.take_filled() == {"a"}


def test_windows_wait_for_records_and_other_chunks_do_not() -> None:
    filling, far = Filling(), chunk(1, 100, 150)
    arriving = filling.read(far)
    filling.add(request("a", far, chunk(2, 200, 230), windows=[(10, 20)]))
    assert filling.run() == [(0, 30)]
    assert filling.run() == []
    assert filling.queue.take_filled() == set()
    arriving.future.set_result([])
    assert filling.run() == [(10, 20)]
    assert filling.chunks.placed == [("a", far)]
    assert filling.queue.take_filled() == {"a"}


def test_windows_that_wait_for_records_are_no_backlog() -> None:
    """Nobody is to wait for what cannot be computed yet."""
    filling, far = Filling(), chunk(1, 100, 150)
    arriving = filling.read(far)
    filling.add(request("a", far, windows=[(10, 20)]))
    filling.run()
    assert filling.queue.backlog_len == 0
    arriving.future.set_result([])
    filling.next_pass()
    assert filling.queue.backlog_len == 10


def test_records_that_are_too_late_are_generated_instead() -> None:
    filling, far = Filling(), chunk(1, 100, 130)
    late = filling.read(far, allowed_s=0.0)
    filling.add(request("a", far, windows=[(10, 20)]))
    assert filling.run() == [(0, 30)]
    assert late.future.cancelled()
    assert filling.run() == [(10, 20)]
    assert filling.queue.take_filled() == {"a"}


def test_nobody_reads_for_a_request_that_ended() -> None:
    filling, far = Filling(), chunk(1, 100, 130)
    arriving = filling.read(far)
    filling.add(request("a", far))
    filling.queue.drop(["a"])
    assert arriving.future.cancelled()
    assert filling.run() == []
    assert filling.queue.take_filled() == {"a"}
    assert filling.chunks.placed == []


def test_only_a_queue_without_other_work_waits_for_records() -> None:
    filling, far = Filling(), chunk(1, 100, 130)
    filling.queue.wait_for_reads(60.0)  # for none: returns
    filling.read(far)
    filling.add(request("a", far), request("b", chunk(2, 200, 230)))
    started_s = time.perf_counter()
    filling.queue.wait_for_reads(60.0)  # b's chunk can be computed: returns
    assert filling.run() == [(0, 30)]
    assert filling.queue.take_filled() == {"b"}
    assert time.perf_counter() - started_s < 30
    started_s = time.perf_counter()
    filling.queue.wait_for_reads(0.05)
    assert time.perf_counter() - started_s >= 0.05


# ----------------------------------------------------------------------------- a step


class Passes:
    """Takes note of passes; vLLM's own one holds `num_tokens`."""

    def __init__(self, num_tokens: int) -> None:
        self.scheduled = SimpleNamespace(finished_req_ids=set())
        self.scheduled_size = Limits(num_tokens, 1)
        self.passes: list[list[int]] = []

    def run(self, subs: Sequence[SubRequest]) -> None:
        self.passes.append([sub.token_ids[0] for sub in subs])

    def join(self, subs: Sequence[SubRequest]) -> Any:
        self.passes.append([sub.token_ids[0] for sub in subs])
        return self.scheduled

    def end(self) -> None:
        """The last one has run."""


@pytest.mark.parametrize(
    ("num_scheduled", "expected"),
    [(50, [[0], [1000], []]), (20, [[0, 1000]])],
    ids=["no room", "room"],
)
def test_the_queue_never_runs_before_the_steps_own_windows(
    num_scheduled: int, expected: list[list[int]]
) -> None:
    """Its requests may attend to the blocks that those fill, by a shared prefix."""
    mover = SimpleNamespace(exact_records=True, agree=list)
    reads = BackgroundReads(lambda keys, _: [None] * len(keys), lambda _: True, Pace())
    plan = StepPlan(
        (
            request("now", windows=[(0, 8)], waits=False),
            request("later", windows=[(8, 20)], ids=OTHER_IDS),
        )
    )
    passes = Passes(num_scheduled)
    run = StepRun(
        mover,  # type: ignore[arg-type]
        reads,
        FillQueue(BLOCK_SIZE),
        plan,
        passes,  # type: ignore[arg-type]
        limits=Limits(64, 8),
        block_size=BLOCK_SIZE,
    )
    run.prepare()
    assert passes.passes == expected


# ------------------------------------------------------------------- the scheduler side


class Pool:
    """A block pool with plenty of blocks."""

    num_gpu_blocks = 1000
    enable_caching = True

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks - 1

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        return [SimpleNamespace(block_id=i + 1) for i in range(num_blocks)]

    def free_blocks(self, blocks: Any) -> None:
        """Nobody counts them."""


def conversation(*ends: int, mode: ReuseMode = "daric") -> RequestWire:
    """A prompt of a conversation, whose prompts share blocks."""
    reusable = (True,) * (len(ends) - 1) + (False,)
    return RequestWire(ends, reusable, mode, DaricConfig(), conversation="c")


SHORT, LONG = conversation(100, 200, 300), conversation(100, 200, 300, 420, 500)


def vllm_request(
    req_id: str, wire: RequestWire = SHORT, *, params: dict[str, Any] | None = None
) -> Any:
    num_tokens = wire.prompt_len
    return SimpleNamespace(
        request_id=req_id,
        prompt_token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
        cache_salt=salt_of(wire),
        skip_reading_prefix_cache=False,
        priority=0,
        kv_transfer_params=encode_request(wire) if params is None else params,
    )


def scheduler_side(pass_len: int, config: DaricConfig | None = None) -> SchedulerSide:
    view = StoreView(
        lambda _: ROOT,
        probe=lambda _: False,
        max_bytes=1 << 30,
        segment_bytes=1 << 10,
        max_segment_len=256,
    )
    made = SchedulerSide(config or DaricConfig(), view, Limits(pass_len, 8))
    made.bind_scratch(ScratchBlocks(Pool(), BLOCK_SIZE, pass_len))
    return made


@pytest.fixture
def side() -> SchedulerSide:
    return scheduler_side(4096)


def start(side: SchedulerSide, name: str, prefix: int, after: int) -> Any:
    """A request in its prefill: admitted, and computed up to `after`."""
    started = vllm_request(name)
    side.track(started)
    num_tokens, _ = side.match(started, prefix)
    assert num_tokens is not None
    side.admit(started, range(25), num_tokens)
    side.build_step({name: after}, lambda _: range(25))
    side.end_step(())
    return started


def test_two_preempted_requests_do_not_wait_for_each_other(
    side: SchedulerSide,
) -> None:
    """The one in front may start as soon as vLLM has asked about the other."""
    behind = start(side, "behind", 0, 290)
    front = vllm_request("front", LONG)
    side.track(front)
    # The prefix reaches into what `behind` was computing when it was preempted.
    assert side.match(front, 288) == (None, False)
    assert side.match(behind, 288) == (None, False)
    side.build_step({}, lambda _: ())
    num_tokens, _ = side.match(front, 288)
    assert num_tokens is not None


def test_a_chunk_that_may_be_lost_waits_for_the_blocks_before_it(
    side: SchedulerSide,
) -> None:
    """It would be computed in place, over blocks that another one is still filling."""
    short = conversation(100, 200, 300, mode="full_reuse")
    behind = vllm_request("behind", short)
    side.track(behind)
    num_tokens, _ = side.match(behind, 0)
    assert num_tokens is not None
    side.admit(behind, range(25), num_tokens)
    side.build_step({"behind": 290}, lambda _: range(25))
    side.end_step(())
    front = vllm_request(
        "front", conversation(100, 200, 300, 420, 500, mode="full_reuse")
    )
    side.track(front)
    assert side.match(front, 288) == (None, False)
    side.build_step({"behind": 300}, lambda _: range(25))
    assert side.match(front, 288) == (132, False)


def test_a_damaged_layout_holds_nobody_up_once_it_is_computed(
    side: SchedulerSide,
) -> None:
    damage = dict.fromkeys(encode_request(SHORT), "?")
    damaged = vllm_request("damaged", params=damage)
    side.track(damaged)
    assert side.match(damaged, 0) == (0, False)
    side.admit(damaged, range(25), 0)
    side.build_step({"damaged": 300}, lambda _: range(25))
    side.end_step(())
    other = vllm_request("other")
    side.track(other)
    num_tokens, _ = side.match(other, 16)
    assert num_tokens is not None


def test_an_ordinary_request_of_the_same_salt_may_be_filling_blocks_too(
    side: SchedulerSide,
) -> None:
    ordinary = vllm_request("ordinary", params={})
    side.track(ordinary)
    assert side.match(ordinary, 0) == (0, False)
    side.admit(ordinary, range(25), 0)
    side.build_step({"ordinary": 200}, lambda _: range(25))
    side.end_step(())
    other = vllm_request("other", LONG)
    side.track(other)
    assert side.match(other, 288) == (None, False)
    side.build_step({"ordinary": 300}, lambda _: range(25))
    num_tokens, _ = side.match(other, 288)
    assert num_tokens is not None
    assert side.finish(ordinary) is None


def test_a_resumed_request_fills_blocks_beyond_its_prompt(side: SchedulerSide) -> None:
    """It was preempted when it had answered with 100 tokens."""
    resumed = vllm_request("resumed")
    resumed.num_tokens = 400
    side.track(resumed)
    num_tokens, _ = side.match(resumed, 0)
    assert num_tokens is not None
    side.admit(resumed, range(25), num_tokens)
    side.build_step({"resumed": 350}, lambda _: range(25))
    side.end_step(())
    # It goes on where the answer had got to.
    other = vllm_request("other", LONG)
    side.track(other)
    assert side.match(other, 384) == (None, False)
    side.build_step({"resumed": 400}, lambda _: range(25))
    num_tokens, _ = side.match(other, 384)
    assert num_tokens is not None


@pytest.mark.parametrize(("storage", "is_saved"), [("model", True), ("int8", False)])
def test_nothing_is_saved_on_top_of_records_that_are_not_exact(
    storage: Any, is_saved: bool
) -> None:
    """The prefix cache has a first chunk's beginning, the store not any more."""
    side = scheduler_side(4096, DaricConfig(kv_storage=storage))
    ends = (100, 200, 300)
    wire = RequestWire(ends, (True, True, False), "daric", DaricConfig())
    request = vllm_request("a", wire)
    side.track(request)
    num_tokens, _ = side.match(request, 64)
    assert num_tokens is not None
    side.admit(request, range(25), num_tokens)
    plan = side.build_step({"a": 300}, lambda _: range(25))
    assert any(save.start == 0 for save in plan.saves) == is_saved


class ScarcePool(Pool):
    """Has few free blocks."""

    num_free = 40

    def get_num_free_blocks(self) -> int:
        return self.num_free

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        self.num_free -= num_blocks
        return super().get_new_blocks(num_blocks)


@pytest.mark.parametrize(("asynchronous", "left"), [(False, 0), (True, 20)])
def test_what_is_held_for_long_leaves_half_of_what_is_free(
    asynchronous: bool, left: int
) -> None:
    pool = ScarcePool()
    scratch = ScratchBlocks(pool, 32, 8192)
    lens = [128] * 10
    scratch.borrow(1300, lens, lens, asynchronous=asynchronous)
    assert pool.num_free == left
    # The longest chunk has its room however little there is.
    pool.num_free = 5
    more = ScratchBlocks(pool, 32, 8192)
    more.borrow(1300, lens, lens, asynchronous=True)
    assert pool.num_free == 1


def test_nobody_waits_for_a_disk_but_the_request_itself(side: SchedulerSide) -> None:
    """Alone it reads within its step; beside others it waits, unless memory has it."""
    root = side._view.root("default")
    keys = segment_keys(root, range(100, 200), 256)
    side._view.learn(keys[0], root)
    alone = vllm_request("alone")
    side.track(alone)
    assert side.match(alone, 0) == (200, False)
    ordinary = vllm_request("ordinary", params={})
    side.track(ordinary)
    assert side.match(alone, 0) == (200, True)
    side.finish(ordinary)
    assert side.match(alone, 0) == (200, False)
    side.admit(alone, range(25), 200)  # which brings its records to memory
    side.build_step({"alone": 300}, lambda _: range(25))
    side.take_report(DaricWorkerMetadata())
    side.end_step(())
    other = vllm_request("other")
    side.track(other)
    assert side.match(other, 0) == (200, False)
    side.take_report(DaricWorkerMetadata(demoted={keys[0]}))
    assert side.match(other, 0) == (200, True)
    # One that is aborted while it reads has brought nothing to memory.
    side.admit(other, range(25), 200)
    side.build_step({}, lambda _: ())
    side.finish(other)
    side.take_report(DaricWorkerMetadata())
    side.end_step(["other"])
    side.track(alone)
    next_one = vllm_request("next")
    side.track(next_one)
    assert side.match(next_one, 0) == (200, True)


@pytest.fixture
def filling() -> SchedulerSide:
    """One request waits until its blocks are filled: it does not fit into a step."""
    side = scheduler_side(512)
    first = vllm_request("first")
    side.track(first)
    num_tokens, waits = side.match(first, 0)
    assert num_tokens is not None
    assert waits
    side.admit(first, range(25), num_tokens)
    side.build_step({}, lambda _: ())
    side.end_step(())
    return side


def test_a_twin_waits_until_the_blocks_are_filled(filling: SchedulerSide) -> None:
    """Then it has them from the prefix cache, and nothing to wait for."""
    twin = vllm_request("twin")
    filling.track(twin)
    assert filling.match(twin, 0) == (None, False)
    filling.end_step(["first"])
    num_tokens, waits = filling.match(twin, 288)
    assert num_tokens is not None
    assert not waits


def test_the_urgent_do_not_wait_for_a_twin(filling: SchedulerSide) -> None:
    twin = vllm_request("twin")
    twin.priority = -1
    filling.track(twin)
    num_tokens, _ = filling.match(twin, 0)
    assert num_tokens is not None


def test_twins_do_not_wait_where_blocks_are_not_shared(
    filling: SchedulerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pool, "enable_caching", False)
    twin = vllm_request("twin")
    filling.track(twin)
    num_tokens, _ = filling.match(twin, 0)
    assert num_tokens is not None


def test_a_twin_waits_for_no_request_that_ended(filling: SchedulerSide) -> None:
    twin = vllm_request("twin")
    filling.track(twin)
    filling.finish(SimpleNamespace(request_id="first"))
    num_tokens, _ = filling.match(twin, 0)
    assert num_tokens is not None


def test_nobody_waits_behind_a_waiting_twin(filling: SchedulerSide) -> None:
    """Neither ordinary requests nor other prompts of the same salt."""
    twin, other = vllm_request("twin"), vllm_request("other")
    other.prompt_token_ids = other.prompt_token_ids[::-1]
    ordinary = vllm_request("ordinary", params={})
    for behind in (twin, other, ordinary):
        filling.track(behind)
    assert filling.match(twin, 0) == (None, False)
    assert filling.match(ordinary, 0) == (0, False)
    num_tokens, _ = filling.match(other, 0)
    assert num_tokens is not None
