"""The record of a job survives kills and damage, and says what it is about."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.errors import ConfigError, StoreError
from daric_rag.prewarm import Entry, Manifest
from daric_rag.prewarm.manifest import encoded, header_of
from daric_rag.prewarm.manifest_writer import ManifestWriter
from daric_rag.prewarm.seen import Known, SeenDocuments
from daric_rag.prewarm.sharding import TextHash

HEADER = header_of({"model": "m", "namespace": "default"}, template="t")
OTHER = header_of({"model": "n", "namespace": "default"}, template="t")


def entry(number: int, **more: Any) -> Entry:
    return Entry(f"d{number}", "computed", f"{number:032x}", "ab", 7, **more)


ENTRIES = [entry(number, error="“é”\n", seconds=0.5) for number in range(4)]


def write(path: Path, header: Any, entries: list[Entry]) -> None:
    with ManifestWriter(path, header) as writer:
        writer.append(entries)


def damage(path: Path, number: int, old: bytes, new: bytes) -> None:
    """Change a line."""
    lines = path.read_bytes().splitlines(keepends=True)
    assert old in lines[number]
    lines[number] = lines[number].replace(old, new)
    path.write_bytes(b"".join(lines))


def test_entries_come_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.jsonl"
    write(path, HEADER, ENTRIES[:3])
    write(path, HEADER, ENTRIES[3:])
    manifest = Manifest(path)
    assert list(manifest.entries(HEADER)) == ENTRIES
    assert manifest.headers() == [HEADER]
    assert path.stat().st_mode & 0o077 == 0


def test_other_circumstances_have_other_entries(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, HEADER, ENTRIES[:2])
    write(path, OTHER, ENTRIES[2:3])
    write(path, {**HEADER, "template": "u"}, ENTRIES[3:])
    manifest = Manifest(path)
    assert list(manifest.entries(HEADER)) == [*ENTRIES[:2], ENTRIES[3]]
    assert list(manifest.entries(OTHER)) == ENTRIES[2:3]
    assert list(manifest.entries()) == ENTRIES
    assert len(manifest.headers()) == 3


@given(cut=st.integers(0, 2000), more=st.booleans())
def test_a_torn_end_costs_what_it_hit(
    tmp_path_factory: pytest.TempPathFactory, cut: int, more: bool
) -> None:
    path = tmp_path_factory.mktemp("torn") / "m.jsonl"
    write(path, HEADER, ENTRIES)
    content = path.read_bytes()
    path.write_bytes(content[: max(len(content) - cut, 0)])
    whole = path.read_bytes().count(b"\n") - 1
    read = list(Manifest(path).entries(HEADER))
    assert read == ENTRIES[: max(whole, 0)]
    if more:
        write(path, HEADER, ENTRIES[-1:])
        again = Manifest(path)
        assert list(again.entries(HEADER)) == [*read, ENTRIES[-1]]
        assert again.num_damaged == 0


@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_damaged_byte_costs_one_line_at_most(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "m.jsonl"
    write(path, HEADER, ENTRIES)
    content = bytearray(path.read_bytes())
    header_len = content.index(b"\n") + 1
    position = header_len + position % (len(content) - header_len)
    before, content[position] = content[position], byte
    path.write_bytes(content)
    manifest = Manifest(path)
    if before == byte:
        assert list(manifest.history(HEADER)) == ENTRIES
        return
    # A newline makes two of it; one that is lost makes one of two.
    was_newline = before == ord("\n")
    pieces = 1 + (byte == ord("\n"))
    number = content[header_len:position].count(b"\n")
    hit = content.splitlines(keepends=True)[1 + number : 1 + number + pieces]
    is_document = all(b'"type": "document"' in piece for piece in hit)
    behind = ENTRIES[number + 1 + was_newline :] if is_document else []
    expected = [*ENTRIES[:number], *[None] * pieces, *behind]
    assert list(manifest.history(HEADER)) == expected
    assert manifest.num_damaged == pieces


def test_what_joins_a_header_is_not_taken_for_a_document(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, HEADER, ENTRIES[:1])
    write(path, OTHER, ENTRIES[1:])
    damage(path, 2, b"\n", b" ")
    assert list(Manifest(path).history(HEADER)) == [ENTRIES[0], None]
    assert list(Manifest(path).history(OTHER)) == [None]


def test_a_model_is_named_by_its_fingerprints(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    named = {"fingerprints": ["ab"], "namespace": "default"}
    first = header_of({"model": "m", **named})
    second = header_of({"model": "./m", **named})
    write(path, first, ENTRIES[:1])
    write(path, second, ENTRIES[1:])
    manifest = Manifest(path)
    assert list(manifest.entries(first)) == list(manifest.entries(second)) == ENTRIES
    assert manifest.circumstances() == [second]


@pytest.mark.parametrize("content", [b"one\ntwo", b'{"type": "header", "ver', b""])
def test_nothing_is_cut_off_what_is_no_manifest(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    if b"one" in content:
        with pytest.raises(ConfigError, match="is no manifest"):
            ManifestWriter(path, HEADER)
        assert path.read_bytes() == content
    else:
        # A kill tore the first line.
        write(path, HEADER, ENTRIES)
        assert list(Manifest(path).entries(HEADER)) == ENTRIES


def test_a_damaged_header_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, HEADER, ENTRIES[:2])
    write(path, OTHER, ENTRIES[2:])
    damage(path, 3, b'"n"', b'"o"')
    assert list(Manifest(path).entries(HEADER)) == ENTRIES[:2]
    assert list(Manifest(path).entries(OTHER)) == []
    write(path, HEADER, ENTRIES[:1])
    assert list(Manifest(path).entries(HEADER)) == [*ENTRIES[:2], ENTRIES[0]]
    # It is mended with that.
    before = path.read_bytes()
    write(path, HEADER, [])
    assert path.read_bytes() == before


def test_what_a_damaged_line_may_have_said_is_looked_up_again() -> None:
    first, second, third = ENTRIES[:3]
    with SeenDocuments() as seen:
        seen.load([first, None, second])
        names = [bytes.fromhex(entry.hash) for entry in (first, second, third)]
        found = [seen.visit(TextHash(name), "x") for name in names]
        assert found == [Known.NEW, Known.DONE, Known.NEW]
        assert seen.visit(TextHash(names[0]), "x") is Known.REPEATED
    with SeenDocuments() as seen:
        seen.load([first, None])
        # It may still be given up.
        assert [entry.id for entry in seen.vanished()] == [first.id]


@pytest.mark.parametrize(
    "wrong",
    [
        {"fingerprints": 5},
        {"fingerprints": ["zz"]},
        {"fingerprints": [5]},
        {"sources": 5},
        {"sources": [None]},
        {"model": 5},
        {"version": 1},
    ],
)
def test_headers_that_say_nothing_are_damaged(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    path = tmp_path / "m.jsonl"
    write(path, HEADER, ENTRIES[:1])
    with path.open("ab") as file:
        file.write(encoded({**HEADER, **wrong}))
    manifest = Manifest(path)
    assert manifest.headers() == [HEADER]
    assert manifest.num_damaged == 1


def test_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({**HEADER, "version": 1}) + "\nand more")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="another version of daric_rag: name"):
        ManifestWriter(path, HEADER)
    assert path.read_bytes() == before


def test_a_manifest_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ConfigError, match="is no file"):
            ManifestWriter(path, HEADER)


def encoded_anyway(line: Any) -> bytes:
    """Return a line whose checksum is right, if it can have one."""
    if isinstance(line, dict) and line.get("expires") != float("inf"):
        return encoded(line)
    return json.dumps(line).encode() + b"\n"


@pytest.mark.parametrize(
    "line",
    [
        {"type": "document"},
        {"type": "document", "id": "a", "status": "great"},
        {"type": "document", "id": 7, "status": "hit"},
        {"type": "document", "id": "a", "status": "hit", "hash": "xyz"},
        {"type": "document", "id": "a", "status": "hit", "document": "\ud800"},
        {"type": "document", "id": "a", "status": "hit", "expires": 10**400},
        {"type": "document", "id": "a", "status": "hit", "expires": float("inf")},
        {"type": "document", "id": "a", "status": "hit", "num_tokens": "7"},
        {"type": "other"},
        [1],
    ],
)
def test_lines_that_say_nothing_are_counted(tmp_path: Path, line: Any) -> None:
    path = tmp_path / "m.jsonl"
    write(path, HEADER, ENTRIES[:1])
    with path.open("ab") as file:
        file.write(encoded_anyway(line))
    manifest = Manifest(path)
    assert list(manifest.entries(HEADER)) == ENTRIES[:1]
    assert manifest.num_damaged == 1


def test_a_full_disk_is_told_with_its_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, _: Any) -> int:
            raise OSError(28, "No space left on device")

    path = tmp_path / "m.jsonl"
    with (  # noqa: PT012
        pytest.raises(StoreError, match="make room and run the job again"),
        ManifestWriter(path, HEADER) as writer,
    ):
        writer._file.close()
        monkeypatch.setattr(writer, "_file", io.BufferedWriter(Full()))
        writer.append(ENTRIES)
    monkeypatch.undo()


def test_two_jobs_do_not_share_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with (
        ManifestWriter(path, HEADER),
        pytest.raises(ConfigError, match="another job writes"),
    ):
        ManifestWriter(path, HEADER)
    write(path, HEADER, [])


@pytest.mark.parametrize("content", [b"precious\n", b"precious", b'{"type": "x"}\n'])
def test_what_is_no_manifest_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no manifest"):
        ManifestWriter(path, HEADER)
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="--manifest"):
        ManifestWriter(tmp_path / "file" / "m.jsonl", HEADER)


def test_no_manifest_has_no_entries(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path / "nothing")
    assert manifest.headers() == []
    assert list(manifest.entries(HEADER)) == []
