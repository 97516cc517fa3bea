"""What is run: questions over documents, and prompts of random tokens for timing."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from daric_rag.data import QuestionRecord, load_demo_sets, load_jsonl
from daric_rag.engine import TokenPrompt
from daric_rag.errors import ConfigError

__all__ = [
    "SPARE_DOCUMENTS",
    "TtftShape",
    "load_questions",
    "long_question",
    "parse_sizes",
    "random_ids",
    "random_prompt",
]

SPARE_DOCUMENTS = "spare_documents"
"""Entry of a record's `meta`: documents that are in no question of its set."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)(k?)")

# Shorter documents would lie in the recompute set from end to end.
_MIN_DOCUMENT_LEN = 48
_LONG_PASSAGE = 3


def load_questions(files: Sequence[str | os.PathLike[str]]) -> list[QuestionRecord]:
    """Return questions in the order shown: the sets take turns.

    Args:
        files: JSONL files in the format of `daric_rag.data`; none: the shipped sets,
            with `long_question` behind the first question of each.

    Raises:
        PromptError: A file is missing or not in that format.
    """
    sets = [load_jsonl(file) for file in files] or list(load_demo_sets().values())
    rounds = [
        [record for record in one_round if record is not None]
        for one_round in zip_longest(*sets)
    ]
    if not files:
        rounds.insert(1, [long_question()])
    return list(chain.from_iterable(rounds))


def long_question() -> QuestionRecord:
    """Return a question over the shipped documents in passages of three.

    About 5,400 tokens: the longer the prompt, the more there is to gain. The last
    passage is kept back as a new document.
    """
    sets = load_demo_sets()
    documents = list(
        dict.fromkeys(
            chunk
            for records in sets.values()
            for record in records
            for chunk in record.chunks
        )
    )
    base = sets["town_archive"][1]
    *passages, spare = (
        "".join(documents[start : start + _LONG_PASSAGE])
        for start in range(0, len(documents), _LONG_PASSAGE)
    )
    wanted = [base.chunks[index] for index in base.meta["answer_chunks"]]
    places = [i for i, text in enumerate(passages) if any(w in text for w in wanted)]
    return replace(
        base,
        id=f"{base.id}-long",
        chunks=tuple(passages),
        meta={"answer_chunks": places, SPARE_DOCUMENTS: [spare]},
    )


@dataclass(frozen=True, slots=True)
class TtftShape:
    """A prompt's outline: system, equal documents, question; all in tokens.

    Attributes:
        num_documents: Documents.
        document_len: Of each. No multiple of half a block, so that documents start
            and end anywhere within blocks, as real ones do.
        system_len: Of the system text.
        question_len: Of the question.
    """

    num_documents: int
    document_len: int
    system_len: int = 32
    question_len: int = 32

    @classmethod
    def of_size(cls, size: int) -> TtftShape:
        """Return ten documents, or sixteen beyond 6,000 tokens, of `size` in all.

        Raises:
            ConfigError: The documents would be so short that DARIC recomputes them
                whole.
        """
        num = 10 if size <= 6000 else 16
        fixed = cls(num, 0).prompt_len
        length = round((size - fixed) / num)
        if length < _MIN_DOCUMENT_LEN:
            raise ConfigError(
                f"a prompt of {size} tokens is too short to compare; give sizes of at "
                f"least {fixed + num * _MIN_DOCUMENT_LEN} tokens"
            )
        return cls(num, length if length % 16 else length + 1)

    @property
    def prompt_len(self) -> int:
        """Tokens in the whole prompt."""
        return (
            self.system_len + self.num_documents * self.document_len + self.question_len
        )


def random_prompt(
    shape: TtftShape, rng: random.Random, vocabulary_len: int
) -> TokenPrompt:
    """Return chunks of random token ids.

    A forward pass takes the same time whatever the tokens say, and random ones are
    never in a store or in a prefix cache by accident.
    """
    lens = [shape.system_len, *[shape.document_len] * shape.num_documents]
    return TokenPrompt(
        [random_ids(n, rng, vocabulary_len) for n in [*lens, shape.question_len]]
    )


def random_ids(num: int, rng: random.Random, vocabulary_len: int) -> list[int]:
    """Return `num` random token ids; control tokens mostly come first and are left."""
    first = min(100, vocabulary_len // 2)
    return [rng.randrange(first, min(40_000, vocabulary_len)) for _ in range(num)]


def parse_sizes(text: str) -> list[int]:
    """Return token counts from text such as ``1.3k,2600``.

    Raises:
        ConfigError: A part is no number.
    """
    return [_parse_size(part.strip()) for part in _parts(text)]


def _parts(text: str) -> Iterable[str]:
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError("no size was given; write for instance 1.3k,2.6k")
    return parts


def _parse_size(part: str) -> int:
    match = _SIZE.fullmatch(part.lower())
    if match is None:
        raise ConfigError(f"{part!r} is no prompt size; write for instance 1.3k,2.6k")
    return round(float(match[1]) * (1000 if match[2] else 1))
