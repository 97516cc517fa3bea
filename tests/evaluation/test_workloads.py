from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from daric_rag.data import DEMO_SETS
from daric_rag.errors import ConfigError, PromptError
from daric_rag.evaluation.workloads import (
    SPARE_DOCUMENTS,
    TtftShape,
    load_questions,
    long_question,
    parse_sizes,
    random_prompt,
)


def test_sets_take_turns_with_the_long_question_behind_the_first_round() -> None:
    records = load_questions([])
    assert [r.task for r in records[:3]] == list(DEMO_SETS)
    assert records[3].id.endswith("-long")
    assert [r.task for r in records[4:7]] == list(DEMO_SETS)
    assert len({r.id for r in records}) == len(records) == 16


def test_files_take_turns_and_bad_ones_are_named(tmp_path: Path) -> None:
    record = {
        "task": "t",
        "system": "",
        "chunks": ["One."],
        "question": "?",
        "answers": ["1"],
        "metric": "f1",
        "source": "ours",
    }
    for name, count in (("a", 2), ("b", 1)):
        lines = [json.dumps(record | {"id": f"{name}{i}"}) for i in range(count)]
        (tmp_path / name).write_text("\n".join(lines))
    records = load_questions([tmp_path / "a", tmp_path / "b"])
    assert [r.id for r in records] == ["a0", "b0", "a1"]
    with pytest.raises(PromptError, match="gone"):
        load_questions([tmp_path / "gone"])


def test_long_question_holds_its_answer_and_keeps_a_passage_back() -> None:
    record = long_question()
    (place,) = record.meta["answer_chunks"]
    assert record.answers[0] in record.chunks[place]
    (spare,) = record.meta[SPARE_DOCUMENTS]
    assert spare not in record.chunks


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("1.3k,2600", [1300, 2600]), ("7.7K", [7700]), (" 600 , ", [600])],
)
def test_sizes_are_read(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", ",", "big", "1.3m", "-5"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"1\.3k"):
        parse_sizes(text)


@pytest.mark.parametrize("size", [600, 1300, 2600, 5200, 7700])
def test_shape_meets_the_size_off_the_block_grid(size: int) -> None:
    shape = TtftShape.of_size(size)
    assert abs(shape.prompt_len - size) <= 20
    assert shape.document_len % 16
    prompt = random_prompt(shape, random.Random(1), 500)
    assert sum(map(len, prompt.chunks)) == shape.prompt_len
    assert all(100 <= token < 500 for chunk in prompt.chunks for token in chunk)


def test_size_too_small_to_compare_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 544 tokens"):
        TtftShape.of_size(300)
