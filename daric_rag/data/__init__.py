"""Questions over documents: the shipped demo sets and the reader of their format.

One JSON object a line::

    {"id", "task", "system", "chunks": [str, ...], "question", "answers": [str, ...],
     "metric": "f1" | "rougeL" | "em" | "edit_sim", "source", "meta": {...}}

The whole text is `system + "".join(chunks) + question`; blank lines are part of the
strings. `chunks` are the reusable documents, `question` is new in every request.

The three demo sets (a town's archive, a device's manual, a staff handbook) are fiction
written for this project and licensed like its code, Apache-2.0. In each, five questions
draw on a pool of twelve documents of 150 to 190 tokens, eight to ten at a time and at
changing positions, so that most documents are met again elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from daric_rag.errors import PromptError

__all__ = ["DEMO_SETS", "METRICS", "QuestionRecord", "load_demo_sets", "load_jsonl"]

DEMO_SETS = ("town_archive", "device_manual", "staff_handbook")
"""Names of the shipped sets, in the order in which they are shown."""

METRICS = ("f1", "rougeL", "em", "edit_sim")
"""How answers may be scored."""

_STRINGS = ("id", "task", "system", "question", "metric", "source")
_STRING_LISTS = ("chunks", "answers")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionRecord:
    """One question, the documents that go with it and the accepted answers.

    Attributes:
        id: Unique within its file.
        task: The set it belongs to.
        system: The system prompt, with its trailing blank lines.
        chunks: The documents in the order retrieved, each with its trailing blank
            lines.
        question: The question, the prompt's last chunk.
        answers: Accepted answers, any of which is right.
        metric: One of `METRICS`.
        source: Where the text comes from, with its licence.
        meta: Further facts, such as lengths in tokens.
    """

    id: str
    task: str
    system: str
    chunks: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    metric: str
    source: str
    meta: Mapping[str, Any] = field(default_factory=dict)


def load_demo_sets() -> dict[str, tuple[QuestionRecord, ...]]:
    """Returns the shipped sets by name, in the order of `DEMO_SETS`."""
    sets = {}
    for name in DEMO_SETS:
        file = resources.files(__name__).joinpath(f"{name}.jsonl")
        lines = file.read_text(encoding="utf-8").splitlines()
        sets[name] = _parse(lines, file.name)
    return sets


def load_jsonl(path: str | os.PathLike[str]) -> tuple[QuestionRecord, ...]:
    """Reads the records of a JSONL file; blank lines are skipped.

    Raises:
        PromptError: If the file cannot be read, holds no record, or a line does not
            follow the format; the text names file, line and field.
    """
    file = Path(path)
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read {file} as UTF-8 text: {error}") from error
    # Not splitlines(): JSON strings may hold U+2028 and its like unescaped.
    return _parse(content.split("\n"), str(file))


def _parse(lines: Iterable[str], name: str) -> tuple[QuestionRecord, ...]:
    """Returns the records in `lines`; `name` stands for the file in errors."""
    records: list[QuestionRecord] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(f"{place}: not JSON ({error})") from error
        record = _record(value, place)
        if record.id in line_of:
            raise PromptError(
                f"{place}: id {record.id!r} was used in line {line_of[record.id]}"
            )
        line_of[record.id] = number
        records.append(record)
    if not records:
        raise PromptError(f"{name} holds no record; expected one JSON object a line")
    return tuple(records)


def _record(value: object, place: str) -> QuestionRecord:
    """Returns the checked record of one line; `place` stands for it in errors."""
    if not isinstance(value, dict):
        raise PromptError(f"{place}: expected a JSON object, not {_kind(value)}")
    required = (*_STRINGS, *_STRING_LISTS)
    missing = [name for name in required if name not in value]
    if missing:
        raise PromptError(f"{place}: missing {', '.join(map(repr, missing))}")
    unknown = sorted(value.keys() - {*required, "meta"})
    if unknown:
        raise PromptError(
            f"{place}: unknown field {', '.join(map(repr, unknown))}; what is not "
            "part of the format belongs into 'meta'"
        )
    for name in _STRINGS:
        if not isinstance(value[name], str):
            found = _kind(value[name])
            raise PromptError(f"{place}: {name!r} must be a string, not {found}")
    for name in _STRING_LISTS:
        items = value[name]
        if not isinstance(items, list) or not all(isinstance(i, str) for i in items):
            raise PromptError(f"{place}: {name!r} must be a list of strings")
        if not items or not all(items):
            raise PromptError(f"{place}: {name!r} must hold non-empty strings")
    if not value["question"]:
        raise PromptError(f"{place}: 'question' must not be empty")
    if value["metric"] not in METRICS:
        raise PromptError(
            f"{place}: 'metric' is {value['metric']!r}, not one of {', '.join(METRICS)}"
        )
    meta = value.get("meta", {})
    if not isinstance(meta, dict):
        raise PromptError(f"{place}: 'meta' must be an object, not {_kind(meta)}")
    return QuestionRecord(
        id=value["id"],
        task=value["task"],
        system=value["system"],
        chunks=tuple(value["chunks"]),
        question=value["question"],
        answers=tuple(value["answers"]),
        metric=value["metric"],
        source=value["source"],
        meta=meta,
    )


def _kind(value: object) -> str:
    """Names a JSON value's kind as its writer would."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
