"""Asynchronous requests: their blocks are filled over as many steps as it takes.

To vLLM such a request waits for a transfer. What arrives is read from the store in the
background, or computed by the engine itself: in each step, beside whatever vLLM
scheduled, one pass's worth of it. So neither a slow disk nor a cold prompt of any
length makes a step longer than one and a quarter of vLLM's longest own ones, and
running requests go on decoding. A request's life in the queue::

    admitted    what is in memory is re-encoded and placed
    reading     the rest as it arrives, or is given up
    generating  missing chunks on their own, in held scratch blocks; then saved,
                re-encoded and placed wherever they are wanted
    recomputing early windows in ascending position, in place
    filled      vLLM schedules its last window like any other prefill

A window depends on everything before it, a generated chunk on nothing but itself: hence
the order (reading and generating go on side by side), and hence any cut of either
between steps computes the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from daric_rag.keys import SegmentKey
from daric_rag.runtime.background_reads import PendingRead, wait_for_any
from daric_rag.runtime.chunk_blocks import ChunkBlocks, ChunkRead, MissingChunk
from daric_rag.runtime.generations import Generations, PassBudget
from daric_rag.runtime.metadata import DaricWorkerMetadata
from daric_rag.runtime.step_builder import SubRequest
from daric_rag.selection import Span, merge, total_len
from daric_rag.steps import Limits, RequestStep

__all__ = ["FillQueue"]


@dataclass
class _Job:
    """A waiting request.

    Attributes:
        step: The request.
        reading: Chunks whose records are on their way.
        missing: Chunks that it waits for.
        windows: What is still to be recomputed once it has them, by position.
        in_pass: Where the windows stand when the running pass is over; None if the
            request has no part in it.
        queued_s: When it was queued, of `time.perf_counter`.
    """

    step: RequestStep
    reading: list[ChunkRead] = field(default_factory=list)
    missing: list[SegmentKey] = field(default_factory=list)
    windows: list[Span] = field(default_factory=list)
    in_pass: list[Span] | None = None
    queued_s: float = field(default_factory=time.perf_counter)

    @property
    def reads(self) -> list[PendingRead]:
        """Return the reads that are on their way."""
        return [part.read for part in self.reading if part.read is not None]

    @property
    def is_filled(self) -> bool:
        """Whether it waits for nothing."""
        return not (self.reading or self.missing or self.windows)

    @property
    def is_waiting(self) -> bool:
        """Whether nothing of it can be computed until records arrive."""
        return bool(self.reading) and not self.missing


class FillQueue:
    """Worker process. Works on waiting requests by priority, then by admission.

    Args:
        block_size: Tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        """Start empty."""
        self._jobs: dict[str, _Job] = {}
        self._generations = Generations(block_size)
        self._filled: set[str] = set()

    @property
    def backlog_len(self) -> int:
        """Tokens that can be computed by now."""
        jobs = [job for job in self._jobs.values() if not job.reading]
        windows = sum(total_len(job.windows) for job in jobs)
        return self._generations.backlog_len + windows

    def hold(self, block_ids: tuple[int, ...]) -> None:
        """Take note of the scratch blocks at hand; those in use are among them."""
        self._generations.hold(block_ids)

    def add(self, requests: Sequence[RequestStep], chunks: ChunkBlocks) -> None:
        """Queue newly admitted requests and begin to read what the store has."""
        for step in requests:
            job = _Job(step, windows=list(step.early_windows))
            self._jobs[step.req_id] = job
            parts = chunks.start_reading(step)
            job.reading = [part for part in parts if part.read is not None]
            self._place(job, [part for part in parts if part.read is None], chunks)

    def take_reads(self, chunks: ChunkBlocks, report: DaricWorkerMetadata) -> None:
        """Place the records that have arrived; collective."""
        reading = [job for job in self._jobs.values() if job.reading]
        settled = iter(chunks.settled([read for job in reading for read in job.reads]))
        for job in reading:
            parts = [(part, next(settled)) for part in job.reading]
            over = [part for part, is_over in parts if is_over]
            if not over:
                continue
            job.reading = [part for part, is_over in parts if not is_over]
            self._place(job, over, chunks)
            if not job.reading:
                spent_s = time.perf_counter() - job.queued_s
                report.report_of(job.step.req_id).load_s += spent_s

    def wait_for_reads(self, timeout_s: float) -> None:
        """Return when records have arrived, at once where there is other work."""
        jobs = self._jobs.values()
        if jobs and all(job.is_waiting for job in jobs):
            wait_for_any([read for job in jobs for read in job.reads], timeout_s)

    def drop(self, req_ids: Iterable[str]) -> None:
        """Forget requests that ended; nothing is written to their blocks any more."""
        for req_id in req_ids:
            job = self._jobs.pop(req_id, None)
            if job is None:
                continue
            self._filled.add(req_id)
            for read in job.reads:
                read.take()  # which cancels it
            for key in job.missing:
                self._generations.drop(key, req_id)

    def next_pass(self, limits: Limits, chunks: ChunkBlocks) -> list[SubRequest]:
        """Return the next pass's sub-requests; `complete` follows the pass.

        May be asked again, with other limits: what it returned last is the pass.
        Scratch blocks that it lends for a chunk stay lent.

        Args:
            limits: What the pass has room for.
            chunks: Between store and blocks.
        """
        self._generations.begin_pass()
        budget = PassBudget(limits.max_num_tokens, limits.max_num_seqs)
        subs: list[SubRequest] = []
        for job in sorted(self._jobs.values(), key=lambda job: job.step.priority):
            job.in_pass = None  # one that failed computed nothing
            if job.missing:
                subs += self._generations.next_pass(job.missing, budget, chunks)
            elif not job.reading:
                subs += _recompute(job, budget)
        return subs

    def expect_saves(self, chunks: ChunkBlocks) -> None:
        """The pass of `next_pass` is the next one to run."""
        self._generations.expect_saves(chunks)

    def complete(
        self, chunks: ChunkBlocks, report: DaricWorkerMetadata, started_s: float
    ) -> None:
        """The pass has run: save and place what it completed.

        Args:
            chunks: Between store and blocks.
            report: What was done is added to it.
            started_s: When the pass was started, of `time.perf_counter`.
        """
        completed, served = self._generations.complete_pass(chunks)
        for entry in completed:
            for step, _ in entry.wanted:
                missing = self._jobs[step.req_id].missing
                if entry.key in missing:
                    missing.remove(entry.key)
        spent_s = time.perf_counter() - started_s
        for req_id in served:
            report.report_of(req_id).generation_s += spent_s
        for job in self._jobs.values():
            if job.in_pass is not None:
                report.report_of(job.step.req_id).recompute_s += spent_s
                job.windows, job.in_pass = job.in_pass, None

    def take_filled(self) -> set[str]:
        """Return requests that wait no longer, once."""
        done = [req_id for req_id, job in self._jobs.items() if job.is_filled]
        for req_id in done:
            del self._jobs[req_id]
        filled, self._filled = self._filled.union(done), set()
        return filled

    def _place(
        self, job: _Job, parts: Sequence[ChunkRead], chunks: ChunkBlocks
    ) -> None:
        """Place what of some chunks was read, and see to the rest."""
        missing = self._generations.entries()
        chunks.place(job.step, parts, missing)
        for key, entry in missing.items():
            if not any(step is job.step for step, _ in entry.wanted):
                continue
            if not self._generations.expect(entry):
                _compute_in_place(job, entry)
            elif key not in job.missing:
                job.missing.append(key)


def _compute_in_place(job: _Job, entry: MissingChunk) -> None:
    for step, chunk in entry.wanted:
        if step is job.step:
            span = max(chunk.start, chunk.place_from), min(chunk.end, step.hit_len)
            job.windows = list(merge([*job.windows, span]))


def _recompute(job: _Job, budget: PassBudget) -> list[SubRequest]:
    step = job.step
    subs: list[SubRequest] = []
    left = list(job.windows)
    while left:
        start, end = left[0]
        cut = start + budget.take(end - start)
        if cut > start:
            subs.append(SubRequest(step.token_ids, start, cut, step.block_ids))
        if cut < end:
            # What comes after it depends on its rest.
            left[0] = (cut, end)
            break
        left.pop(0)
    if subs:
        job.in_pass = left
    return subs
