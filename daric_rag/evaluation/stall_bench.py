"""How long do others wait for their next token while a cold prompt is admitted?

Ordinary requests decode side by side; once all of them do, one long prompt of which
nothing is stored or cached comes in, as an ordinary request and as a DARIC request in
turn. Counted are the intervals between tokens of the others that touch the time from
that prompt's submission to its first token. Each figure is the median over the rounds,
each ratio the median of the rounds' ratios, DARIC over ordinary; the first round is
not counted. Every long prompt is new and has a namespace of its own.

A prompt admitted in one long step leaves the others few intervals, of which only some
are long: read p50 beside their number, and see stalls in p99 and max.

TTFT of the long prompt runs from submission to the first token's arrival at the client.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from daric_rag.engine import Reuse, TokenPrompt
from daric_rag.errors import EngineError
from daric_rag.evaluation.load_bench import ServingEngine
from daric_rag.evaluation.serving_stats import intervals_within, quantile
from daric_rag.evaluation.workloads import TtftShape, random_ids, random_prompt

__all__ = ["RUNS_PER_ROUND", "StallBench"]

RUNS_PER_ROUND = 2

_MODES: tuple[Reuse, ...] = ("off", "daric")
_FIGURES = ("p50_ms", "p99_ms", "max_ms")
_SHORT_LEN = 64
_FIRST_TOKENS = 8
_MAX_STREAM_LEN = 4096
_SEED = 1
_POLL_S = 0.001


class StallBench:
    """Client process. Must have the engine for itself.

    Args:
        engine: Answers.
        streams: Requests that decode meanwhile.
        shape: Of the long prompt.
        on_run: Called before each run with its name.
    """

    def __init__(
        self,
        engine: ServingEngine,
        *,
        streams: int,
        shape: TtftShape,
        on_run: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._engine, self._streams, self._shape = engine, streams, shape
        self._on_run = on_run
        self._rng = random.Random(_SEED)
        self._vocabulary_len = len(engine.tokenizer)

    def measure(self, repeats: int) -> dict[str, Any]:
        """Return figures of both modes and their ratios.

        Raises:
            EngineError: The others did not decode all the while, or the long prompt
                was not cold.
        """
        rounds = [self._round() for _ in range(1 + repeats)][1:]
        row: dict[str, Any] = {
            "streams": self._streams,
            "prompt_tokens": self._shape.prompt_len,
        }
        for mode in _MODES:
            for name in ("quiet_p50_ms", "ttft_ms", "intervals", *_FIGURES):
                values = [one[mode][name] for one in rounds]
                row[f"{mode}_{name}"] = round(statistics.median(values), 3)
        for name in _FIGURES:
            ratios = [one["daric"][name] / one["off"][name] for one in rounds]
            label = name.removesuffix("_ms")
            row[f"{label}_ratio"] = round(statistics.median(ratios), 4)
            row[f"{label}_ratio_spread"] = [
                round(min(ratios), 4),
                round(max(ratios), 4),
            ]
        return row

    def _round(self) -> dict[str, dict[str, float]]:
        figures: dict[str, dict[str, float]] = {}
        for mode in _MODES:
            self._on_run(f"admitting, reuse={mode}")
            figures[mode] = asyncio.run(self._admit(mode))
            self._engine.flush()
        return figures

    async def _admit(self, mode: Reuse) -> dict[str, float]:
        times_s: list[list[float]] = [[] for _ in range(self._streams)]
        tasks = [asyncio.create_task(self._decode(times)) for times in times_s]
        try:
            await self._tokens(times_s, tasks, _FIRST_TOKENS)
            start_s = time.perf_counter()
            await self._long_prompt(mode)
            end_s = time.perf_counter()
            # So that the intervals that are open now are seen whole.
            await self._tokens(times_s, tasks, 1)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return _figures(times_s, start_s, end_s)

    async def _decode(self, times_s: list[float]) -> None:
        prompt = TokenPrompt([random_ids(_SHORT_LEN, self._rng, self._vocabulary_len)])
        max_tokens = min(_MAX_STREAM_LEN, self._engine.max_model_len // 2)
        stream = self._engine.astream(
            prompt, max_tokens=max_tokens, ignore_eos=True, reuse="off"
        )
        async for delta in stream:
            if delta.token_ids:
                times_s.append(time.perf_counter())

    async def _tokens(
        self, times_s: list[list[float]], tasks: list[asyncio.Task[None]], num: int
    ) -> None:
        """Return when every stream has `num` more tokens.

        Raises:
            EngineError: A stream ended.
        """
        wanted = [len(times) + num for times in times_s]
        while any(len(t) < n for t, n in zip(times_s, wanted, strict=True)):
            if any(task.done() for task in tasks):
                raise EngineError(
                    "a stream ended before the long prompt was admitted; use fewer "
                    "streams, a shorter prompt or a model of longer context"
                )
            await asyncio.sleep(_POLL_S)

    async def _long_prompt(self, mode: Reuse) -> None:
        done = await self._engine.agenerate(
            random_prompt(self._shape, self._rng, self._vocabulary_len),
            max_tokens=1,
            reuse=mode,
            namespace=f"stall-{secrets.token_hex(4)}",
        )
        stats = done.reuse
        generated = stats.generated_tokens > 0
        if stats.reused_tokens or generated != (mode == "daric"):
            raise EngineError(f"the long prompt was not cold, or not {mode}: {stats}")


def _figures(
    times_s: list[list[float]], start_s: float, end_s: float
) -> dict[str, float]:
    """Return milliseconds; ``quiet`` is before the long prompt came."""
    quiet = [
        after - before
        for times in times_s
        for before, after in pairwise(times)
        if after <= start_s
    ]
    gaps = [gap for times in times_s for gap in intervals_within(times, start_s, end_s)]
    figures_s = {
        "quiet_p50_ms": quantile(quiet, 0.5),
        "ttft_ms": end_s - start_s,
        "p50_ms": quantile(gaps, 0.5),
        "p99_ms": quantile(gaps, 0.99),
        "max_ms": max(gaps),
        "intervals": len(gaps) / 1e3,
    }
    return {name: value * 1e3 for name, value in figures_s.items()}
