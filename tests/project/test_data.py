"""The demo sets and the reader of their format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from daric_rag.data import DEMO_SETS, load_demo_sets, load_jsonl
from daric_rag.errors import PromptError

GOOD: dict[str, Any] = {
    "id": "a-1",
    "task": "a",
    "system": "",
    "chunks": ["One.\n\n", "Two.\n\n"],
    "question": "Which?",
    "answers": ["Two"],
    "metric": "f1",
    "source": "ours",
    "meta": {"answer_chunks": [1]},
}


def write(tmp_path: Path, *records: object) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize("name", DEMO_SETS)
def test_demo_set_is_answerable_and_reuses_its_documents(name: str) -> None:
    records = load_demo_sets()[name]
    assert len(records) == 5
    seen: dict[str, str] = {}
    places: set[tuple[str, int]] = set()
    for record in records:
        assert record.task == name
        assert "Apache-2.0" in record.source
        assert 8 <= len(record.chunks) <= 10
        assert 1200 <= record.meta["prompt_tokens"] <= 2600
        answer_chunks = [record.chunks[i] for i in record.meta["answer_chunks"]]
        assert any(record.answers[0].lower() in c.lower() for c in answer_chunks)
        for place, chunk in enumerate(record.chunks):
            title = chunk.split("\n", 1)[0]
            # The same document is the same text, or its cache would not be found.
            assert seen.setdefault(title, chunk) == chunk
            places.add((title, place))
    assert len(seen) == 12
    assert len(places) > 2 * len(seen)  # most are met at several positions


def test_record_keeps_every_blank_line(tmp_path: Path) -> None:
    (record,) = load_jsonl(write(tmp_path, GOOD))
    assert record.chunks == ("One.\n\n", "Two.\n\n")
    assert record.answers == ("Two",)
    assert record.meta == {"answer_chunks": [1]}


def test_blank_lines_between_records_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(f"\n{json.dumps(without('meta'))}\n\n")
    assert load_jsonl(path)[0].meta == {}


def test_unescaped_line_separator_inside_a_string_is_no_line_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "set.jsonl"
    record = GOOD | {"question": "Which\u2028one?"}
    path.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
    assert load_jsonl(path)[0].question == "Which\u2028one?"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ([], "expected a JSON object, not a list"),
        (without("chunks"), "missing 'chunks'"),
        (GOOD | {"docs": []}, "unknown field 'docs'"),
        (GOOD | {"system": None}, "'system' must be a string, not null"),
        (GOOD | {"chunks": "One."}, "'chunks' must be a list of strings"),
        (GOOD | {"chunks": [1]}, "'chunks' must be a list of strings"),
        (GOOD | {"chunks": []}, "'chunks' must hold non-empty strings"),
        (GOOD | {"chunks": [""]}, "'chunks' must hold non-empty strings"),
        (GOOD | {"answers": []}, "'answers' must hold non-empty strings"),
        (GOOD | {"question": ""}, "'question' must not be empty"),
        (GOOD | {"metric": "bleu"}, "'metric' is 'bleu', not one of f1, rougeL"),
        (GOOD | {"meta": 1}, "'meta' must be an object, not a number"),
    ],
)
def test_bad_record_names_file_line_and_field(
    tmp_path: Path, record: object, text: str
) -> None:
    path = write(tmp_path, GOOD | {"id": "fine"}, record)
    with pytest.raises(PromptError) as caught:
        load_jsonl(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert text in str(caught.value)


def test_repeated_id_names_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, GOOD)
    with pytest.raises(PromptError, match=r"line 2: id 'a-1' was used in line 1"):
        load_jsonl(path)


def test_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text("{'id': 1}")
    with pytest.raises(PromptError, match="line 1: not JSON"):
        load_jsonl(path)


def test_empty_and_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(PromptError, match=r"empty.jsonl holds no record"):
        load_jsonl(tmp_path / "empty.jsonl")
    with pytest.raises(PromptError, match=r"cannot read .*gone.jsonl"):
        load_jsonl(tmp_path / "gone.jsonl")
