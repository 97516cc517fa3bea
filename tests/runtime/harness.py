"""An engine and the dense reference side by side, and what must be equal."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from daric_rag import Completion, DaricConfig, Delta, EmbeddedEngine, TokenPrompt
from daric_rag.layout import PromptLayout
from daric_rag.steps import StepPlan
from tests.reference.dense import DenseReference
from tests.reference.outputs import KVCache
from tests.reference.prompts import TokenIds

NUM_TOKENS = 21
NUM_LOGPROBS = 20
QUESTION: TokenIds = (17, 23, 31, 18, 29)


@dataclass(frozen=True)
class Tolerance:
    """Largest differences allowed against the reference.

    Attributes:
        kv: Of any key or value.
        logprob: Of any of the likeliest tokens' log-probabilities, in nats.
    """

    kv: float = 2e-4
    logprob: float = 1e-4


class Spy:
    """Keeps the step plans that the worker saw; lives in the engine's thread."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.side = worker._side
        self.plans: list[StepPlan] = []
        # Of the requests admitted so far; vLLM allocates a long last window's blocks
        # step by step.
        self.blocks: dict[str, list[int]] = {}
        self.passes = 0
        # Per step, the tokens of each of its passes; vLLM's own pass is the last one.
        self.step_lens: list[list[int]] = []
        self._prepare = self.side.prepare_step
        self.side.prepare_step = self

    def __call__(self, scheduled: Any, run_pass: Any) -> Any:
        plan = scheduled.kv_connector_metadata.plan
        self.plans.append(plan)
        self.blocks |= {step.req_id: list(step.block_ids) for step in plan.requests}
        for request in scheduled.scheduled_new_reqs:
            # One that waited until its blocks were filled has more of them by now.
            if request.req_id in self.blocks:
                self.blocks[request.req_id] = list(request.block_ids[0])
        cached = scheduled.scheduled_cached_reqs
        for req_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in self.blocks and req_id not in cached.resumed_req_ids and new:
                self.blocks[req_id] += new[0]

        lens: list[int] = []
        self.step_lens.append(lens)

        def counted(output: Any) -> None:
            self.passes += 1
            lens.append(output.total_num_scheduled_tokens)
            run_pass(output)

        own = self._prepare(scheduled, counted)
        lens.append(own.total_num_scheduled_tokens)
        return own

    def cache_of(self, block_ids: Sequence[int], num_tokens: int) -> KVCache:
        """Reads K and V from blocks, `[layers, tokens, heads, head_dim]` each."""
        shape = self.side._bound_mover._shape
        keys = torch.empty(shape.of(num_tokens), dtype=shape.dtype)
        values = torch.empty_like(keys)
        self.side._layout.gather(keys, values, block_ids, 0)
        return KVCache(keys.float(), values.float())


class Harness:
    """One engine under test and its model's reference."""

    def __init__(
        self,
        model: Path,
        reference: DenseReference,
        *,
        config: DaricConfig | None = None,
        store: str = ":memory:",
        **options: Any,
    ) -> None:
        self.reference = reference
        self.engine = EmbeddedEngine(
            str(model),
            store=store,
            config=config,
            **{"dtype": "float32", "max_model_len": 4096} | options,
        )
        self.spy: Spy = self.on_worker(Spy)

    def on_worker(self, function: Any) -> Any:
        """Runs `function(worker)` in the engine's thread."""
        rpc = self.engine._loop.call
        return rpc(lambda engine: engine.collective_rpc(function))[0]

    def close(self) -> None:
        self.engine.close()

    def run(
        self, chunks: Sequence[TokenIds], **options: Any
    ) -> tuple[Completion, PromptLayout]:
        prompt = TokenPrompt([list(chunk) for chunk in chunks])
        options = {
            "max_tokens": NUM_TOKENS,
            "logprobs": NUM_LOGPROBS,
            "ignore_eos": True,
        } | options
        return self.engine.generate(prompt, **options), self.engine.layout(prompt)

    def store(self, chunks: Sequence[TokenIds]) -> None:
        """Puts chunks into the store by way of ordinary requests."""
        for chunk in chunks:
            self.run((chunk, QUESTION), max_tokens=1)
        self.engine.clear_prefix_cache()

    def scheduler_side(self, function: Any) -> Any:
        """Runs `function(scheduler side)` in the engine's thread."""
        return self.engine._loop.call(
            lambda e: function(e.engine_core.engine_core.scheduler.connector.scheduler)
        )

    def spy_tracked(self) -> dict[str, Any]:
        """Requests that the scheduler side still knows."""
        tracked: dict[str, Any] = self.scheduler_side(lambda side: side._tracked)
        return tracked

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is submitted inside reaches vLLM before its next step."""
        release = threading.Event()
        self.engine._loop._post(lambda: release.wait(30))
        try:
            yield
        finally:
            release.set()

    def batch(self, prompts: Sequence[TokenPrompt], **options: Any) -> list[Completion]:
        """Answers prompts that arrive at the same moment."""
        with self.together():
            streams = [self.engine.stream(prompt, **options) for prompt in prompts]
        return [finished(stream) for stream in streams]

    def last_cache(self, num_tokens: int) -> KVCache:
        """The blocks of the last admitted request; valid until the next request."""
        request = next(p for p in reversed(self.spy.plans) if p.requests).requests[-1]
        return self.on_worker(
            lambda _: self.spy.cache_of(self.spy.blocks[request.req_id], num_tokens)
        )

    def check(
        self,
        completion: Completion,
        layout: PromptLayout,
        tolerance: Tolerance = Tolerance(),
        *,
        kv: bool = True,
        prefix: KVCache | None = None,
    ) -> None:
        """Holds an answer, and the KV it came from, against the reference.

        Args:
            completion: The answer.
            layout: Of its prompt.
            tolerance: Largest differences allowed.
            kv: Whether the prompt's blocks are still there to be looked at.
            prefix: What vLLM's prefix cache provided, as other prompts left it.
        """
        windows = [*layout.windows]
        prefill = self.reference.daric_prefill(
            layout.token_ids, layout.spans, windows, prefix
        )
        if kv:
            cache = self.last_cache(layout.prompt_len)
            for mine, theirs in (
                (cache.keys, prefill.cache.keys),
                (cache.values, prefill.cache.values),
            ):
                error = (mine - theirs.float()).abs().amax(dim=(0, 2, 3))
                worst = int(error.argmax())
                assert error[worst] <= tolerance.kv, (
                    f"KV differs by {error[worst]:.2e} at position {worst}"
                )
        expected = self.reference.decode(prefill, len(completion.token_ids))
        check_continuation(completion, expected, tolerance)

    def cache_after(self, completion: Completion, layout: PromptLayout) -> KVCache:
        """The reference's cache of a prompt that found no prefix, and its answer.

        The last token of an answer is never computed.
        """
        prefill = self.reference.daric_prefill(
            layout.token_ids, layout.spans, [*layout.windows]
        )
        return self.reference.follow(prefill, completion.token_ids)[1]


def common_len(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that two prompts share."""
    pairs = enumerate(zip(one, other, strict=False))
    differing = (index for index, (mine, theirs) in pairs if mine != theirs)
    return next(differing, min(len(one), len(other)))


def own_threads() -> set[str]:
    """Names of this package's threads, but for the one that is no engine's.

    Where integrations were used, a process keeps it to its end.
    """
    names = {t.name for t in threading.enumerate() if t.name.startswith("daric")}
    return names - {"daric-engine-source"}


def finished(deltas: Iterable[Delta]) -> Completion:
    """The completion that a stream ends with."""
    *_, last = deltas
    assert last.completion is not None
    return last.completion


def check_continuation(
    completion: Completion, expected: Any, tolerance: Tolerance = Tolerance()
) -> None:
    """Tokens equal, and log-probabilities of the likeliest within tolerance."""
    assert completion.token_ids == expected.token_ids
    assert completion.logprobs is not None
    for step, logprobs in enumerate(completion.logprobs):
        assert len(logprobs) >= NUM_LOGPROBS
        for token, value in logprobs.items():
            error = abs(value - float(expected.logprobs[step, token]))
            assert error <= tolerance.logprob, (
                f"step {step}, token {token}: {error:.2e}"
            )
