from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from daric_rag import ReuseStats
from daric_rag.data import QuestionRecord
from daric_rag.evaluation.demo import Demo, QuestionOutcome
from daric_rag.evaluation.demo_report import conclusion, summarize, to_json
from daric_rag.evaluation.demo_view import (
    reuse_bar,
    show_question,
    show_summary,
    split_of,
)
from daric_rag.evaluation.situations import (
    COLD,
    FULL,
    NEW_DOCUMENT,
    REORDERED,
    SITUATIONS,
    WARM,
    situations_of,
)
from tests.evaluation.fakes import FakeEngine


def words(name: str, count: int = 100) -> str:
    return " ".join(f"{name}{i}" for i in range(count)) + "\n\n"


def record(name: str, documents: int = 5, **fields: Any) -> QuestionRecord:
    values: dict[str, Any] = {
        "id": name,
        "task": "task",
        "system": "Be brief.",
        "chunks": tuple(words(f"{name}{chr(97 + i)}") for i in range(documents)),
        "question": "Question: How many?",
        "answers": ("two",),
        "metric": "f1",
        "source": "ours",
    }
    return QuestionRecord(**values | fields)


RECORDS = [record("x"), record("y")]


def run(engine: FakeEngine, records: list[QuestionRecord]) -> list[QuestionOutcome]:
    demo = Demo(engine, records, max_tokens=4)
    demo.warm_up()
    return list(demo.run())


def rendered(questions: list[QuestionOutcome], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    for number, question in enumerate(questions, 1):
        show_question(console, question, number)
    show_summary(console, questions)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_situation_is_what_it_claims() -> None:
    for question in run(FakeEngine(), RECORDS):
        by_name = {outcome.situation: outcome for outcome in question.outcomes}
        assert tuple(by_name) == SITUATIONS
        assert not any(outcome.broken_claim for outcome in question.outcomes)
        assert by_name[FULL].speedup == 1
        assert by_name[COLD].reuse.generated_tokens == 500
        for name in (WARM, REORDERED):
            assert by_name[name].reuse.hit_tokens == 502
            assert by_name[name].speedup > 2
        assert by_name[NEW_DOCUMENT].reuse.generated_tokens == 100
        assert by_name[WARM].f1 == 1


def test_cold_is_cold_even_when_questions_share_documents() -> None:
    twice = [RECORDS[0], replace(RECORDS[0], id="again")]
    for question in run(FakeEngine(), twice):
        assert question.outcomes[1].reuse.hit_tokens == 0


@pytest.mark.parametrize(
    ("wrong", "broken"),
    [
        ({"contiguous_hit_tokens": 0}, {WARM, REORDERED, NEW_DOCUMENT}),
        ({"contiguous_hit_tokens": 7}, {COLD}),
        ({"generated_tokens": 7}, {WARM, REORDERED, NEW_DOCUMENT}),
        ({"gpu_prefix_tokens": 32}, {COLD, WARM, REORDERED, NEW_DOCUMENT}),
        ({"recomputed_tokens": 500}, {WARM, REORDERED, NEW_DOCUMENT}),
    ],
)
def test_a_run_that_is_not_what_it_claims_is_not_counted(
    wrong: dict[str, int], broken: set[str]
) -> None:
    questions = run(FakeEngine(**wrong), RECORDS[:1])
    found = {o.situation for o in questions[0].outcomes if o.broken_claim}
    assert found == broken
    assert {line.situation for line in summarize(questions)} == {*SITUATIONS} - broken
    assert f"{len(broken)} runs were not what they claim" in conclusion(questions)
    assert "not what it claims" in rendered(questions)


def test_reordering_moves_every_document_and_is_left_out_for_one() -> None:
    for count in range(2, 12):
        situations = {s.name: s for s in situations_of(record("x", count), ())}
        before = situations[FULL].prompt.texts()
        after = situations[REORDERED].prompt.texts()
        assert sorted(before) == sorted(after)
        assert not any(a == b for a, b in zip(before, after, strict=True))
    alone = situations_of(record("x", 1), ["new"])
    assert [s.name for s in alone] == [FULL, COLD, WARM]


def test_new_document_spares_the_answer_and_is_near_in_length() -> None:
    asked = record("x", meta={"answer_chunks": [2]})
    pool = ["short", words("z"), words("z", 1000), asked.chunks[0]]
    situation = situations_of(asked, pool)[-1]
    assert situation.new_index in (1, 3)
    documents = situation.prompt.texts()
    assert documents[situation.new_index] == words("z")
    assert documents[2] == asked.chunks[2]


def test_question_too_long_for_the_context_is_skipped_with_the_excess() -> None:
    engine = FakeEngine()
    engine.max_model_len = 300
    short = record("s", 2)
    questions = run(engine, [RECORDS[0], short])
    assert "by 209 tokens" in questions[0].skipped
    assert questions[1].outcomes
    assert "Skipped" in rendered(questions)


def test_json_is_json_and_says_everything() -> None:
    report = json.loads(json.dumps(to_json(run(FakeEngine(), RECORDS))))
    assert [line["situation"] for line in report["summary"]] == [*SITUATIONS]
    situation = report["questions"][0]["situations"][2]
    assert situation["reuse"]["contiguous_hit_tokens"] == 502
    assert {"ttft_s", "speedup", "answer", "f1", "broken_claim"} <= set(situation)
    assert "times sooner than with full prefill" in report["conclusion"]


@pytest.mark.parametrize("width", [80, 120])
def test_table_shows_every_situation(width: int) -> None:
    text = rendered(run(FakeEngine(), RECORDS), width)
    assert all(name in text for name in SITUATIONS)
    assert "in 2 of 2 answers with full prefill" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width


def test_nothing_run_is_said() -> None:
    assert conclusion([]) == "No question was run."
    assert "No question was run." in rendered([])


@pytest.mark.parametrize(
    ("stats", "split"),
    [
        (ReuseStats(100, recomputed_tokens=100), (0, 0, 0, 0, 100)),
        (
            ReuseStats(100, contiguous_hit_tokens=90, recomputed_tokens=20),
            (0, 80, 0, 0, 20),
        ),
        (
            ReuseStats(
                100,
                gpu_prefix_tokens=32,
                contiguous_hit_tokens=30,
                disjoint_hit_tokens=15,
                generated_tokens=15,
                recomputed_tokens=8,
            ),
            (32, 30, 15, 15, 8),
        ),
    ],
)
def test_split_adds_up_to_the_prompt(stats: ReuseStats, split: tuple[int, ...]) -> None:
    assert tuple(split_of(stats).values()) == split
    assert len(reuse_bar(stats, 24)) == 24
    assert reuse_bar(stats, 24, ascii_only=True).plain.isascii()
