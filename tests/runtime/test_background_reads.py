"""Reads beside the steps: from memory at once, from disk in time or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from daric_rag.keys import SegmentKey
from daric_rag.runtime import background_reads
from daric_rag.runtime.background_reads import (
    BackgroundReads,
    Records,
    wait_for_all,
    wait_for_any,
)
from daric_rag.runtime.pace import Pace


def keys(*numbers: int) -> tuple[SegmentKey, ...]:
    return tuple(SegmentKey(bytes([number]) * 32) for number in numbers)


class Disk:
    """Keys above 100 are on disk, whose reads end one by one as they are let go."""

    def __init__(self, token_s: float | None = None) -> None:
        self.threads: dict[tuple[SegmentKey, ...], str] = {}
        self.order: list[int] = []
        self.go = threading.Semaphore(0)
        pace = Pace()
        if token_s is not None:
            pace.note(1000, 1000 * token_s)
        self.exits: list[str] = []
        self.reads = BackgroundReads(
            self.read,
            lambda key: key[0] <= 100,
            pace,
            on_exit=lambda: self.exits.append(threading.current_thread().name),
        )

    def read(self, wanted: Sequence[SegmentKey], lens: Sequence[int]) -> Records:
        self.threads[tuple(wanted)] = threading.current_thread().name
        self.order.append(wanted[0][0])
        if wanted[0][0] > 100:
            assert self.go.acquire(timeout=30)
        assert len(wanted) == len(lens)
        return list(wanted)  # type: ignore[arg-type]

    def wait_until_reading(self, number: int) -> None:
        deadline_s = time.monotonic() + 30
        while number not in self.order and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert number in self.order


@pytest.fixture
def disk_of() -> Callable[..., Disk]:
    disks: list[Disk] = []

    def make(token_s: float | None = None) -> Disk:
        disks.append(Disk(token_s))
        return disks[-1]

    yield make  # type: ignore[misc]
    for disk in disks:
        disk.go.release(100)
        disk.reads.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("daric-load")]


def test_memory_is_read_at_once_and_here(disk_of: Callable[..., Disk]) -> None:
    disk = disk_of()
    near, mixed = disk.reads.start([(keys(1, 2), [5, 5]), (keys(103, 3), [5, 5])])
    assert near.is_settled
    assert near.take() == list(keys(1, 2))
    assert disk.threads[keys(1, 2)] == threading.current_thread().name
    assert not mixed.is_settled
    disk.go.release()
    wait_for_all([near, mixed])
    assert mixed.take() == list(keys(103, 3))
    assert disk.threads[keys(103, 3)].startswith("daric-load")


def test_a_read_has_as_long_as_computing_it_and_all_before_it(
    disk_of: Callable[..., Disk],
) -> None:
    disk = disk_of(token_s=0.01)
    before_s = time.perf_counter()
    chunks = [(keys(number), [600]) for number in (101, 102, 1, 103)]
    first, second, _, third = disk.reads.start(chunks)
    disk.wait_until_reading(101)
    assert first.deadline_s - before_s == pytest.approx(0.25 + 6.0, abs=0.1)
    assert second.deadline_s - first.deadline_s == pytest.approx(6.0)
    assert third.deadline_s - second.deadline_s == pytest.approx(12.0)


def test_what_is_read_for_others_before_does_not_count(
    disk_of: Callable[..., Disk],
) -> None:
    """But for four times its own time: the thread may never come to it."""
    disk = disk_of(token_s=0.01)
    disk.reads.start([(keys(101), [600])])
    disk.wait_until_reading(101)
    before_s = time.perf_counter()
    (queued,) = disk.reads.start([(keys(102), [600])])
    assert queued.deadline_s - before_s == pytest.approx(4 * 6.25, abs=0.1)
    time.sleep(0.05)
    disk.go.release()
    disk.wait_until_reading(102)
    assert 0.05 + 6.25 <= queued.deadline_s - before_s < 8


def test_a_read_that_hangs_keeps_nobody_from_closing(
    disk_of: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_reads, "_CLOSE_TIMEOUT_S", 0.05)
    disk = disk_of()
    disk.reads.start([(keys(101), [600])])
    disk.wait_until_reading(101)
    disk.reads.close()
    (thread,) = [t for t in threading.enumerate() if t.name == "daric-load"]
    assert thread.daemon
    disk.go.release()
    thread.join(30)
    assert disk.exits == ["daric-load"]


def test_a_disk_that_hangs_is_not_asked_again(disk_of: Callable[..., Disk]) -> None:
    disk = disk_of(token_s=0.0001)
    disk.reads.start([(keys(101), (10,))])
    disk.wait_until_reading(101)
    # Twice its quarter of a second, as is explained in `Pace`.
    time.sleep(0.6)
    started_s = time.perf_counter()
    reads = disk.reads.start([(keys(102), (10,))])
    wait_for_all(reads)
    assert time.perf_counter() - started_s < 0.1
    assert [read.take() for read in reads] == [None]
    assert disk.reads._queue.empty()
    # What is in memory is read all the same, and so is the disk when it answers.
    assert disk.reads.start([(keys(1), (10,))])[0].take() == [*keys(1)]
    disk.go.release(2)
    deadline_s = time.monotonic() + 30
    while disk.reads._running is not None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    again = disk.reads.start([(keys(103), (10,))])
    wait_for_all(again)
    assert again[0].take() == [*keys(103)]


def test_short_chunks_are_read_together(disk_of: Callable[..., Disk]) -> None:
    disk = disk_of()
    names = [(101, 102), (103,), (1,), (2,), (104,), (105,)]
    lens = [300, 400, 100, 100, 1000, 100]
    reads = disk.reads.start(
        [
            (keys(*name), [length // len(name)] * len(name))
            for name, length in zip(names, lens, strict=True)
        ]
    )
    disk.go.release(100)
    wait_for_all(reads)
    assert [number for number in disk.order if number > 100] == [101, 104, 105]
    assert [number for number in disk.order if number < 100] == [1, 2]
    assert [read.take() for read in reads] == [
        [SegmentKey(bytes([number]) * 32) for number in name] for name in names
    ]


def test_a_late_read_is_given_up(disk_of: Callable[..., Disk]) -> None:
    disk = disk_of(token_s=1e-6)
    hanging, queued = disk.reads.start([(keys(101), [600]), (keys(102), [600])])
    wait_for_all([hanging, queued])
    assert hanging.is_settled
    assert hanging.take() is None
    assert queued.take() is None
    # What had not begun never does.
    disk.go.release(3)
    disk.reads.close()
    assert disk.order == [101]


def test_waiting_for_any(disk_of: Callable[..., Disk]) -> None:
    disk = disk_of()
    reads = disk.reads.start([(keys(101), [600]), (keys(102), [600])])
    started_s = time.perf_counter()
    wait_for_any(reads, 0.05)
    assert time.perf_counter() - started_s >= 0.05
    assert not any(read.is_settled for read in reads)
    disk.go.release()
    wait_for_any(reads, 30)
    assert any(read.is_settled for read in reads)
    wait_for_any([], 30)


def test_closing_does_not_wait_for_what_has_not_begun(
    disk_of: Callable[..., Disk],
) -> None:
    disk = disk_of()
    reads = disk.reads.start([(keys(101 + i), [600]) for i in range(3)])
    disk.wait_until_reading(101)
    threading.Timer(0.05, disk.go.release).start()
    disk.reads.close()
    assert [read.future.cancelled() for read in reads] == [False, True, True]
    assert disk.order == [101]
    assert disk.exits == ["daric-load"]


# ------------------------------------------------------------------------------ pace


def test_nothing_computed_yet_leaves_much_time() -> None:
    assert Pace().allowance_s(100) == Pace().allowance_s(5000) >= 2


def test_the_pace_follows_recent_passes() -> None:
    pace = Pace()
    for _ in range(20):
        pace.note(1000, 10.0)
    for _ in range(20):
        pace.note(1000, 1.0)
    assert pace.allowance_s(1000) - pace.allowance_s(0) == pytest.approx(1.0, rel=0.1)


def test_short_passes_say_nothing() -> None:
    pace = Pace()
    pace.note(1000, 1.0)
    pace.note(1, 1.0)
    assert pace.allowance_s(1000) - pace.allowance_s(0) == pytest.approx(1.0)
