"""How long until the first token, and how close is that to the least possible?

One engine, one process. Every variant runs once per round, in turn, so that a machine
that drifts slows all of them alike; figures are medians over the rounds. The first
round is not counted: the first pass of each shape also builds kernels and touches
memory for the first time.

| Variant        | The same prompt of L tokens, of which DARIC recomputes n          |
|----------------|-------------------------------------------------------------------|
| `full_prefill` | an ordinary request, nothing cached                               |
| `floor`        | an ordinary request: n new tokens behind a prefix that is cached  |
| `host`         | every document in host memory                                     |
| `disk`         | every document on disk only (the system's page cache is warm)     |
| `full_reuse`   | in host memory, and nothing recomputed but the question           |
| `cold`         | new documents each time, none stored; saving runs behind, and     |
|                | is waited for before the next measurement                         |

The floor is what any reuse that computes n tokens in context could reach: its prefix
costs nothing at all to fetch. So that it computes exactly n tokens although prefix
caches work in whole blocks, its prompt is up to a block shorter than L.

TTFT runs from submission to the first token's arrival at the client, one token asked
for. Time per output token is the median interval between a stream's tokens (the mean
would show every hiccup of the machine), DARIC over an ordinary request at the same
prompt length; the ratio is the median of the rounds' ratios. vLLM's prefix cache is
emptied between variants, and each run's reuse counts and the tiers it read from are
checked to be what it claims.
"""

from __future__ import annotations

import random
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from daric_rag.engine import Completion, Reuse, TokenPrompt
from daric_rag.errors import EngineError, PromptTooLongError
from daric_rag.evaluation.demo import DemoEngine
from daric_rag.evaluation.workloads import TtftShape, random_ids, random_prompt

__all__ = ["RUNS_PER_ROUND", "VARIANTS", "BenchEngine", "TtftBench"]

VARIANTS = ("full_prefill", "host", "disk", "cold", "full_reuse", "floor")
"""Columns of a row, each with ``_ms`` behind it."""

RUNS_PER_ROUND = len(VARIANTS) + 2  # two streams

_DECODE_LEN = 64
_SEED = 1


class BenchEngine(DemoEngine, Protocol):
    """An engine whose store can be told what to hold where."""

    tokenizer: Any
    block_size: int

    def flush(self) -> None:
        """Return when everything computed so far is on disk."""
        ...

    def clear_host(self) -> None:
        """Drop host copies of documents that are on disk."""
        ...

    def store_stats(self) -> Any:
        """Return what the store holds and did."""
        ...


@dataclass
class _Samples:
    """What one shape's rounds gave, the first one left out."""

    ttft_s: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in VARIANTS}
    )
    tpot_s: dict[str, list[float]] = field(
        default_factory=lambda: {"off": [], "daric": []}
    )


class TtftBench:
    """Client process. Measures one shape after the other.

    Args:
        engine: Must not serve anybody else meanwhile; its store needs a disk tier.
        repeats: Counted rounds.
        on_run: Called before each run with its name.
    """

    def __init__(
        self,
        engine: BenchEngine,
        *,
        repeats: int,
        on_run: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._engine, self._repeats, self._on_run = engine, repeats, on_run
        self._rng = random.Random(_SEED)
        self._vocabulary_len = len(engine.tokenizer)
        # Or the random documents would be found in a store that has seen them before.
        self._namespace = f"bench-{secrets.token_hex(4)}"

    def check(self, shape: TtftShape) -> None:
        """Refuse a shape that cannot be run, before anything is.

        Raises:
            PromptTooLongError: Prompt and stream exceed the model's context.
        """
        limit = self._engine.max_model_len - _DECODE_LEN
        if shape.prompt_len > limit:
            raise PromptTooLongError(shape.prompt_len, limit)

    def measure(self, shape: TtftShape) -> dict[str, Any]:
        """Return one row of figures, times in milliseconds.

        Raises:
            EngineError: A run was not what its variant claims.
        """
        prompt = random_prompt(shape, self._rng, self._vocabulary_len)
        recompute_len = self._engine.layout(prompt).recompute_len
        # Stores every document; with DARIC one that is recomputed as a whole would not
        # be, and full reuse needs them all.
        self._first_token("storing", prompt, "full_reuse")
        samples = _Samples()
        for number in range(1 + self._repeats):
            self._round(prompt, shape, samples if number else _Samples())
        return _row(shape, recompute_len, samples)

    def _round(self, prompt: TokenPrompt, shape: TtftShape, samples: _Samples) -> None:
        ttft_s, tpot_s = samples.ttft_s, samples.tpot_s
        # In this order, because full prefill also fills the prefix cache for the floor
        # and for the ordinary stream.
        ttft_s["full_prefill"].append(self._full_prefill(prompt))
        ttft_s["floor"].append(self._floor(prompt))
        tpot_s["off"].append(self._stream(prompt, "off"))
        ttft_s["host"].append(self._host(prompt))
        self._engine.clear_prefix_cache()
        tpot_s["daric"].append(self._stream(prompt, "daric"))
        ttft_s["disk"].append(self._disk(prompt))
        ttft_s["full_reuse"].append(self._full_reuse(prompt))
        fresh = random_prompt(shape, self._rng, self._vocabulary_len)
        ttft_s["cold"].append(self._cold(fresh))

    def _full_prefill(self, prompt: TokenPrompt) -> float:
        self._engine.clear_prefix_cache()
        done = self._first_token("full_prefill", prompt, "off")
        self._claim(done.reuse.gpu_prefix_tokens == 0, "full_prefill", done)
        return done.ttft_s

    def _floor(self, prompt: TokenPrompt) -> float:
        ids = [token for chunk in prompt.chunks for token in chunk]
        num_new = self._engine.layout(prompt).recompute_len
        block_size = self._engine.block_size
        shared = (len(ids) - num_new) // block_size * block_size
        new = random_ids(num_new, self._rng, self._vocabulary_len)
        done = self._first_token("floor", TokenPrompt([ids[:shared] + new]), "off")
        self._claim(
            done.reuse.gpu_prefix_tokens == shared
            and done.reuse.recomputed_tokens == num_new,
            "floor",
            done,
        )
        return done.ttft_s

    def _host(self, prompt: TokenPrompt) -> float:
        return self._all_hit("host", prompt)

    def _disk(self, prompt: TokenPrompt) -> float:
        self._engine.flush()
        self._engine.clear_host()
        return self._all_hit("disk", prompt)

    def _all_hit(self, tier: str, prompt: TokenPrompt) -> float:
        self._engine.clear_prefix_cache()
        before = self._reads()
        done = self._first_token(tier, prompt, "daric")
        self._claim_all_hit(tier, prompt, done)
        after = self._reads()
        read_from = [name for name in after if after[name] > before[name]]
        self._claim(read_from == [tier], tier, done)
        return done.ttft_s

    def _full_reuse(self, prompt: TokenPrompt) -> float:
        self._engine.clear_prefix_cache()
        done = self._first_token("full_reuse", prompt, "full_reuse")
        stats = done.reuse
        self._claim(
            stats.generated_tokens == 0
            and stats.gpu_prefix_tokens == 0
            and stats.recomputed_tokens == len(prompt.chunks[-1]),
            "full_reuse",
            done,
        )
        return done.ttft_s

    def _cold(self, prompt: TokenPrompt) -> float:
        self._engine.clear_prefix_cache()
        done = self._first_token("cold", prompt, "daric")
        stats = done.reuse
        self._claim(
            stats.generated_tokens > 0
            and stats.hit_tokens == 0
            and stats.gpu_prefix_tokens == 0,
            "cold",
            done,
        )
        self._engine.flush()
        return done.ttft_s

    def _first_token(self, name: str, prompt: TokenPrompt, reuse: Reuse) -> Completion:
        self._on_run(name)
        return self._engine.generate(
            prompt, max_tokens=1, reuse=reuse, namespace=self._namespace
        )

    def _stream(self, prompt: TokenPrompt, reuse: Reuse) -> float:
        """Return seconds per output token."""
        self._on_run(f"stream, reuse={reuse}")
        arrivals_s: list[float] = []
        completion: Completion | None = None
        for delta in self._engine.stream(
            prompt,
            max_tokens=_DECODE_LEN,
            ignore_eos=True,
            reuse=reuse,
            namespace=self._namespace,
        ):
            if delta.token_ids:
                arrivals_s.append(time.perf_counter())
            completion = delta.completion
        if completion is None or len(arrivals_s) < _DECODE_LEN:
            raise EngineError(
                "the engine did not stream its answer token by token; the time per "
                "output token cannot be measured"
            )
        if reuse == "daric":
            self._claim_all_hit("stream", prompt, completion)
        return statistics.median(
            after - before for before, after in pairwise(arrivals_s)
        )

    def _claim_all_hit(self, name: str, prompt: TokenPrompt, done: Completion) -> None:
        stats = done.reuse
        self._claim(
            stats.hit_tokens > 0
            and stats.generated_tokens == 0
            and stats.gpu_prefix_tokens == 0
            and stats.recomputed_tokens == self._engine.layout(prompt).recompute_len,
            name,
            done,
        )

    def _claim(self, holds: bool, name: str, done: Completion) -> None:
        if not holds:
            raise EngineError(
                f"a run was not what {name!r} claims, so its time means nothing: "
                f"{done.reuse}. Was the store too small for the documents, or without "
                f"a disk tier?"
            )

    def _reads(self) -> dict[str, int]:
        """Return how many records each tier has served."""
        stats = self._engine.store_stats()
        return {
            "host": stats.host.hits,
            "disk": 0 if stats.disk is None else stats.disk.hits,
        }


def _row(shape: TtftShape, recompute_len: int, samples: _Samples) -> dict[str, Any]:
    tpot_s = samples.tpot_s
    # Pairs of one round, so that a drift between rounds does not show.
    ratios = [d / o for d, o in zip(tpot_s["daric"], tpot_s["off"], strict=True)]
    return {
        "prompt_tokens": shape.prompt_len,
        "recomputed_tokens": recompute_len,
        **{f"{name}_ms": _median_ms(times) for name, times in samples.ttft_s.items()},
        "tpot_ratio": round(statistics.median(ratios), 4),
        "num_documents": shape.num_documents,
        "document_tokens": shape.document_len,
        "floor_tokens": recompute_len,
        "tpot_ms": _median_ms(tpot_s["off"]),
        "daric_tpot_ms": _median_ms(tpot_s["daric"]),
        "spread_ms": {
            name: [round(min(times) * 1e3, 3), round(max(times) * 1e3, 3)]
            for name, times in samples.ttft_s.items()
        },
        "tpot_ratio_spread": [round(min(ratios), 4), round(max(ratios), 4)],
    }


def _median_ms(times_s: list[float]) -> float:
    return round(statistics.median(times_s) * 1e3, 3)
