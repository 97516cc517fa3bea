"""Files, folders, JSON Lines: what is read, what it is called, what is told."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pypdf import PdfWriter

from daric_rag.errors import ConfigError
from daric_rag.prewarm import JsonFields, PathSource, SourceItem, items_of, readers
from daric_rag.prompt import PromptBuilder

PAGE = b"BT /F1 12 Tf 10 50 Td (Opening hours) Tj ET"
PDF = b"""%%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 100]/Contents 4 0 R
/Resources<</Font<</F1<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>>>endobj
4 0 obj<</Length %d>>stream
%s
endstream endobj
trailer<</Root 1 0 R/Size 5>>
startxref
0
%%%%EOF""" % (len(PAGE), PAGE)


def read(*paths: Path | str, **more: Any) -> dict[str, Any]:
    """Texts, or errors in a set, by id."""
    items = PathSource([str(path) for path in paths], **more)
    return {
        item.id: {item.error} if item.error else item.document["text"] for item in items
    }


def test_a_folder_is_read_at_any_depth_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/.hidden.md", ".git/x.md", "a/y.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert list(read(tmp_path).items()) == [
        (str(tmp_path / "b.txt"), "b.txt"),
        (str(tmp_path / "a/z.md"), "a/z.md"),
    ]


def test_a_file_that_is_named_is_text_whatever_its_suffix(tmp_path: Path) -> None:
    path = tmp_path / "NOTES"
    path.write_bytes("\ufeffcafé".encode())
    assert read(path) == {str(path): "café"}


def test_html_is_what_a_browser_shows(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(
        b"<html><head><meta charset='latin-1'><title>T</title></head><body>"
        b"<script>no()</script><h1>Open   hours</h1><p>caf\xe9 &amp; bar</p></body>"
    )
    assert read(path) == {str(path): "Open hours\ncafé & bar"}


def test_pdf_is_its_pages_text(tmp_path: Path) -> None:
    path = tmp_path / "page.pdf"
    path.write_bytes(PDF)
    assert read(path) == {str(path): "Opening hours"}


def test_a_pdf_of_pictures_is_an_empty_document(tmp_path: Path) -> None:
    writer = PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(tmp_path / "scan.pdf")
    assert read(tmp_path) == {str(tmp_path / "scan.pdf"): ""}


def test_what_cannot_be_read_is_told_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4 broken")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_text("good")
    (tmp_path / "d.txt").symlink_to(tmp_path / "nowhere")
    items = list(PathSource([tmp_path]))
    errors = [item.error for item in items]
    assert "is no PDF" in errors[0]
    assert errors[1] == "is not UTF-8 (byte 3): convert it to UTF-8"
    assert errors[2] == ""
    assert "No such file" in errors[3]


def test_html_that_its_parser_refuses_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_bytes(b"<p>a<![foo[ x")
    (tmp_path / "b.txt").write_text("good")
    first, second = PathSource([tmp_path])
    assert "is no HTML" in first.error
    assert second.error == ""


def test_pipes_in_a_folder_are_not_waited_for(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl"):
        os.mkfifo(tmp_path / name)
    errors = [item.error for item in PathSource([tmp_path])]
    assert errors == ["is no regular file"] * 2


@pytest.mark.parametrize("name", ["a.txt", "a.html", "a.pdf"])
def test_a_file_that_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 1 << 20)
    with (tmp_path / name).open("wb") as file:
        file.truncate((1 << 20) + 1)
    (item,) = PathSource([tmp_path])
    assert item.error == "is longer than 1 MiB: split it"
    with (tmp_path / name).open("wb") as file:
        file.truncate(100)
    (item,) = PathSource([tmp_path])
    assert "is longer" not in item.error


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    corpus, linked = tmp_path / "corpus", tmp_path / "linked"
    for folder in (corpus, linked):
        folder.mkdir()
        (folder / "a.txt").write_text(folder.name)
    (corpus / "more").symlink_to(linked)
    (linked / "back").symlink_to(corpus)
    assert read(corpus) == {
        str(corpus / "a.txt"): "corpus",
        str(corpus / "more" / "a.txt"): "linked",
    }


def test_a_folder_that_cannot_be_looked_into_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "a.txt").write_text("good")
    scandir = os.scandir

    def refused(path: Any) -> Any:
        if os.fspath(path) == str(inner):
            raise PermissionError(13, "Permission denied", str(inner))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    good, bad = PathSource([tmp_path])
    assert (good.error, good.hides_others) == ("", False)
    assert bad == SourceItem(
        str(inner), error="cannot be read (Permission denied)", hides_others=True
    )


def test_it_is_told_where_other_documents_may_be_hidden(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "a"}\n{"id": "b", "te\n{"no": "id"}\n')
    found = [(item.id, item.hides_others) for item in PathSource([path])]
    assert found == [("a", False), (f"{path}:2", True), (f"{path}:3", True)]
    path.unlink()
    path.symlink_to(tmp_path / "nowhere.jsonl")
    (item,) = PathSource([tmp_path])
    assert item.hides_others


def test_json_lines_have_names_for_fields(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    records = [
        {"key": 7, "body": "One.", "name": "First", "url": "u", "year": 1999},
        {"body": "Two.", "metadata": {"title": "Second"}},
        {"text": "not the field"},
    ]
    lines = [json.dumps(record) for record in records]
    path.write_text("\n".join([*lines[:2], "", lines[2], "{broken", "[1]"]))
    fields = JsonFields(text="body", title="name", source="url", id="key")
    items = list(PathSource([path], fields))
    assert [item.id for item in items] == ["7", *(f"{path}:{n}" for n in (2, 4, 5, 6))]
    assert items[0].document == {
        "text": "One.",
        "title": "First",
        "source": "u",
        "metadata": {"year": 1999},
    }
    assert items[1].document["metadata"] == {"title": "Second"}
    assert "'body'" in items[2].error
    assert "is no JSON" in items[3].error
    assert "'body'" in items[4].error
    assert sum(item.source_bytes for item in items) == path.stat().st_size - 1
    builder = PromptBuilder(document_template="{title} ({source}): {text}")
    assert builder.document_texts([items[0].document]) == ["First (u): One."]


def test_standard_input_is_json_lines() -> None:
    stdin = io.BytesIO(b'{"text": "One."}\n{"text": "Two."}')
    assert read("-", stdin=stdin) == {"stdin:1": "One.", "stdin:2": "Two."}
    with pytest.raises(ConfigError, match="standard input"):
        PathSource(["-"])


def test_wrong_paths_are_told_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        PathSource([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="no source"):
        PathSource([])


@pytest.mark.parametrize(
    ("name", "module"), [("a.pdf", "pypdf"), ("a.html", "bs4"), ("a.HTM", "bs4")]
)
def test_a_missing_reader_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{module}: .*daric-rag\[prewarm\]"):
        PathSource([tmp_path])


def test_sources_can_be_read_again_and_tell_their_size(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("12345")
    source = PathSource([tmp_path])
    assert source.num_bytes == 5
    assert list(source) == list(source)
    assert PathSource(["-"], stdin=io.BytesIO()).num_bytes is None


def test_a_folder_is_not_read_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(str(number))
    opened: list[str] = []
    open_path = Path.open

    def spy(path: Path, mode: str) -> Any:
        opened.append(path.name)
        return open_path(path, mode)

    monkeypatch.setattr(Path, "open", spy)
    items = iter(PathSource([tmp_path]))
    assert opened == []
    next(items)
    assert opened == ["0.txt"]


class Node:
    """As LlamaIndex makes them."""

    id_ = "node 1"
    text = "Two."


def test_documents_of_frameworks_are_taken_as_they_are() -> None:
    ready = SourceItem("mine", "One.")
    page = {"id": 7, "text": "Three."}
    items = list(items_of(iter([ready, Node(), page, "Four."])))
    assert [item.id for item in items] == ["mine", "node 1", "7", "item 3"]
    assert items[0] is ready
    texts = PromptBuilder().document_texts([item.document for item in items])
    assert texts == ["One.", "Two.", "Three.", "Four."]


class Loader:
    """As LangChain's."""

    def lazy_load(self) -> Iterator[Any]:
        yield Node()


class Docstore:
    """As LlamaIndex's."""

    docs: ClassVar = {"a": Node()}


@pytest.mark.parametrize("source", [Loader(), Docstore(), [Node()], iter([Node()])])
def test_documents_come_out_of_what_frameworks_have(source: Any) -> None:
    assert [item.id for item in items_of(source)] == ["node 1"]


@pytest.mark.parametrize("source", ["text", {"text": "one"}, 7, None])
def test_what_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="pass documents"):
        list(items_of(source))


# ------------------------------------------------------------- what may not be mounted


def places(source: PathSource) -> dict[str, str]:
    return {item.id: item.place for item in source}


def test_documents_know_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": "own"}\n{"text": "two"}\n')
    (tmp_path / "b.txt").write_text("three")
    (tmp_path / "c.txt").symlink_to(tmp_path / "b.txt")
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")
    expected = {"own": a, f"{a}:2": a, b: b, str(tmp_path / "c.txt"): b}
    assert places(PathSource([str(tmp_path)])) == expected
    pieces = PathSource([str(tmp_path)], split=lambda text: [text, "more"])
    assert set(places(pieces).values()) == {a, b}


@pytest.mark.parametrize("kind", ["named", "inside", "linked", "file", "lines"])
def test_where_there_is_nothing_any_more_is_known(tmp_path: Path, kind: str) -> None:
    corpus, other = tmp_path / "corpus", tmp_path / "other"
    for folder in (corpus, other, corpus / "sub"):
        folder.mkdir()
    (corpus / "stays.txt").write_text("near")
    (corpus / "sub" / "more.txt").write_text("near, too")
    lost, sources = other / "lost.txt", [str(corpus), str(other)]
    if kind == "inside":
        lost = corpus / "sub" / "more.txt"
    elif kind == "linked":
        (corpus / "far").symlink_to(other)
        sources = [str(corpus)]
    elif kind == "lines":
        lost = other / "lost.jsonl"
    lost.write_text('{"text": "far", "id": "own"}\n')
    source = PathSource(sources)
    before = places(source)
    assert [source.emptied(place) for place in before.values()] == [""] * len(before)
    if kind in ("file", "lines"):
        lost.write_text("")
    else:
        lost.unlink()
    list(source)
    gone = str(lost if kind in ("file", "lines") else lost.parent)
    found = {place: source.emptied(place) for place in before.values()}
    assert found.pop(str(lost)) == gone
    assert set(found.values()) == {""}
    lost.write_text("back")
    list(source)
    assert source.emptied(str(lost)) == ""
    assert source.emptied("") == ""


def test_what_cannot_be_read_hides_others_where_the_machine_is_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"\xff" if name == "a.txt" else b"words")
    opened = Path.open

    def failing(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", failing)
    found = {Path(i.id).name: i.hides_others for i in PathSource([str(tmp_path)])}
    assert found == {"a.txt": False, "b.txt": True}


def test_links_are_known_and_what_is_left_out_is(tmp_path: Path) -> None:
    corpus, other = tmp_path / "corpus", tmp_path / "other"
    for folder in (corpus, other):
        folder.mkdir()
        (folder / "a.txt").write_text("words")
    (corpus / "far").symlink_to(other)
    (corpus / "b.txt").symlink_to(other / "a.txt")
    (corpus / "loop").symlink_to(corpus / "loop")
    source = PathSource([str(corpus)], leave_out=[corpus / "far" / "a.txt"])
    # Files that are links themselves are not watched.
    assert source.linked == {other}
    found = {item.id: item.error for item in source}
    assert found.pop(str(corpus / "a.txt")) == ""
    assert [Path(name).name for name in found] == ["loop"]
    (tmp_path / "named").symlink_to(corpus)
    assert corpus in PathSource([str(tmp_path / "named")]).linked


def test_a_record_without_text_says_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "own"}\n{"title": "t"}\n')
    own, other = PathSource([str(tmp_path)])
    place = tmp_path / "a.jsonl"
    assert (own.id, other.id) == ("own", f"{place}:2")
    assert own.error.startswith(f"{place}:1 has no text")
    assert other.error.startswith("has no text")


def test_pages_in_no_encoding_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_bytes(b"<p>caf\xe9 \x81\x8d\xff</p>" * 3)
    (tmp_path / "b.html").write_text("<p>café</p>", encoding="utf-8")
    found = {Path(item.id).name: item for item in PathSource([str(tmp_path)])}
    assert found["b.html"].document["text"] == "café"
    bad = found["a.html"]
    assert bad.error or "\ufffd" not in bad.document["text"]
