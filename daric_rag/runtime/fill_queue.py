"""Asynchronous requests: their blocks are filled over as many steps as it takes.

To vLLM such a request waits for a transfer. What arrives is computed by the engine
itself: in each step, beside whatever vLLM scheduled, one pass's worth of it. So a cold
prompt of any length never makes a step longer than vLLM's own chunked prefill would,
and running requests go on decoding. A request's life in the queue::

    admitted    hits are read, re-encoded, placed
    generating  missing chunks on their own, in held scratch blocks; then saved,
                re-encoded, placed wherever they are wanted
    recomputing early windows in ascending position, in place
    filled      vLLM schedules its last window like any other prefill

A window depends on everything before it, a generated chunk on nothing but itself: hence
the order, and hence any cut of either between steps computes the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from daric_rag.keys import SegmentKey
from daric_rag.runtime.chunk_blocks import ChunkBlocks, MissingChunk
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
        missing: Chunks that it waits for.
        windows: What is still to be recomputed once it has them, by position.
        in_pass: Where the windows stand when the running pass is over; None if the
            request has no part in it.
    """

    step: RequestStep
    missing: list[SegmentKey] = field(default_factory=list)
    windows: list[Span] = field(default_factory=list)
    in_pass: list[Span] | None = None


@dataclass
class _Generation:
    """A chunk being generated.

    Attributes:
        entry: The chunk, and who wants it.
        computed_len: Leading tokens whose KV is in `blocks`.
        blocks: Scratch blocks; none before its first pass.
        in_pass: `computed_len` when the running pass is over; None if it has no part
            in it.
    """

    entry: MissingChunk
    computed_len: int
    blocks: tuple[int, ...] = ()
    in_pass: int | None = None


@dataclass
class _Budget:
    """What is left of a pass.

    Attributes:
        num_tokens: Tokens.
        num_seqs: Sequences.
        has_scratch: Whether chunks may still be given scratch blocks. Once one had to
            go without, later ones do too, so that it is the next to get some.
    """

    num_tokens: int
    num_seqs: int
    has_scratch: bool = True

    def take(self, num_tokens: int) -> int:
        """Return how many of a sequence's tokens fit; they are taken."""
        if self.num_seqs <= 0:
            return 0
        taken = max(0, min(num_tokens, self.num_tokens))
        if taken:
            self.num_tokens -= taken
            self.num_seqs -= 1
        return taken


class FillQueue:
    """Worker process. Works on waiting requests in the order of their admission.

    Args:
        block_size: Tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        """Start empty."""
        self._block_size = block_size
        self._jobs: dict[str, _Job] = {}
        self._generations: dict[SegmentKey, _Generation] = {}
        self._held: tuple[int, ...] = ()
        self._filled: set[str] = set()

    @property
    def backlog_len(self) -> int:
        """Tokens still to be computed."""
        generations = self._generations.values()
        return sum(g.entry.num_tokens - g.computed_len for g in generations) + sum(
            total_len(job.windows) for job in self._jobs.values()
        )

    def hold(self, block_ids: tuple[int, ...]) -> None:
        """Take note of the scratch blocks at hand; those in use are among them."""
        self._held = block_ids

    def add(self, requests: Sequence[RequestStep], chunks: ChunkBlocks) -> None:
        """Place what the store has of newly admitted requests, and queue the rest."""
        missing = {key: g.entry for key, g in self._generations.items()}
        chunks.load(requests, missing)
        for step in requests:
            self._jobs[step.req_id] = _Job(step, windows=list(step.early_windows))
        for key, entry in missing.items():
            if key in self._generations or self._fits(entry):
                self._expect(entry)
            else:
                self._compute_in_place(entry)

    def drop(self, req_ids: Iterable[str]) -> None:
        """Forget requests that ended; nothing is written to their blocks any more."""
        for req_id in req_ids:
            job = self._jobs.pop(req_id, None)
            if job is None:
                continue
            self._filled.add(req_id)
            for key in job.missing:
                entry = self._generations[key].entry
                entry.wanted = [w for w in entry.wanted if w[0].req_id != req_id]
                if not entry.wanted:
                    del self._generations[key]

    def next_pass(self, limits: Limits, chunks: ChunkBlocks) -> list[SubRequest]:
        """Return the next pass's sub-requests; `complete` follows the pass.

        Args:
            limits: What the pass has room for.
            chunks: Between store and blocks.
        """
        # A pass that failed computed nothing.
        for job in self._jobs.values():
            job.in_pass = None
        for generation in self._generations.values():
            generation.in_pass = None
        budget = _Budget(limits.max_num_tokens, limits.max_num_seqs)
        subs: list[SubRequest] = []
        for job in self._jobs.values():
            if job.missing:
                subs += self._generate(job, budget, chunks)
            else:
                subs += _recompute(job, budget)
        return subs

    def complete(
        self, chunks: ChunkBlocks, report: DaricWorkerMetadata, started_s: float
    ) -> None:
        """The pass has run: save and place what it completed.

        Args:
            chunks: Between store and blocks.
            report: What was done is added to it.
            started_s: When the pass was started, of `time.perf_counter`.
        """
        served = self._complete_generations(chunks)
        spent_s = time.perf_counter() - started_s
        for req_id in served:
            report.report_of(req_id).generation_s += spent_s
        for job in self._jobs.values():
            if job.in_pass is not None:
                report.report_of(job.step.req_id).recompute_s += spent_s
                job.windows, job.in_pass = job.in_pass, None

    def take_filled(self) -> set[str]:
        """Return requests that wait no longer, once."""
        done = [
            req_id
            for req_id, job in self._jobs.items()
            if not job.missing and not job.windows
        ]
        for req_id in done:
            del self._jobs[req_id]
        filled, self._filled = self._filled.union(done), set()
        return filled

    def _complete_generations(self, chunks: ChunkBlocks) -> set[str]:
        """Returns the requests for which anything was generated."""
        served: set[str] = set()
        for key, generation in list(self._generations.items()):
            if generation.in_pass is None:
                continue
            entry = generation.entry
            generation.computed_len, generation.in_pass = generation.in_pass, None
            served.update(step.req_id for step, _ in entry.wanted)
            if generation.computed_len < entry.num_tokens:
                continue
            chunks.harvest(entry, generation.blocks)
            del self._generations[key]
            for step, _ in entry.wanted:
                missing = self._jobs[step.req_id].missing
                if key in missing:
                    missing.remove(key)
        chunks.settle()
        return served

    def _fits(self, entry: MissingChunk) -> bool:
        # A lost chunk too long for what could be borrowed is computed in full context,
        # as the scheduler side would have planned it, had it known.
        return self._num_blocks(entry) <= len(self._held)

    def _num_blocks(self, entry: MissingChunk) -> int:
        return -(-entry.num_tokens // self._block_size)

    def _expect(self, entry: MissingChunk) -> None:
        self._generations.setdefault(entry.key, _Generation(entry, entry.loaded_len))
        for step, _ in entry.wanted:
            missing = self._jobs[step.req_id].missing
            if entry.key not in missing:
                missing.append(entry.key)

    def _compute_in_place(self, entry: MissingChunk) -> None:
        for step, chunk in entry.wanted:
            job = self._jobs[step.req_id]
            end = min(chunk.end, step.hit_len)
            span = (max(chunk.start, chunk.place_from), end)
            job.windows = list(merge([*job.windows, span]))

    def _generate(
        self, job: _Job, budget: _Budget, chunks: ChunkBlocks
    ) -> list[SubRequest]:
        subs: list[SubRequest] = []
        for key in job.missing:
            generation = self._generations[key]
            if generation.in_pass is not None:
                continue  # an earlier request waits for it too
            entry, start = generation.entry, generation.computed_len
            if not generation.blocks and not self._lend(generation, budget, chunks):
                continue
            end = start + budget.take(entry.num_tokens - start)
            if end > start:
                generation.in_pass = end
                subs.append(SubRequest(entry.token_ids, start, end, generation.blocks))
        return subs

    def _lend(
        self, generation: _Generation, budget: _Budget, chunks: ChunkBlocks
    ) -> bool:
        """Give a chunk its scratch blocks; returns whether there were enough."""
        if not budget.has_scratch or not budget.num_tokens or not budget.num_seqs:
            return False
        used = {block for g in self._generations.values() for block in g.blocks}
        free = [block for block in self._held if block not in used]
        num_blocks = self._num_blocks(generation.entry)
        budget.has_scratch = num_blocks <= len(free)
        if budget.has_scratch:
            generation.blocks = tuple(free[:num_blocks])
            chunks.seed(generation.entry, generation.blocks)
        return budget.has_scratch


def _recompute(job: _Job, budget: _Budget) -> list[SubRequest]:
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
