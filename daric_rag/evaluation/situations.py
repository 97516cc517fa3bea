"""The demo's situations: one question, asked under different states of the store.

| Situation      | Documents                        | In the store before            |
|----------------|----------------------------------|--------------------------------|
| `FULL`         | as retrieved                     | (an ordinary vLLM request)     |
| `COLD`         | as retrieved                     | nothing                        |
| `WARM`         | as retrieved                     | all of them                    |
| `REORDERED`    | the same, all at other places    | all of them                    |
| `NEW_DOCUMENT` | one replaced by a new one        | all but the new one            |

They run in this order in a namespace of their own, and vLLM's prefix cache is emptied
before each. Whether a run was what its situation claims is read from its reuse counts
afterwards, never assumed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from daric_rag.data import QuestionRecord
from daric_rag.engine import ChunkedPrompt, Reuse, ReuseStats
from daric_rag.layout import PromptLayout

__all__ = [
    "COLD",
    "FULL",
    "NEW_DOCUMENT",
    "REORDERED",
    "SITUATIONS",
    "WARM",
    "Situation",
    "broken_claim",
    "prompt_of",
    "situations_of",
]

FULL = "full prefill"
COLD = "cold"
WARM = "warm"
REORDERED = "reordered"
NEW_DOCUMENT = "new document"

SITUATIONS = (FULL, COLD, WARM, REORDERED, NEW_DOCUMENT)
"""In the order in which they run."""


@dataclass(frozen=True, slots=True)
class Situation:
    """One run of a question.

    Attributes:
        name: One of `SITUATIONS`.
        prompt: What is asked.
        reuse: ``"off"`` for full prefill.
        new_index: Which document is the new one, None without one.
    """

    name: str
    prompt: ChunkedPrompt
    reuse: Reuse = "daric"
    new_index: int | None = None


def prompt_of(record: QuestionRecord) -> ChunkedPrompt:
    """Return a record's question over its documents as retrieved."""
    return _prompt(record, record.chunks)


def situations_of(record: QuestionRecord, pool: Iterable[str]) -> tuple[Situation, ...]:
    """Return everything to run for one question, in order.

    Args:
        record: The question. With a single document nothing can be reordered, nor be
            new among old ones, so those situations are left out.
        pool: Documents that a new one is chosen from.
    """
    prompt = prompt_of(record)
    found = [
        Situation(FULL, prompt, reuse="off"),
        Situation(COLD, prompt),
        Situation(WARM, prompt),
    ]
    if len(prompt.texts()) < 2:
        return tuple(found)
    found.append(Situation(REORDERED, _prompt(record, _moved(prompt.texts()))))
    exchanged = _exchanged(record, pool)
    if exchanged is not None:
        documents, index = exchanged
        found.append(
            Situation(NEW_DOCUMENT, _prompt(record, documents), new_index=index)
        )
    return tuple(found)


def broken_claim(situation: Situation, stats: ReuseStats, layout: PromptLayout) -> str:
    """Return why a run was not what its situation claims, or "" if it was.

    Args:
        situation: What was run.
        stats: What the engine reported.
        layout: The prompt's.
    """
    if stats.gpu_prefix_tokens:
        return f"{stats.gpu_prefix_tokens} tokens came from vLLM's own prefix cache"
    if situation.name in (FULL, COLD):
        if stats.hit_tokens:
            return f"{stats.hit_tokens} tokens were in the store already"
        if situation.name == FULL and stats.recomputed_tokens < layout.prompt_len:
            return f"only {stats.recomputed_tokens} tokens were computed in context"
        if situation.name == COLD and not stats.generated_tokens:
            return "no document was computed on its own"
        return ""
    if not stats.hit_tokens:
        return f"nothing was loaded: {stats.reason or 'no reason given'}"
    generated = 0
    if situation.new_index is not None:
        # The documents are the chunks right before the question.
        first = layout.num_chunks - 1 - len(situation.prompt.texts())
        start, end = layout.spans[first + situation.new_index]
        generated = end - start
    if stats.generated_tokens != generated:
        return (
            f"{stats.generated_tokens} tokens of documents were missing from the "
            f"store, not {generated}"
        )
    if stats.recomputed_tokens != layout.recompute_len:
        return (
            f"{stats.recomputed_tokens} tokens were computed in context, not "
            f"{layout.recompute_len}"
        )
    return ""


def _prompt(record: QuestionRecord, documents: Sequence[str]) -> ChunkedPrompt:
    return ChunkedPrompt(
        system=record.system or None,
        documents=list(documents),
        question=record.question,
    )


def _moved(documents: Sequence[str]) -> list[str]:
    """Return the documents so that none stays where it was; always the same way."""
    places = list(range(len(documents)))
    rng = random.Random(len(documents))
    while any(place == index for index, place in enumerate(places)):
        rng.shuffle(places)
    return [documents[place] for place in places]


def _exchanged(
    record: QuestionRecord, pool: Iterable[str]
) -> tuple[list[str], int] | None:
    """Return the documents with a middle one exchanged, and its index.

    The answer's document stays, if it is known and there is another. Of the pool that
    document is taken whose length comes nearest to the old one's.
    """
    documents = prompt_of(record).texts()
    candidates = [text for text in pool if text not in documents and text.strip()]
    if not candidates:
        return None
    answer = {record.chunks[i] for i in record.meta.get("answer_chunks", ())}
    middle = len(documents) // 2
    index = min(
        range(len(documents)),
        key=lambda i: (documents[i] in answer, abs(i - middle)),
    )
    old_len = len(documents[index])
    new = min(candidates, key=lambda text: abs(len(text) - old_len))
    return [*documents[:index], new, *documents[index + 1 :]], index
