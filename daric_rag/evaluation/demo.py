"""Runs questions in every situation, on any engine, and keeps what came out.

TTFT is the engine's own `Completion.ttft_s`: from submission to the first token's
arrival at the client. Every run is measured once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from daric_rag.data import QuestionRecord, load_demo_sets
from daric_rag.engine import ChunkedPrompt, Engine, ReuseStats
from daric_rag.evaluation.metrics import contains_answer, f1_score
from daric_rag.evaluation.situations import (
    REORDERED,
    SITUATIONS,
    Situation,
    broken_claim,
    prompt_of,
    situations_of,
)
from daric_rag.evaluation.workloads import SPARE_DOCUMENTS

__all__ = [
    "Demo",
    "DemoEngine",
    "Outcome",
    "QuestionOutcome",
]


class DemoEngine(Engine, Protocol):
    """An engine whose prefix cache can be emptied."""

    max_model_len: int

    def clear_prefix_cache(self) -> None:
        """Empty vLLM's own prefix cache."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run.

    Attributes:
        situation: One of `SITUATIONS`.
        ttft_s: Time to first token, in seconds.
        speedup: The question's full prefill over this, in TTFT.
        answer: What the model wrote.
        f1: Of the answer, in [0, 1]; None if the record is scored otherwise.
        found: Whether an accepted answer is part of it, word for word; None likewise.
        reuse: Where the prompt's KV came from.
        broken_claim: Why the run was not what the situation says, or "". Such runs
            count in no summary.
    """

    situation: str
    ttft_s: float
    speedup: float
    answer: str
    f1: float | None
    found: bool | None
    reuse: ReuseStats
    broken_claim: str


@dataclass(frozen=True, slots=True)
class QuestionOutcome:
    """One question's runs; none if it was skipped.

    Attributes:
        record: The question.
        prompt_tokens: Tokens of its prompt as retrieved.
        outcomes: In the order of `SITUATIONS`.
        skipped: Why it was not run, or "".
    """

    record: QuestionRecord
    prompt_tokens: int
    outcomes: tuple[Outcome, ...] = ()
    skipped: str = ""


class Demo:
    """Client process. Asks every question in every situation.

    Args:
        engine: Must not serve anybody else meanwhile.
        records: The questions, in the order shown.
        max_tokens: Longest answer.
        on_run: Called before each run with its name.
    """

    def __init__(
        self,
        engine: DemoEngine,
        records: Sequence[QuestionRecord],
        *,
        max_tokens: int,
        on_run: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._engine, self._records = engine, records
        self._max_tokens, self._on_run = max_tokens, on_run
        # Unique, so that cold is cold in a store that has seen the demo before.
        self._run_id = f"demo-{secrets.token_hex(4)}"

    @property
    def num_runs(self) -> int:
        """Runs at most, warming up included."""
        return 1 + len(SITUATIONS) * len(self._records)

    def warm_up(self) -> None:
        """Ask the longest question that fits, untimed: first passes are slower."""
        self._on_run("warming up")
        fitting = [r for r in self._records if self._excess(prompt_of(r)) <= 0]
        if not fitting:
            return
        record = max(fitting, key=lambda record: sum(map(len, record.chunks)))
        for situation in situations_of(record, ()):
            self._engine.clear_prefix_cache()
            self._engine.generate(
                situation.prompt,
                max_tokens=2,
                reuse=situation.reuse,
                namespace=f"{self._run_id}/warm-up",
            )

    def run(self) -> Iterator[QuestionOutcome]:
        """Yield questions as they are done."""
        for number, record in enumerate(self._records):
            prompt_len = self._engine.layout(prompt_of(record)).prompt_len
            excess = self._excess(prompt_of(record))
            if excess > 0:
                yield QuestionOutcome(
                    record,
                    prompt_len,
                    skipped=f"the prompt and an answer of {self._max_tokens} tokens "
                    f"exceed the model's context of {self._engine.max_model_len} by "
                    f"{excess} tokens",
                )
                continue
            outcomes: list[Outcome] = []
            for situation in situations_of(record, self._pool(record)):
                if self._excess(situation.prompt) > 0:
                    continue  # The new document is longer than the one it replaced.
                self._on_run(situation.name)
                namespace = f"{self._run_id}/{number}"
                if situation.name == REORDERED:
                    self._store_all(record, namespace)
                outcomes.append(self._ask(record, situation, namespace, outcomes))
            yield QuestionOutcome(record, prompt_len, tuple(outcomes))

    def _ask(
        self,
        record: QuestionRecord,
        situation: Situation,
        namespace: str,
        earlier: Sequence[Outcome],
    ) -> Outcome:
        self._engine.clear_prefix_cache()
        done = self._engine.generate(
            situation.prompt,
            max_tokens=self._max_tokens,
            reuse=situation.reuse,
            namespace=namespace,
        )
        full_s = earlier[0].ttft_s if earlier else done.ttft_s
        layout = self._engine.layout(situation.prompt)
        scored = record.metric == "f1"
        return Outcome(
            situation=situation.name,
            ttft_s=done.ttft_s,
            speedup=full_s / done.ttft_s,
            answer=done.text.strip(),
            f1=f1_score(done.text, record.answers) if scored else None,
            found=contains_answer(done.text, record.answers) if scored else None,
            reuse=done.reuse,
            broken_claim=broken_claim(situation, done.reuse, layout),
        )

    def _store_all(self, record: QuestionRecord, namespace: str) -> None:
        """Store what the cold run did not: documents that it recomputed as a whole."""
        self._engine.clear_prefix_cache()
        self._engine.generate(
            prompt_of(record), max_tokens=1, reuse="full_reuse", namespace=namespace
        )

    def _excess(self, prompt: ChunkedPrompt) -> int:
        """Return how many tokens a prompt is too long by, at most 0 if it fits."""
        wanted = self._engine.layout(prompt).prompt_len + self._max_tokens
        return wanted - self._engine.max_model_len

    def _pool(self, record: QuestionRecord) -> list[str]:
        """Return documents that may be new: of the record's set, or else any."""
        shipped = [r for records in load_demo_sets().values() for r in records]
        own = [r for r in [*self._records, *shipped] if r.task == record.task]
        spare = record.meta.get(SPARE_DOCUMENTS, ())
        for texts in (
            spare,
            *({c for r in rs for c in r.chunks} for rs in (own, shipped)),
        ):
            # A passage of a long question holds documents of other questions.
            new = [t for t in texts if not any(t in chunk for chunk in record.chunks)]
            if new:
                return sorted(new)
        return []
