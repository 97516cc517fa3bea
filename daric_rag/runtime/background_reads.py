"""Reading records beside the engine's steps, and no longer than computing would take.

Records in memory are there at once. Others are read by a thread, a few chunks at a time
in the order of the prompts. They have as long as computing them and all before them in
their request would take, not counting what is read for others before; then they are
given up and generated like any other miss. So a disk that is slower than the engine, or
that hangs, costs a request little more than computing it costs anyway, and nobody has
to know beforehand which disk is slow.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field

from daric_rag.keys import SegmentKey
from daric_rag.runtime.pace import Pace
from daric_rag.storage.base import Record

__all__ = ["BackgroundReads", "PendingRead", "wait_for_all", "wait_for_any"]

Records = list[Record | None]
ReadFn = Callable[[Sequence[SegmentKey], Sequence[int]], Records]
"""From segments' keys and lengths in tokens to their records; must not raise."""

ChunkSegments = tuple[Sequence[SegmentKey], Sequence[int]]
"""Keys and lengths in tokens of a chunk's segments."""

# Chunks of so many tokens are read at a time, their files side by side.
_GROUP_LEN = 1024
_LOOK_AGAIN_S = 0.05
# How long closing waits for a read that nobody wants any more.
_CLOSE_TIMEOUT_S = 5.0
# A read that takes so many times what it may is taken to hang.
_HANGING_ALLOWANCES = 2
# A request's time runs from when the thread comes to it, and at most so many times as
# long from its beginning.
_MOST_ALLOWANCES = 4


@dataclass(slots=True)
class _Clock:
    """A request's time.

    Attributes:
        begun_s: When it began, of `time.perf_counter`.
        read_s: When the thread came to it; None before.
    """

    begun_s: float
    read_s: float | None = None

    def deadline_s(self, allowance_s: float) -> float:
        """Return when an allowance is used up, as far as is known by now."""
        latest_s = self.begun_s + _MOST_ALLOWANCES * allowance_s
        return (
            latest_s
            if self.read_s is None
            else min(latest_s, self.read_s + allowance_s)
        )


@dataclass(frozen=True, slots=True)
class PendingRead:
    """Worker process. A chunk's records on their way into memory.

    Attributes:
        keys: The segments, [n].
        allowance_s: Seconds after which it is given up.
        clock: Of its request.
        future: Records of these segments and of others read with them.
        offset: Of the first of them there.
    """

    keys: tuple[SegmentKey, ...]
    allowance_s: float
    clock: _Clock
    future: Future[Records]
    offset: int = 0

    @property
    def deadline_s(self) -> float:
        """When it is given up, of `time.perf_counter`; may come nearer."""
        return self.clock.deadline_s(self.allowance_s)

    @property
    def is_settled(self) -> bool:
        """Whether `take` has its final answer."""
        return self.future.done() or time.perf_counter() >= self.deadline_s

    def take(self) -> Records | None:
        """Return the records, or None if the read is given up; for good.

        What is on its way then is finished in its thread, and forgotten.
        """
        if self.future.done() and not self.future.cancelled():
            return self.future.result()[self.offset : self.offset + len(self.keys)]
        self.future.cancel()
        return None


class BackgroundReads:
    """Worker process. Starts reads; the thread comes with the first that needs one.

    There is one: two would keep each other from the store's index.

    Args:
        read: Reads this rank's records; called from any thread.
        is_near: Whether a segment's record is in memory.
        pace: Of computing.
        on_exit: Called in the thread as it ends, to close what `read` opened there.
    """

    def __init__(
        self,
        read: ReadFn,
        is_near: Callable[[SegmentKey], bool],
        pace: Pace,
        *,
        on_exit: Callable[[], object] = lambda: None,
    ) -> None:
        self._read, self._is_near, self._pace = read, is_near, pace
        self._on_exit = on_exit
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: _Work | None = None

    def start(self, chunks: Sequence[ChunkSegments]) -> list[PendingRead]:
        """Begin to read a request's chunks.

        Args:
            chunks: By position.

        Returns:
            One read per chunk; those of records in memory are settled.
        """
        clock = _Clock(time.perf_counter())
        num_tokens = 0
        reads: list[PendingRead] = []
        for group in self._groups(chunks):
            num_tokens += sum(sum(lens) for _, lens in group)
            allowance_s = self._pace.allowance_s(num_tokens)
            future = self._submit(
                [key for keys, _ in group for key in keys],
                [length for _, lens in group for length in lens],
                clock,
                allowance_s,
            )
            offset = 0
            for keys, _ in group:
                reads.append(
                    PendingRead(tuple(keys), allowance_s, clock, future, offset)
                )
                offset += len(keys)
        return reads

    def close(self) -> None:
        """Drop what has not begun; wait a little for what has.

        A read that hangs does not keep the process: its thread is a daemon.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with suppress(queue.Empty):
            while work := self._queue.get_nowait():
                work.future.cancel()
        self._queue.put(None)
        thread.join(_CLOSE_TIMEOUT_S)

    def _groups(self, chunks: Sequence[ChunkSegments]) -> Iterator[list[ChunkSegments]]:
        """Put together what is read at a time; nothing joins what is in memory."""
        group: list[ChunkSegments] = []
        num_tokens, was_near = 0, False
        for chunk in chunks:
            keys, lens = chunk
            near = all(map(self._is_near, keys))
            if group and (near or was_near or num_tokens + sum(lens) > _GROUP_LEN):
                yield group
                group, num_tokens = [], 0
            group.append(chunk)
            num_tokens += sum(lens)
            was_near = near
        if group:
            yield group

    def _submit(
        self,
        keys: Sequence[SegmentKey],
        lens: Sequence[int],
        clock: _Clock,
        allowance_s: float,
    ) -> Future[Records]:
        work = _Work(keys, lens, clock, allowance_s)
        # Where no thread can be started, reading here is better than not at all.
        if all(map(self._is_near, keys)) or not self._has_thread():
            work.run(self._read)
        elif self._is_hanging:
            work.future.cancel()
        else:
            self._queue.put(work)
        return work.future

    @property
    def _is_hanging(self) -> bool:
        """Whether waiting for the thread would be in vain, as far as can be told."""
        work = self._running
        if work is None or work.clock.read_s is None:
            return False
        spent_s = time.perf_counter() - work.clock.read_s
        return spent_s > _HANGING_ALLOWANCES * work.allowance_s

    def _has_thread(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(
                target=self._serve, name="daric-load", daemon=True
            )
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            if work.clock.read_s is None:
                work.clock.read_s = time.perf_counter()
            self._running = work
            work.run(self._read)
            self._running = None
        self._on_exit()


@dataclass(frozen=True, slots=True)
class _Work:
    """Segments to be read at a time, for a request."""

    keys: Sequence[SegmentKey]
    lens: Sequence[int]
    clock: _Clock
    allowance_s: float
    future: Future[Records] = field(default_factory=Future)

    def run(self, read: ReadFn) -> None:
        """Read them, unless they are not wanted any more."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(read(self.keys, self.lens))
            except BaseException as error:
                self.future.set_exception(error)


def wait_for_any(reads: Sequence[PendingRead], timeout_s: float) -> None:
    """Return when one of some reads is settled, or after `timeout_s` seconds."""
    first_s = min((read.deadline_s for read in reads), default=0.0)
    left_s = min(timeout_s, first_s - time.perf_counter())
    wait([read.future for read in reads], max(0.0, left_s), FIRST_COMPLETED)


def wait_for_all(reads: Sequence[PendingRead]) -> None:
    """Return when all of some reads are settled."""
    for read in reads:
        # Again and again, because deadlines come nearer.
        while not read.is_settled:
            left_s = read.deadline_s - time.perf_counter()
            wait([read.future], min(_LOOK_AGAIN_S, max(0.0, left_s)))
