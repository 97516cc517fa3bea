"""Sub-requests as vLLM scheduler outputs: the only file that knows their fields.

A sub-request is an ordinary new request whose prompt goes on beyond what it computes
in this pass. To the model runner it is a partial prefill: its sample is discarded, and
the scheduler, which never heard of it, ignores its id. It is finished with the next
pass, by adding its id to that pass's ``finished_req_ids``.

vLLM's own scheduler output is never mutated: `dataclasses.replace` makes ours, and
block lists are copied because the runner extends them in place.

One private field of the V1 model runner is touched: after a pass of sub-requests alone,
``execute_model_state`` holds logits that nobody will sample from, and must be dropped
before the next pass. `check_runner` refuses any runner that lacks it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from daric_rag.errors import VllmVersionError
from daric_rag.runtime.metadata import DaricMetadata
from daric_rag.runtime.pace import Pace
from daric_rag.runtime.vllm_api import (
    CachedRequestData,
    NewRequestData,
    SamplingParams,
    SchedulerOutput,
)
from daric_rag.steps import Limits

__all__ = [
    "RunPass",
    "StepBuilder",
    "StepPasses",
    "SubRequest",
    "check_runner",
    "discard_pass",
    "empty_step",
]


RunPass = Callable[[SchedulerOutput], None]
"""Runs one pass of sub-requests and drops its logits."""


@dataclass(frozen=True, slots=True)
class SubRequest:
    """Tokens [start, end) of a sequence, computed over the KV before them.

    Attributes:
        token_ids: The sequence from position 0 on; at least `end` ids.
        start: First position to compute.
        end: Position after the last one.
        block_ids: The sequence's blocks from position 0 on.
    """

    token_ids: Sequence[int]
    start: int
    end: int
    block_ids: Sequence[int]


def check_runner(runner: Any) -> None:
    """Refuse a model runner without the one private field that we touch.

    Raises:
        VllmVersionError: With the mend.
    """
    if not hasattr(runner, "execute_model_state"):
        raise VllmVersionError(
            "this vLLM's model runner has changed (no execute_model_state); install "
            "the vLLM version that daric_rag names in its requirements"
        )


def discard_pass(runner: Any) -> None:
    """Drop the logits of a pass that nobody will sample from.

    Sampling is also where the runner waits for its device. Without it the next pass
    would refill pinned input buffers that are still being copied from.
    """
    if runner.device.type != "cpu":
        torch.accelerator.synchronize()
    runner.execute_model_state = None
    runner.kv_connector_output = None


def empty_step() -> SchedulerOutput:
    """Return a step in which vLLM scheduled nothing."""
    return SchedulerOutput.make_empty()


class StepBuilder:
    """Worker process. Makes scheduler outputs for the passes of one engine step.

    Holds the ids of sub-requests that the runner still knows, from their pass until
    the next one.
    """

    def __init__(self) -> None:
        """Start with no sub-request alive."""
        self._serial = itertools.count()
        self._unfinished: set[str] = set()
        # Never sampled from, hence greedy and shared by all.
        self._params = SamplingParams(temperature=0.0, max_tokens=1)

    def alone(
        self, scheduled: SchedulerOutput, subs: Sequence[SubRequest], *, first: bool
    ) -> SchedulerOutput:
        """Make a pass of sub-requests only.

        Args:
            scheduled: What vLLM scheduled in this step.
            subs: At most what one pass holds.
            first: Whether this is the step's first pass, which then carries out what
                vLLM asked for before any computation.
        """
        new_reqs = [self._new_request(sub) for sub in subs]
        tokens = self._num_tokens(new_reqs, subs)
        return replace(
            scheduled,
            scheduled_new_reqs=new_reqs,
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            has_structured_output_requests=False,
            pending_structured_output_tokens=False,
            kv_connector_metadata=DaricMetadata(),
            has_sync_kv_loads=False,
            **self._prelude(scheduled, new_reqs, first=first),
        )

    def joined(
        self, scheduled: SchedulerOutput, subs: Sequence[SubRequest], *, first: bool
    ) -> SchedulerOutput:
        """Make the step's last pass: vLLM's own requests and `subs` beside them."""
        if not subs and first and not self._unfinished:
            return scheduled
        new_reqs = [self._new_request(sub) for sub in subs]
        tokens = scheduled.num_scheduled_tokens | self._num_tokens(new_reqs, subs)
        return replace(
            scheduled,
            scheduled_new_reqs=[*new_reqs, *scheduled.scheduled_new_reqs],
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            **self._prelude(scheduled, new_reqs, first=first),
        )

    def _prelude(
        self, scheduled: SchedulerOutput, new_reqs: list[NewRequestData], *, first: bool
    ) -> dict[str, Any]:
        """Clean-up of earlier passes; vLLM's own belongs to the step's first pass."""
        finished = self._unfinished
        self._unfinished = {request.req_id for request in new_reqs}
        if first:
            return {"finished_req_ids": scheduled.finished_req_ids | finished}
        return {
            "finished_req_ids": finished,
            "free_encoder_mm_hashes": [],
            "new_block_ids_to_zero": None,
            "kv_cache_block_copies": None,
        }

    def _new_request(self, sub: SubRequest) -> NewRequestData:
        # One id more than is computed makes it a partial prefill.
        prompt = [*sub.token_ids[: sub.end + 1]]
        if len(prompt) == sub.end:
            prompt.append(0)
        return NewRequestData(
            req_id=f"daric-sub-{next(self._serial)}",
            prompt_token_ids=prompt,
            mm_features=[],
            sampling_params=self._params,
            pooling_params=None,
            block_ids=(list(sub.block_ids),),
            num_computed_tokens=sub.start,
            lora_request=None,
        )

    @staticmethod
    def _num_tokens(
        new_reqs: list[NewRequestData], subs: Sequence[SubRequest]
    ) -> dict[str, int]:
        return {
            request.req_id: sub.end - sub.start
            for request, sub in zip(new_reqs, subs, strict=True)
        }


class StepPasses:
    """Worker process. The passes of one engine step, in order.

    Args:
        scheduled: What vLLM scheduled; not mutated.
        run_pass: Runs one pass of sub-requests.
        builder: Makes the passes.
        pace: Learns how long they take.
    """

    def __init__(
        self,
        scheduled: SchedulerOutput,
        run_pass: RunPass,
        builder: StepBuilder,
        pace: Pace,
    ) -> None:
        self.scheduled = scheduled
        self._run_pass, self._builder, self._pace = run_pass, builder, pace
        self._first = True
        self._started_s, self._num_tokens = 0.0, 0

    @property
    def scheduled_size(self) -> Limits:
        """Tokens and sequences of vLLM's own pass."""
        num_tokens = self.scheduled.num_scheduled_tokens
        return Limits(sum(num_tokens.values()), len(num_tokens))

    def run(self, subs: Sequence[SubRequest]) -> None:
        """Run a pass of sub-requests only."""
        alone = self._builder.alone(self.scheduled, subs, first=self._first)
        self._run_pass(self._begun(alone))
        self._first = False
        self.end()

    def join(self, subs: Sequence[SubRequest]) -> SchedulerOutput:
        """Return vLLM's own pass with `subs` beside it."""
        joined = self._builder.joined(self.scheduled, subs, first=self._first)
        return self._begun(joined)

    def end(self) -> None:
        """The last pass has run."""
        if self._pace.counts(self._num_tokens) and torch.accelerator.is_available():
            # It was only launched; who samples from it would wait here anyway.
            torch.accelerator.synchronize()
        self._pace.note(self._num_tokens, time.perf_counter() - self._started_s)

    def _begun(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        self._num_tokens = scheduled.total_num_scheduled_tokens
        self._started_s = time.perf_counter()
        return scheduled
