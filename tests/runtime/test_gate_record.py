"""What the gate remembers: one case each, and never anything damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from daric_rag.runtime.gate_record import GateRecord, gate_folder

FACTS = {"model": "abc", "torch": "2.13.0", "revision": 1}


def test_what_passed_is_remembered(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "gate"
    assert not GateRecord(FACTS, folder).has_passed()
    GateRecord(FACTS, folder).remember()
    assert GateRecord(FACTS, folder).has_passed()
    assert GateRecord(dict(reversed(FACTS.items())), folder).has_passed()
    assert [path.suffix for path in folder.iterdir()] == [".json"]


@pytest.mark.parametrize("fact", FACTS)
def test_another_case_has_not_passed(tmp_path: Path, fact: str) -> None:
    GateRecord(FACTS, tmp_path).remember()
    assert not GateRecord(FACTS | {fact: "other"}, tmp_path).has_passed()


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-1], lambda b: b"\xff"])
def test_a_damaged_record_is_none_and_is_mended(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    record = GateRecord(FACTS, tmp_path)
    record.remember()
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert not record.has_passed()
    record.remember()
    assert record.has_passed()


def test_without_a_folder_nothing_is_remembered(tmp_path: Path) -> None:
    """A file in the folder's place stands for any that cannot be made."""
    folder = tmp_path / "gate"
    folder.write_text("a file")
    record = GateRecord(FACTS, folder)
    record.remember()
    assert not record.has_passed()
    assert [path.name for path in tmp_path.iterdir()] == ["gate"]


def test_records_lie_in_the_users_cache_folder(cache_home: Path) -> None:
    assert gate_folder() == cache_home / "daric_rag" / "gate"
    GateRecord(FACTS).remember()
    assert GateRecord(FACTS).has_passed()
