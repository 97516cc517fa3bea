"""Does the first token of a cold prompt take time in proportion to its documents?

Prompts of equal documents, none of them stored or cached: new tokens and a namespace of
its own each time, and saving is waited for before the next run. The largest prompt is
run twice before anything else, because the first pass in a process also builds kernels
and touches memory for the first time; then all sizes take turns. Times are medians over
the rounds, the line is the least-squares one through them.

TTFT runs from submission to the first token's arrival at the client.
"""

from __future__ import annotations

import random
import secrets
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from daric_rag.errors import EngineError
from daric_rag.evaluation.serving_stats import linear_fit
from daric_rag.evaluation.ttft_bench import BenchEngine
from daric_rag.evaluation.workloads import TtftShape, random_prompt

__all__ = ["NUM_FIRST_RUNS", "run_cold_bench"]

NUM_FIRST_RUNS = 2

_SEED = 1


def run_cold_bench(
    engine: BenchEngine,
    shapes: Sequence[TtftShape],
    *,
    repeats: int,
    on_run: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return a row per shape, the line through them, and what the first run took.

    Args:
        engine: Must not have run anything yet.
        shapes: At least two numbers of documents, all of one length.
        repeats: Rounds.
        on_run: Called before each run with its name.

    Raises:
        EngineError: A prompt was not cold.
    """
    rng = random.Random(_SEED)

    def cold_ms(shape: TtftShape) -> float:
        on_run(f"{shape.num_documents} documents")
        return _cold_s(engine, shape, rng) * 1e3

    largest = max(shapes, key=lambda shape: shape.num_documents)
    first_ms = [cold_ms(largest) for _ in range(NUM_FIRST_RUNS)]
    times_ms: list[list[float]] = [[] for _ in shapes]
    for _ in range(repeats):
        for shape, times in zip(shapes, times_ms, strict=True):
            times.append(cold_ms(shape))
    rows = [_row(*pair) for pair in zip(shapes, times_ms, strict=True)]
    slope, intercept, r_squared = linear_fit(
        [row["num_documents"] for row in rows], [row["cold_ms"] for row in rows]
    )
    return {
        "rows": rows,
        "ms_per_document": round(slope, 3),
        "intercept_ms": round(intercept, 3),
        "r_squared": round(r_squared, 5),
        "first_cold_ms": round(first_ms[0], 3),
        "second_cold_ms": round(first_ms[1], 3),
        "first_over_second": round(first_ms[0] / first_ms[1], 3),
    }


def _cold_s(engine: BenchEngine, shape: TtftShape, rng: random.Random) -> float:
    engine.clear_prefix_cache()
    done = engine.generate(
        random_prompt(shape, rng, len(engine.tokenizer)),
        max_tokens=1,
        reuse="daric",
        namespace=f"cold-{secrets.token_hex(4)}",
    )
    if done.reuse.reused_tokens or not done.reuse.generated_tokens:
        raise EngineError(f"a prompt was not cold, so its time is void: {done.reuse}")
    engine.flush()
    return done.ttft_s


def _row(shape: TtftShape, times_ms: Sequence[float]) -> dict[str, Any]:
    return {
        "num_documents": shape.num_documents,
        "document_tokens": shape.document_len,
        "prompt_tokens": shape.prompt_len,
        "cold_ms": round(statistics.median(times_ms), 3),
        "spread_ms": [round(min(times_ms), 3), round(max(times_ms), 3)],
    }
