"""``daric store``: looking at a store, verifying, pinning, evicting, reclaiming."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from daric_rag.errors import ConfigError
from daric_rag.storage import DiskTier
from daric_rag.storage.format import HEADER_LEN
from tests.project.store_commands import answer, held, invoke, titles
from tests.storage.archives import NUMBERS, titled, write_all
from tests.storage.records import (
    CAPACITY_BYTES,
    FINGERPRINT,
    document,
    key,
    record_files,
)

DOCUMENT_FIELDS = {
    "key",
    "document",
    "title",
    "namespace",
    "model",
    "num_tokens",
    "num_segments",
    "nbytes",
    "own_bytes",
    "last_used",
    "uses",
    "pinned",
    "complete",
}
# Of documents that share segment 1: "Report" is 1, 2, 3 and "Plan" is 1, 5.
REPORT, PLAN, PROMPT = key(3), key(5), key(7)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of three documents, which the environment names."""
    path = tmp_path / "store"
    with closing(DiskTier(path, CAPACITY_BYTES)) as tier:
        write_all(tier)
    monkeypatch.setenv("DARIC_STORE", str(path))
    return path


def damage(folder: Path, number: int) -> None:
    """Change a byte of a record's payload."""
    with closing(DiskTier(folder, CAPACITY_BYTES)) as tier:
        (row,) = [row for row in tier.segments() if row.key == key(number)]
    content = bytearray((folder / row.filename).read_bytes())
    content[HEADER_LEN] ^= 1
    (folder / row.filename).write_bytes(content)


# ---------------------------------------------------------------------------- looking


def test_ls_lists_documents(folder: Path) -> None:
    listed = answer("ls")["documents"]
    assert all(set(document) == DOCUMENT_FIELDS for document in listed)
    by_title = {document["title"]: document for document in listed}
    assert set(by_title) == {"Report", "Plan", ""}
    report = by_title["Report"]
    assert report["key"] == REPORT.hex()
    assert report["document"] == key(901).hex()
    assert (report["num_segments"], report["num_tokens"]) == (3, 9)
    assert report["own_bytes"] < report["nbytes"]
    assert report["model"] == FINGERPRINT.hex()
    assert report["complete"]
    text = invoke("ls").stdout
    assert all(word in text for word in ("Report", "Plan", "(untitled)", "now"))


@pytest.mark.parametrize(
    ("sort", "first"), [("size", "Report"), ("title", ""), ("uses", "Plan")]
)
def test_ls_sorts_and_limits(folder: Path, sort: str, first: str) -> None:
    with closing(DiskTier(folder, CAPACITY_BYTES)) as tier:
        tier.touch([PLAN])
    (document,) = answer("ls", "--sort", sort, "--limit", "1")["documents"]
    assert document["title"] == first
    assert "2 more" in invoke("ls", "--sort", sort, "--limit", "1").stderr


def test_ls_selects(folder: Path) -> None:
    assert {d["title"] for d in answer("ls", "--title", "*p*")["documents"]} == {
        "Report",
        "Plan",
    }
    assert answer("ls", "--older-than", "1h")["documents"] == []
    assert answer("ls", "--namespace", "nobody")["documents"] == []
    assert len(answer("ls", key(901).hex())["documents"]) == 1


def test_a_title_cannot_command_the_terminal(folder: Path) -> None:
    side_data = titled(9, "TITLE").replace(b"TITLE", rb"a\u001b[2Jb\nc[red]d\ud800")
    with closing(DiskTier(folder, CAPACITY_BYTES)) as tier:
        for one in document([9], side_data):
            tier.write(one)
    for arguments in (["ls"], ["evict", "--all", "--dry-run"]):
        text = invoke(*arguments).stdout
        assert "a [2Jb c[red]d" in text
        assert "\x1b" not in text
    assert "a\x1b[2Jb\nc[red]d\ud800" in titles(folder)


def test_stats_adds_up(folder: Path) -> None:
    facts = answer("stats")
    sizes = [path.stat().st_size for path in record_files(folder)]
    assert facts["nbytes"] == sum(sizes)
    assert facts["num_segments"] == len(sizes) == len(NUMBERS)
    assert facts["num_documents"] == 3
    assert facts["models"] == [
        {"model": FINGERPRINT.hex(), "num_documents": 3, "nbytes": sum(sizes)}
    ]
    assert facts["namespaces"] == [
        {"namespace": "default", "num_documents": 3, "nbytes": sum(sizes)}
    ]
    assert "namespace default" in invoke("stats").stdout


def test_an_empty_store_can_be_looked_at(tmp_path: Path) -> None:
    DiskTier(tmp_path, CAPACITY_BYTES).close()
    store = ("--store", str(tmp_path))
    assert answer("ls", *store)["documents"] == []
    assert answer("stats", *store)["num_documents"] == 0
    assert answer("verify", *store)["damaged"] == []
    assert "0" in invoke("stats", *store).stdout


# ------------------------------------------------------------------------------ verify


def test_verify_finds_what_is_whole(folder: Path) -> None:
    assert answer("verify")["num_records"] == len(NUMBERS)
    assert answer("verify", "--title", "Plan")["num_records"] == 2


def test_verify_finds_damage_and_repairs_it(folder: Path) -> None:
    damage(folder, 2)
    found = answer("verify", exit_code=1)
    assert [(one["key"], one["reason"].split(":")[0]) for one in found["damaged"]] == [
        (key(2).hex(), "checksum")
    ]
    assert [document["title"] for document in found["documents"]] == ["Report"]
    assert found["num_deleted"] == 0
    assert "Report" in invoke("verify").stdout
    assert len(record_files(folder)) == len(NUMBERS)
    assert answer("verify", "--repair", exit_code=1)["num_deleted"] == 1
    assert answer("verify")["num_records"] == len(NUMBERS) - 1
    assert held(folder) == {*NUMBERS} - {2}
    incomplete = [d for d in answer("ls")["documents"] if not d["complete"]]
    assert [document["title"] for document in incomplete] == ["Report"]


def test_verify_tells_a_lost_file(folder: Path) -> None:
    before = {*record_files(folder)}
    with closing(DiskTier(folder, CAPACITY_BYTES)) as tier:
        (row,) = [row for row in tier.segments() if row.key == PROMPT]
    (folder / row.filename).unlink()
    assert len(before) == len(record_files(folder)) + 1
    (lost,) = answer("verify", exit_code=1)["damaged"]
    assert lost == {"key": PROMPT.hex(), "reason": "missing: no such file"}


# ----------------------------------------------------------------------- pin and evict


def test_pins_are_durable_and_keep_a_document(folder: Path) -> None:
    assert answer("pin", "--title", "plan") == {"num_documents": 1, "num_pinned": 1}
    assert answer("pin", "--title", "plan") == {"num_documents": 1, "num_pinned": 0}
    kept = answer("evict", "--all", "--yes")
    assert [document["title"] for document in kept["kept_pinned"]] == ["Plan"]
    assert titles(folder) == {"Plan"}
    assert held(folder) == {1, 5}
    with pytest.raises(ConfigError, match="unpin"):
        invoke("evict", PLAN.hex())
    assert answer("unpin", "--all") == {"num_documents": 1, "num_unpinned": 1}
    answer("evict", PLAN.hex())
    assert held(folder) == set()


def test_evict_leaves_what_others_share(folder: Path) -> None:
    sizes = sum(path.stat().st_size for path in record_files(folder))
    planned = answer("evict", "--title", "Report", "--dry-run")
    assert planned["dry_run"]
    assert held(folder) == {*NUMBERS}
    done = answer("evict", "--title", "Report")
    assert held(folder) == {1, 5, 7}
    assert done["freed_bytes"] == planned["freed_bytes"]
    assert sizes - done["freed_bytes"] == sum(
        path.stat().st_size for path in record_files(folder)
    )


@pytest.mark.parametrize("command", ["pin", "unpin", "evict"])
def test_nothing_selected_is_not_everything(folder: Path, command: str) -> None:
    with pytest.raises(ConfigError, match="say which documents"):
        invoke(command)
    assert held(folder) == {*NUMBERS}


@pytest.mark.parametrize("command", ["pin", "unpin", "evict", "verify", "ls"])
@pytest.mark.parametrize(
    "option", ["--title", "--namespace", "--model", "--older-than", "--store"]
)
def test_an_unset_variable_is_not_everything(
    folder: Path, command: str, option: str
) -> None:
    with pytest.raises(ConfigError, match=f"{option} is empty: .* leave it out"):
        invoke(command, option, "")
    assert held(folder) == {*NUMBERS}


def test_an_empty_name_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="DOCUMENT is empty"):
        invoke("evict", "", "--all", "--yes")
    assert held(folder) == {*NUMBERS}


@pytest.mark.parametrize("model", ["XYZ", FINGERPRINT.hex()[:3], "00 0"])
def test_what_is_no_fingerprint_names_no_model(folder: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=f"'{model}' names no model"):
        invoke("evict", "--model", model)
    answer("evict", "--model", FINGERPRINT.hex()[:4])
    assert held(folder) == set()


def test_an_ambiguous_name_changes_nothing(folder: Path) -> None:
    with pytest.raises(ConfigError, match="3 documents begin with '0000'") as raised:
        invoke("evict", "0000")
    assert "'Report'" in str(raised.value)
    assert held(folder) == {*NUMBERS}


@pytest.mark.parametrize(
    "arguments", [["--all"], ["--older-than", "0s"], ["--title", "*"]]
)
def test_evicting_everything_from_a_script_needs_yes(
    folder: Path, arguments: list[str]
) -> None:
    with pytest.raises(ConfigError, match="--yes"):
        invoke("evict", *arguments)
    assert held(folder) == {*NUMBERS}
    answer("evict", *arguments, "--yes")
    assert held(folder) == set()


@pytest.mark.parametrize(("reply", "left"), [("n", {*NUMBERS}), ("y", set())])
def test_evict_all_asks_on_a_terminal(folder: Path, reply: str, left: set[int]) -> None:
    terminal, slave = pty.openpty()
    with open(terminal, "w", closefd=True) as keyboard:
        keyboard.write(reply + "\n")
        keyboard.flush()
        done = subprocess.run(
            [sys.executable, "-m", "daric_rag.cli", "store", "evict", "--all"],
            check=False,
            stdin=slave,
            capture_output=True,
            text=True,
        )
    os.close(slave)
    assert "Delete all 3 documents" in done.stderr
    assert held(folder) == left


# ---------------------------------------------------------------------------------- gc


def test_gc_gives_back_orphans(folder: Path) -> None:
    orphan = folder / "ab" / "cd" / f"{'0' * 28}.val"
    orphan.parent.mkdir(parents=True, exist_ok=True)
    orphan.write_bytes(bytes(100))
    planned = answer("gc", "--dry-run")
    assert (planned["orphans"], planned["nbytes"]) == (1, 100)
    assert orphan.exists()
    assert "100 B freed" in invoke("gc").stdout
    assert not orphan.exists()
    assert answer("gc")["nbytes"] == 0
    assert held(folder) == {*NUMBERS}
