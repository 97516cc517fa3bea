"""What a job would do: documents, tokens, bytes and seconds, without doing it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from daric_rag.engine import DocumentOutcome
from daric_rag.errors import PromptError
from daric_rag.keys import DocumentHash, document_hash
from daric_rag.layout import PromptLayout
from daric_rag.prewarm.items import items_of
from daric_rag.prewarm.seen import Known, SeenDocuments
from daric_rag.prewarm.sharding import Shard, text_hash
from daric_rag.prompt import PromptBuilder
from daric_rag.prompt_types import DocumentPart

__all__ = ["Calibration", "Plan", "PlanEngine", "calibrate", "make_plan"]

# Enough tokens for a steady figure, few enough for seconds on a laptop.
_SAMPLE_CHARS = 32_000
_SAMPLE_DOCUMENTS = 64
_MAX_REASONS = 20


class PlanEngine(Protocol):
    """What a plan needs of an engine."""

    def document_layout(self, document: Any) -> PromptLayout:
        """Return a document's tokens; `PromptError` where it would be refused."""
        ...

    def prewarm_each(self, documents: Sequence[Any]) -> list[DocumentOutcome]:
        """See `daric_rag.engine.Engine`."""
        ...


@dataclass(slots=True)
class Plan:
    """What a job would meet.

    Attributes:
        num_documents: To be stored, each text once.
        num_repeated: Equal to an earlier one.
        num_empty: Without text.
        num_refused: That could not be stored; `reasons` has the first ones.
        num_others: Of other shards.
        num_cached: Of the documents, stored already.
        num_tokens: Of the documents.
        cached_tokens: Of these, stored already.
        reasons: Pairs of id and reason, the first 20.
        sample: The first documents to be computed, to measure with.
    """

    num_documents: int = 0
    num_repeated: int = 0
    num_empty: int = 0
    num_refused: int = 0
    num_others: int = 0
    num_cached: int = 0
    num_tokens: int = 0
    cached_tokens: int = 0
    reasons: list[tuple[str, str]] = field(default_factory=list)
    sample: list[DocumentPart] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        """Tokens to be computed."""
        return self.num_tokens - self.cached_tokens

    def refuse(self, document_id: str, reason: str) -> None:
        """Count a document that cannot be stored."""
        self.num_refused += 1
        if len(self.reasons) < _MAX_REASONS:
            self.reasons.append((document_id, reason))


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a short run measured.

    Attributes:
        tokens_per_s: Computed and stored per second.
        bytes_per_token: On disk.
    """

    tokens_per_s: float
    bytes_per_token: float

    def seconds(self, num_tokens: int) -> float:
        """Return how long tokens will take."""
        return num_tokens / self.tokens_per_s

    def nbytes(self, num_tokens: int) -> int:
        """Return what tokens will take up on disk."""
        return round(num_tokens * self.bytes_per_token)


def make_plan(
    source: Any,
    engine: PlanEngine,
    *,
    builder: PromptBuilder,
    shard: Shard,
    is_cached: Callable[[DocumentHash], bool],
    on_item: Callable[[], None] = lambda: None,
) -> Plan:
    """Read a source to its end and count.

    Args:
        source: See `items_of`.
        engine: Tokenises.
        builder: Writes documents as prompts will hold them.
        shard: Whose documents count.
        is_cached: Whether the store has a document.
        on_item: Called before every document.
    """
    plan = Plan()
    with SeenDocuments() as seen:
        for item in items_of(source):
            on_item()
            if item.error:
                plan.refuse(item.id, item.error)
                continue
            try:
                parts = builder.document_parts([item.document])
                if not parts:
                    plan.num_empty += 1
                    continue
                name = text_hash(parts[0].text)
                if not shard.holds(name):
                    plan.num_others += 1
                elif seen.visit(name, item.id) is not Known.NEW:
                    plan.num_repeated += 1
                else:
                    _count(plan, parts[0], engine.document_layout(parts[0]), is_cached)
            except PromptError as error:
                plan.refuse(item.id, str(error))
    return plan


def calibrate(
    engine: PlanEngine, sample: Sequence[DocumentPart], held_bytes: Callable[[], int]
) -> Calibration | None:
    """Compute a sample into an empty store; None if there is nothing to measure.

    Args:
        engine: Writes to a store that nothing else is written to.
        sample: Documents, two at least; the first is left out of the time, as it pays
            for what is done once.
        held_bytes: Returns the bytes of the store, everything flushed.
    """
    if len(sample) < 2:
        return None
    warm = engine.prewarm_each(sample[:1])
    held_bytes()
    start = time.perf_counter()
    timed = engine.prewarm_each(sample[1:])
    nbytes = held_bytes()
    seconds = time.perf_counter() - start
    num_timed = sum(outcome.saved_tokens for outcome in timed)
    num_tokens = num_timed + sum(outcome.saved_tokens for outcome in warm)
    if not num_timed or seconds <= 0:
        return None
    return Calibration(num_timed / seconds, nbytes / num_tokens)


def _count(
    plan: Plan,
    part: DocumentPart,
    layout: PromptLayout,
    is_cached: Callable[[DocumentHash], bool],
) -> None:
    plan.num_documents += 1
    plan.num_tokens += layout.prompt_len
    if is_cached(document_hash(layout.token_ids)):
        plan.num_cached += 1
        plan.cached_tokens += layout.prompt_len
        return
    num_chars = sum(len(taken.text) for taken in plan.sample)
    if len(plan.sample) < _SAMPLE_DOCUMENTS and num_chars < _SAMPLE_CHARS:
        plan.sample.append(part)
