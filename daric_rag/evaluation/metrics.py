"""How answers are scored: F1 as LongBench defines it, and whether one is in there."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

__all__ = ["contains_answer", "f1_score"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1_score(prediction: str, answers: Iterable[str]) -> float:
    """Return the best F1 over words of a prediction and the accepted answers.

    Lower case, punctuation and articles dropped; words count as often as they occur.

    Args:
        prediction: What the model wrote.
        answers: Accepted answers.

    Returns:
        In [0, 1]; 0 without any answer.
    """
    return max((_f1(prediction, answer) for answer in answers), default=0.0)


def contains_answer(prediction: str, answers: Iterable[str]) -> bool:
    """Return whether an accepted answer is part of a prediction, word for word.

    Kinder than F1 to a small model that says more than it was asked for.

    Args:
        prediction: What the model wrote.
        answers: Accepted answers.
    """
    said = f" {' '.join(_word_list(prediction))} "
    return any(
        f" {' '.join(words)} " in said for words in map(_word_list, answers) if words
    )


def _f1(prediction: str, answer: str) -> float:
    predicted, wanted = _words(prediction), _words(answer)
    shared = (predicted & wanted).total()
    if shared == 0:
        return 0.0
    precision, recall = shared / predicted.total(), shared / wanted.total()
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> Counter[str]:
    return Counter(_word_list(text))


def _word_list(text: str) -> list[str]:
    plain = text.lower().translate(_NO_PUNCTUATION)
    return _ARTICLES.sub(" ", plain).split()
