"""How fast are answers when requests come at random, and what rate can be sustained?

The same requests arrive at the same times (Poisson, seeded) in every mode, at one rate
after the other, on one engine: ordinary requests with vLLM's prefix cache, DARIC, and
full reuse if wanted. Arrivals do not wait for answers. Each run starts with an empty
prefix cache and, because its namespace is new, with nothing of use in the store, or
with every document of all requests if they are to be pre-warmed. Its warm-up requests
come at the same rate, are answered to the end, and are not counted.

TTFT runs from the moment the schedule has a request arrive (not from its submission,
which a busy client delays) to the first token's arrival at the client. Inter-token
times are the intervals between the tokens of all answers. Input throughput is prompt
tokens over the time from the first counted arrival to the last token.

A rate is sustained if the queue does not grow: the unfinished requests that an arrival
meets are, in the later half of the arrivals, at most one more on average than in the
earlier half.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from daric_rag.engine import Delta, Prompt, Reuse
from daric_rag.errors import EngineError
from daric_rag.evaluation.replay import ReplayRequest
from daric_rag.evaluation.serving_stats import Served, poisson_arrivals, serving_row
from daric_rag.evaluation.ttft_bench import BenchEngine

__all__ = ["LoadBench", "ServingEngine"]


class ServingEngine(BenchEngine, Protocol):
    """An engine that answers many at once."""

    def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Delta]:
        """Answer one prompt piece by piece, concurrently with others."""
        ...

    def prewarm(self, documents: Sequence[Any], *, namespace: str | None = None) -> int:
        """Store documents."""
        ...


class LoadBench:
    """Client process. Replays requests; must have the engine for itself.

    Args:
        engine: Answers.
        requests: In the order in which they arrive, warm-up first.
        max_tokens: Of each answer, which does not end earlier.
        seed: Of the arrivals.
        prewarmed: Whether every run but the ordinary ones begins with all documents
            stored.
        on_request: Called when a request is sent, with the run's name.
    """

    def __init__(
        self,
        engine: ServingEngine,
        requests: Sequence[ReplayRequest],
        *,
        max_tokens: int,
        seed: int,
        prewarmed: bool = False,
        on_request: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._engine, self._max_tokens, self._seed = engine, max_tokens, seed
        self._warm_up = [one.prompt for one in requests if one.warm_up]
        self._counted = [one.prompt for one in requests if not one.warm_up]
        documents = (text for one in requests for text in one.prompt.documents)
        self._documents = list(dict.fromkeys(documents)) if prewarmed else []
        self._on_request = on_request

    def measure(self, rate_per_s: float, mode: Reuse) -> dict[str, Any]:
        """Return the figures of one mode at one rate.

        Raises:
            EngineError: There was nothing to count, or an answer had no token.
        DaricError: What a request raised; the others are aborted.
        """
        if not self._counted:
            raise EngineError("all requests are warm-up; replay more of them")
        namespace = f"load-{secrets.token_hex(4)}"
        if self._documents and mode != "off":
            self._engine.prewarm(self._documents, namespace=namespace)
            self._engine.flush()
        self._engine.clear_prefix_cache()
        served = asyncio.run(self._run(rate_per_s, mode, namespace))
        # Or its writing would disturb the next run.
        self._engine.flush()
        return {"rate_per_s": rate_per_s, "mode": mode, **serving_row(served)}

    async def _run(
        self, rate_per_s: float, mode: Reuse, namespace: str
    ) -> list[Served]:
        options = {
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "reuse": mode,
            "namespace": namespace,
        }
        name = f"{mode} at {rate_per_s:g}/s"
        await self._replay(f"{name}, warm-up", self._warm_up, rate_per_s, options)
        return await self._replay(name, self._counted, rate_per_s, options)

    async def _replay(
        self,
        name: str,
        prompts: Sequence[Prompt],
        rate_per_s: float,
        options: dict[str, Any],
    ) -> list[Served]:
        start_s = time.perf_counter()
        arrivals = poisson_arrivals(len(prompts), rate_per_s, self._seed)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._one(name, prompt, start_s + t, options))
                    for prompt, t in zip(prompts, arrivals, strict=True)
                ]
        except ExceptionGroup as failures:
            # Callers know single errors; the first is the cause of the others.
            raise failures.exceptions[0] from failures
        return [task.result() for task in tasks]

    async def _one(
        self, name: str, prompt: Prompt, due_s: float, options: dict[str, Any]
    ) -> Served:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        self._on_request(name)
        times_s: list[float] = []
        completion = None
        async for delta in self._engine.astream(prompt, **options):
            if delta.token_ids:
                times_s.append(time.perf_counter())
            completion = delta.completion
        if completion is None or not times_s:
            raise EngineError("the engine ended an answer without a token; run again")
        return Served(due_s, tuple(times_s), completion.reuse)
