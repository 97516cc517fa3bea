"""Splitters: named as module:object, and what their pieces are called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from daric_rag.errors import ConfigError
from daric_rag.prewarm import PathSource, PrewarmJob, SourceItem
from daric_rag.prewarm.splitting import load_splitter, split_items, split_of
from tests.prewarm.engines import FolderEngine

LIBRARY = """
class Splitter:
    def split_text(self, text):
        return [line for line in text.splitlines() if line]

class Settings:
    splitter = Splitter()

def halves(text):
    return [text[: len(text) // 2], text[len(text) // 2 :]]

number = 7
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_indexing.py").write_text(LIBRARY)
    (tmp_path / "broken_indexing.py").write_text("raise RuntimeError('no index')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_indexing", raising=False)
    return tmp_path


def test_methods_and_functions_are_found_beside_the_command(library: Path) -> None:
    assert load_splitter("own_indexing:Settings.splitter")("a\n\nb") == ["a", "b"]
    assert load_splitter("own_indexing:halves")("abcd") == ["ab", "cd"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("own_indexing", "module:object"),
        ("own_indexing:", "module:object"),
        ("absent_indexing:splitter", "No module named"),
        ("broken_indexing:splitter", "no index"),
        ("own_indexing:Settings.other", "has no 'other'"),
        ("own_indexing:number", "split_text"),
        # A class would take the text for its first option.
        ("own_indexing:Splitter", "split_text"),
    ],
)
def test_what_is_no_splitter_is_told(library: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_splitter(name)


def test_pieces_keep_title_and_source_and_have_names(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "three\\nfour", "title": "T", "id": "b"}\n'
    )
    source = PathSource([tmp_path], split=str.splitlines)
    items = list(source)
    assert [item.id for item in items] == [
        f"{tmp_path}/a.txt#1",
        f"{tmp_path}/a.txt#2",
        "b#1",
        "b#2",
    ]
    assert [item.document["text"] for item in items] == ["one", "two", "three", "four"]
    assert items[1].document["source"] == f"{tmp_path}/a.txt"
    assert items[3].document["title"] == "T"
    assert sum(item.source_bytes for item in items) == source.num_bytes


def test_a_document_that_cannot_be_split_stops_nothing() -> None:
    def split(text: str) -> Any:
        if text == "bad":
            raise ValueError("too bad")
        return text if text == "no list" else [text]

    texts = ("good", "bad", "no list")
    items = [SourceItem(text, {"text": text}) for text in texts]
    good, bad, no_list = split_items(items, split_of(split))
    assert good.document == {"text": "good"}
    assert "too bad" in bad.error
    assert "texts" in no_list.error
    # Else --sync would give up the pieces that a former run had of them.
    assert bad.hides_others
    assert no_list.hides_others


@pytest.mark.parametrize("kind", [iter, lambda lines: map(str.strip, lines), tuple])
def test_pieces_come_in_any_kind_of_sequence(kind: Any) -> None:
    split = split_of(lambda text: kind(text.splitlines()))
    items = list(split_items([SourceItem("a", {"text": "one\ntwo"})], split))
    assert [item.document["text"] for item in items] == ["one", "two"]


def test_an_unreadable_document_hides_its_pieces() -> None:
    item = SourceItem("a", error="is no PDF")
    (only,) = split_items([item], str.splitlines)
    assert only.error == "is no PDF"
    assert only.hides_others


def test_nothing_left_of_a_document_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    source = PathSource([tmp_path / "a.txt"], split=lambda text: [])
    job = PrewarmJob(FolderEngine(tmp_path / "store"), source)
    assert job.run().totals.skipped == 1


def test_the_frameworks_splitters_are_splitters() -> None:
    node_parser = pytest.importorskip("llama_index.core.node_parser")
    split = split_of(node_parser.SentenceSplitter(chunk_size=20, chunk_overlap=0))
    text = "One sentence is here. " * 12
    pieces = split(text)
    assert len(pieces) > 1
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "")
    with pytest.raises(ConfigError, match="PrewarmJob"):
        split_of(node_parser.MarkdownNodeParser())
