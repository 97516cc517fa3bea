"""Does pre-warming keep up with the engine's own prefill?

Passages are halved. Each half is prefilled by ordinary requests for one token, all
handed over at once, and pre-warmed by a job with a manifest into an empty store, in
the order prefill 1, job 1, job 2, prefill 2, so that a machine that grows slower or
faster favours neither. The prefix cache is emptied before every run.

| Figure                  | How it is taken                                            |
|-------------------------|------------------------------------------------------------|
| `prefill_tokens_per_s`  | passages' tokens over seconds, both halves                 |
| `prewarm_tokens_per_s`  | the same; until everything is flushed and written down     |
| `ratio`                 | of the second to the first                                 |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from daric_rag.engine import Completion, DocumentOutcome, Prompt, TokenPrompt
from daric_rag.errors import ConfigError
from daric_rag.layout import PromptLayout
from daric_rag.prewarm import PrewarmJob

__all__ = ["NUM_RUNS", "PrewarmBenchEngine", "passages_of", "run_prewarm_bench"]

NUM_RUNS = 5
"""Steps of one measurement, warming up included."""


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
    on_run: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Measure, see above.

    Args:
        engine: With a store that has none of the passages.
        texts: Passages, four at least.
        folder: For the manifests.
        on_run: Called before every step with its name.

    Raises:
        ConfigError: The store had some of them already.
    """
    on_run("warming up")
    engine.generate_batch([_prompt(engine, texts[0])], max_tokens=1, reuse="off")
    engine.prewarm_each(["What is done once is done before the clock runs."])
    half = len(texts) // 2
    halves = texts[:half], texts[half:]
    seconds = {"prefill": 0.0, "prewarm": 0.0}
    for name, index in (("prefill", 0), ("prewarm", 0), ("prewarm", 1), ("prefill", 1)):
        on_run(f"{name} {index + 1}")
        engine.clear_prefix_cache()
        prompts = [_prompt(engine, text) for text in halves[index]]
        start = time.perf_counter()
        if name == "prefill":
            engine.generate_batch(prompts, max_tokens=1, reuse="off")
        else:
            _prewarm(engine, halves[index], folder / f"{index}.jsonl")
        seconds[name] += time.perf_counter() - start
    num_tokens = sum(engine.document_layout(text).prompt_len for text in texts)
    rates = {name: num_tokens / spent for name, spent in seconds.items()}
    return {
        "num_passages": len(texts),
        "num_tokens": num_tokens,
        "prefill_tokens_per_s": round(rates["prefill"], 1),
        "prewarm_tokens_per_s": round(rates["prewarm"], 1),
        "ratio": round(rates["prewarm"] / rates["prefill"], 3),
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
