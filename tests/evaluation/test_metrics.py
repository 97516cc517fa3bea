from __future__ import annotations

import pytest

from daric_rag.evaluation.metrics import contains_answer, f1_score


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("Agnes Thorold", ["Agnes Thorold"], 1.0),
        ("The  agnes, thorold!", ["Agnes Thorold"], 1.0),
        ("Agnes", ["Agnes Thorold"], 2 / 3),
        ("it was Agnes Thorold", ["Agnes Thorold"], 2 / 3),
        ("1964", ["5 September 1964", "1964"], 1.0),
        ("yes yes", ["yes"], 2 / 3),
        ("no", ["yes"], 0.0),
        ("", ["yes"], 0.0),
        ("yes", [], 0.0),
    ],
)
def test_f1(prediction: str, answers: list[str], score: float) -> None:
    assert f1_score(prediction, answers) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "answers", "found"),
    [
        ("It was Agnes Thorold, of course.", ["Agnes Thorold"], True),
        ("In 1964.", ["5 September 1964", "1964"], True),
        ("In 19645.", ["1964"], False),
        ("Thorold Agnes", ["Agnes Thorold"], False),
        ("anything", ["", "the"], False),
    ],
)
def test_answer_is_found_word_for_word(
    prediction: str, answers: list[str], found: bool
) -> None:
    assert contains_answer(prediction, answers) is found
