"""Does pre-warming keep up with the engine's own prefill?

Passages are cut into equal parts. Each part is prefilled by ordinary requests for one
token, all handed over at once, and pre-warmed by a job of its own with a manifest, in
turns (the first part is prefilled first, the second one pre-warmed first), so that a
machine that others slow down for a while favours neither. As many others are run
before, and not counted: memory that a machine uses for the first time is slow. The
prefix cache is emptied before every run, and a job's time ends when everything is
flushed and written down: a long job flushes beside its next batch, these short ones
wait for it at their end.

| Figure                  | How it is taken                                            |
|-------------------------|------------------------------------------------------------|
| `prefill_tokens_per_s`  | a part's tokens over its seconds; median over the parts    |
| `prewarm_tokens_per_s`  | the same                                                   |
| `ratio`                 | of the second to the first                                 |
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from daric_rag.engine import Completion, DocumentOutcome, Prompt, TokenPrompt
from daric_rag.errors import ConfigError
from daric_rag.layout import PromptLayout
from daric_rag.prewarm import PrewarmJob

__all__ = ["RUNS_PER_PART", "PrewarmBenchEngine", "passages_of", "run_prewarm_bench"]

RUNS_PER_PART = 2
"""Beside one step of warming up."""


class PrewarmBenchEngine(Protocol):
    """What the benchmark needs of an embedded engine."""

    def document_layout(self, document: Any) -> PromptLayout:
        """Return a document's tokens."""
        ...

    def generate_batch(
        self, prompts: Sequence[Prompt], **options: Any
    ) -> list[Completion]:
        """Answer prompts."""
        ...

    def prewarm_each(self, documents: Sequence[Any]) -> list[DocumentOutcome]:
        """Store documents."""
        ...

    def clear_prefix_cache(self) -> None:
        """Empty vLLM's own cache."""
        ...


def passages_of(records: Iterable[Any], count: int) -> list[str]:
    """Return the first distinct passages of questions' documents.

    Raises:
        ConfigError: There are fewer.
    """
    texts = dict.fromkeys(
        chunk for record in records for chunk in record.chunks if chunk.strip()
    )
    if len(texts) < count:
        raise ConfigError(
            f"there are {len(texts)} passages and {count} are asked for: lower "
            f"--passages, or give --data with more"
        )
    return list(texts)[:count]


def run_prewarm_bench(
    engine: PrewarmBenchEngine,
    texts: Sequence[str],
    folder: Path,
    *,
    parts: int = 4,
    on_run: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Measure, see above.

    Args:
        engine: With a store that has none of the passages.
        texts: Passages; those that no equal part has are left out.
        folder: For the manifests.
        parts: How many times to measure.
        on_run: Called before every step with its name.

    Raises:
        ConfigError: The store had some of them already, or there are too few.
    """
    size = len(texts) // parts
    if not size:
        raise ConfigError(f"{len(texts)} passages make no {parts} parts: give more")
    on_run("warming up")
    others = [f"Not counted. {text}" for text in texts[:size]]
    prompts = [_prompt(engine, text) for text in others]
    engine.generate_batch(prompts, max_tokens=1, reuse="off")
    engine.clear_prefix_cache()
    _prewarm(engine, others, folder / "others.jsonl")
    rates: dict[str, list[float]] = {"prefill": [], "prewarm": []}
    num_tokens = 0
    for index in range(parts):
        part = texts[index * size : (index + 1) * size]
        prompts = [_prompt(engine, text) for text in part]
        part_tokens = sum(len(prompt.chunks[0]) for prompt in prompts)
        num_tokens += part_tokens
        for name in ("prewarm", "prefill") if index % 2 else ("prefill", "prewarm"):
            on_run(f"{name} {index + 1}")
            engine.clear_prefix_cache()
            start = time.perf_counter()
            if name == "prefill":
                engine.generate_batch(prompts, max_tokens=1, reuse="off")
            else:
                _prewarm(engine, part, folder / f"{index}.jsonl")
            rates[name].append(part_tokens / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "num_passages": size * parts,
        "num_tokens": num_tokens,
        "parts": parts,
        **{f"{name}_tokens_per_s": round(rate, 1) for name, rate in medians.items()},
        "ratio": round(medians["prewarm"] / medians["prefill"], 3),
    }


def _prompt(engine: PrewarmBenchEngine, text: str) -> TokenPrompt:
    return TokenPrompt([engine.document_layout(text).token_ids])


def _prewarm(engine: PrewarmBenchEngine, texts: Sequence[str], manifest: Path) -> None:
    totals = PrewarmJob(engine, texts, manifest=manifest).run().totals
    if totals.computed < len(texts):
        raise ConfigError(
            f"{len(texts) - totals.computed} of {len(texts)} passages were not "
            f"computed: give it an empty store"
        )
