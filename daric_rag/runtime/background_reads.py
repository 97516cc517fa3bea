"""Reading records beside the engine's steps, and no longer than computing would take.

Records in memory are there at once. Others are read by threads, chunk after chunk in
the order of the prompts. A chunk has as long as computing it and all before it in its
request would take; then it is given up and generated like any other miss. So a disk
that is slower than the engine, or that hangs, costs a request about one chunk's time,
and nobody has to know beforehand which disk is slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass

from daric_rag.keys import SegmentKey
from daric_rag.runtime.pace import Pace
from daric_rag.storage.base import Record

__all__ = ["BackgroundReads", "PendingRead", "wait_for_all", "wait_for_any"]

Records = list[Record | None]
ReadFn = Callable[[Sequence[SegmentKey], Sequence[int]], Records]
"""From segments' keys and lengths in tokens to their records; must not raise."""

# Each reads a chunk's files side by side; the second one is for when the first hangs.
_NUM_THREADS = 2
# How long closing waits for reads that nobody wants any more.
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PendingRead:
    """Worker process. Records of some segments on their way into memory.

    Attributes:
        keys: The segments, [n].
        deadline_s: When it is given up, of `time.perf_counter`.
        future: Their records, [n].
    """

    keys: tuple[SegmentKey, ...]
    deadline_s: float
    future: Future[Records]

    @property
    def is_settled(self) -> bool:
        """Whether `take` has its final answer."""
        return self.future.done() or time.perf_counter() >= self.deadline_s

    def take(self) -> Records | None:
        """Return the records, or None if the read is given up; for good.

        What is on its way then is finished in its thread, and forgotten.
        """
        if self.future.done() and not self.future.cancelled():
            return self.future.result()
        self.future.cancel()
        return None


class BackgroundReads:
    """Worker process. Starts reads; threads come with the first that needs one.

    Args:
        read: Reads this rank's records; called from any thread.
        is_near: Whether a segment's record is in memory.
        pace: Of computing.
    """

    def __init__(
        self, read: ReadFn, is_near: Callable[[SegmentKey], bool], pace: Pace
    ) -> None:
        self._read, self._is_near, self._pace = read, is_near, pace
        self._threads: ThreadPoolExecutor | None = None
        self._running: set[Future[Records]] = set()

    def start(
        self, chunks: Sequence[tuple[Sequence[SegmentKey], Sequence[int]]]
    ) -> list[PendingRead]:
        """Begin to read a request's chunks.

        Args:
            chunks: Keys and lengths in tokens of each chunk's segments, by position.

        Returns:
            One read per chunk; those of records in memory are settled.
        """
        started_s = time.perf_counter()
        num_tokens = 0
        reads: list[PendingRead] = []
        for keys, lens in chunks:
            num_tokens += sum(lens)
            deadline_s = started_s + self._pace.allowance_s(num_tokens)
            future = self._submit(keys, lens)
            reads.append(PendingRead(tuple(keys), deadline_s, future))
        return reads

    def close(self) -> None:
        """Drop what has not begun; wait a little for what has."""
        threads, self._threads = self._threads, None
        if threads is None:
            return
        running = list(self._running)  # which shrinks meanwhile
        for future in running:
            future.cancel()
        _, hanging = wait(running, _CLOSE_TIMEOUT_S)
        threads.shutdown(wait=not hanging, cancel_futures=True)

    def _submit(
        self, keys: Sequence[SegmentKey], lens: Sequence[int]
    ) -> Future[Records]:
        if not all(map(self._is_near, keys)):
            # Where no thread can be started, reading here is better than not at all.
            with suppress(RuntimeError):
                return self._submit_to_thread(keys, lens)
        done: Future[Records] = Future()
        done.set_result(self._read(keys, lens))
        return done

    def _submit_to_thread(
        self, keys: Sequence[SegmentKey], lens: Sequence[int]
    ) -> Future[Records]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                _NUM_THREADS, thread_name_prefix="daric-load"
            )
        future = self._threads.submit(self._read, keys, lens)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future


def wait_for_any(reads: Sequence[PendingRead], timeout_s: float) -> None:
    """Return when one of some reads is settled, or after `timeout_s` seconds."""
    first_s = min((read.deadline_s for read in reads), default=0.0)
    left_s = min(timeout_s, first_s - time.perf_counter())
    wait([read.future for read in reads], max(0.0, left_s), FIRST_COMPLETED)


def wait_for_all(reads: Sequence[PendingRead]) -> None:
    """Return when all of some reads are settled."""
    for read in reads:
        wait([read.future], max(0.0, read.deadline_s - time.perf_counter()))
