"""``daric prewarm`` on a real store and an engine of a few lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import watchfiles
from typer.testing import CliRunner

from daric_rag import cli, prewarm_run
from daric_rag.errors import ConfigError
from daric_rag.prewarm import Manifest
from daric_rag.prewarm_settings import Settings
from daric_rag.storage import DiskTier
from daric_rag.storage.documents import DocumentTree
from tests.prewarm import engines
from tests.prewarm.engines import DiskEngine
from tests.storage.records import (
    CAPACITY_BYTES,
    OTHER_FINGERPRINT,
    RECORD_BYTES,
    record_files,
)

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five documents; the commands run beside them, and a store is named."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"document {number} of some words")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DARIC_STORE", str(tmp_path / "store"))

    def opened(settings: Settings, store: str | None) -> DiskEngine:
        return DiskEngine(store or settings.store_folder(), settings.config())

    monkeypatch.setattr(prewarm_run, "open_engine", opened)
    return folder


def invoke(*arguments: Any) -> Any:
    result = CliRunner().invoke(cli.app, ["prewarm", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def answer(*arguments: Any, exit_code: int = 0) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def warm(*arguments: Any, exit_code: int = 0) -> dict[str, Any]:
    return answer(*arguments, "--model", "tiny", exit_code=exit_code)


def stored(store: Path = Path("store")) -> list[Any]:
    with closing(DiskTier(store, CAPACITY_BYTES)) as disk:
        return DocumentTree(disk.segments()).documents


def test_a_corpus_is_stored_and_verified(corpus: Path) -> None:
    done = warm(corpus)
    assert (done["computed"], done["computed_tokens"], done["failed"]) == (5, 25, 0)
    assert done["manifest"] == "prewarm.jsonl"
    assert len(stored()) == 5
    assert warm(corpus)["known"] == 5
    verified = answer("verify", "prewarm.jsonl")
    assert (verified["num_documents"], verified["num_records"]) == (5, 10)
    assert "0 missing" in invoke("verify", "prewarm.jsonl").stdout
    header = Manifest("prewarm.jsonl").headers()[0]
    assert header["model"] == "tiny"
    assert header["store"] == str(Path("store").absolute())
    assert header["template"] == done["template"]


def test_verify_tells_what_is_missing(corpus: Path) -> None:
    warm(corpus)
    with closing(DiskTier("store", CAPACITY_BYTES)) as disk:
        disk.evict([stored()[0].key])
    found = answer("verify", "prewarm.jsonl", exit_code=1)
    assert len(found["missing"]) == 1
    assert "missing: " in invoke("verify", "prewarm.jsonl").stdout
    assert warm(corpus, "--again")["computed"] == 1
    record_files(Path("store"))[3].write_bytes(b"rubbish")
    assert len(answer("verify", "prewarm.jsonl", exit_code=1)["damaged"]) == 1


def test_what_is_no_manifest_cannot_be_verified(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="is no manifest"):
        invoke("verify", corpus / "0.txt")


def test_failed_documents_have_an_exit_code_and_a_line(corpus: Path) -> None:
    (corpus / "bad.txt").write_bytes(b"\xff")
    result = invoke("run", corpus, "--model", "tiny")
    assert result.exit_code == 3
    assert "1 failed" in result.stdout
    (line,) = map(json.loads, result.stderr.splitlines())
    assert line["event"] == "failed"
    assert line["id"] == str(corpus / "bad.txt")
    assert "UTF-8" in line["error"]


def test_a_budget_has_an_exit_code(corpus: Path) -> None:
    done = warm(corpus, "--budget", f"{5 * RECORD_BYTES}", exit_code=4)
    assert done["stopped"] == "budget"
    assert 1 <= len(stored()) < 5


def test_a_small_budget_evicts_nothing_of_others(corpus: Path) -> None:
    warm(corpus)
    (corpus / "new.txt").write_text("quite new words")
    assert warm(corpus, "--budget", "100B", exit_code=4)["computed"] == 0
    assert len(stored()) == 5


def test_names_of_files_may_be_anything(corpus: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (corpus / name).write_text("words of an old file system")
    assert warm(corpus)["computed"] == 6
    (corpus / name).unlink()
    assert warm(corpus, "--sync", "evict")["removed"] == 1
    ids = [entry.id for entry in Manifest("prewarm.jsonl").entries()]
    assert ids.count(str(corpus / name)) == 2


def test_shards_have_manifests_of_their_own(corpus: Path) -> None:
    done = [warm(corpus, "--shard", f"{i}/2")["computed"] for i in (1, 2)]
    assert sum(done) == 5
    for i in (1, 2):
        (found,) = Manifest(f"prewarm-{i}-of-2.jsonl").headers()
        assert found["shard"] == f"{i}/2"


def test_a_dry_run_counts_and_stores_nothing(corpus: Path) -> None:
    (corpus / "again.txt").write_text("document 0 of some words")
    (corpus / "empty.txt").touch()
    (corpus / "bad.txt").write_bytes(b"\xff")
    plan = warm(corpus, "--dry-run", exit_code=3)
    assert not Path("store").exists()
    assert not Path("prewarm.jsonl").exists()
    assert (plan["num_documents"], plan["num_tokens"]) == (5, 25)
    assert (plan["num_repeated"], plan["num_empty"], plan["num_refused"]) == (1, 1, 1)
    assert (plan["num_cached"], plan["cached_tokens"]) == (0, 0)
    (corpus / "bad.txt").unlink()
    warm(corpus / "0.txt", corpus / "1.txt")
    nbytes = sum(path.stat().st_size for path in record_files(Path("store")))
    again = warm(corpus, "--dry-run")
    assert (again["num_cached"], again["cached_tokens"]) == (2, 10)
    assert again["nbytes"] == plan["nbytes"] == round(nbytes / 2 * 5)
    assert again["new_bytes"] == round(nbytes / 2 * 3)
    assert again["seconds"] > 0
    assert len(stored()) == 2
    text = invoke(corpus, "--model", "tiny", "--dry-run").stdout
    assert "5 documents, 25 tokens; 2 of them (10 tokens) are stored" in text


def test_a_dry_run_tells_that_there_is_no_room(corpus: Path) -> None:
    result = invoke(corpus, "--model", "tiny", "--dry-run", "--budget", "300")
    assert "would stop before its end" in result.stdout


@pytest.mark.parametrize(("how", "left"), [("evict", 4), ("unpin", 5)])
def test_sync_gives_up_what_vanished(corpus: Path, how: str, left: int) -> None:
    warm(corpus, "--pin")
    assert all(document.pinned for document in stored())
    (corpus / "0.txt").unlink()
    done = warm(corpus, "--sync", how, "--pin")
    assert (done["removed"], done["known"]) == (1, 4)
    assert len(stored()) == left
    assert sum(document.pinned for document in stored()) == 4


def test_sync_does_not_take_a_lost_folder_for_an_empty_corpus(corpus: Path) -> None:
    warm(corpus)
    for path in corpus.iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="no document at all"):
        warm(corpus, "--sync", "evict")
    assert len(stored()) == 5


@pytest.mark.parametrize("is_source", [False, True])
def test_sync_gives_up_nothing_behind_a_broken_link(
    corpus: Path, tmp_path: Path, is_source: bool
) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "wiki.txt").write_text("an article of some words")
    link = (tmp_path if is_source else corpus) / "wiki"
    link.symlink_to(mount, target_is_directory=True)
    sources = [corpus, link] if is_source else [corpus]
    assert warm(*sources)["computed"] == 6
    (mount / "wiki.txt").unlink()
    mount.rmdir()
    if is_source:
        with pytest.raises(ConfigError, match="wiki does not exist"):
            warm(*sources, "--sync", "evict")
    else:
        done = warm(*sources, "--sync", "evict", exit_code=3)
        assert (done["stopped"], done["removed"]) == ("unreadable", 0)
    assert len(stored()) == 6


def test_sync_gives_up_no_other_job_s_documents(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("words of another corpus")
    warm(corpus)
    with pytest.raises(ConfigError, match=r"other sources too.*--manifest"):
        warm(other, "--sync", "evict")
    assert len(stored()) == 5
    # A source may be written otherwise, and others may come to it.
    assert warm("corpus", other, "--sync", "evict")["removed"] == 0
    (other / "a.txt").write_text("other words")
    assert warm(other, Path("corpus"), "--sync", "evict")["removed"] == 1


def test_sync_gives_up_nothing_where_a_record_is_damaged(corpus: Path) -> None:
    lines = [f'{{"id": "{n}", "text": "record {n} of words"}}\n' for n in range(3)]
    (corpus / "c.jsonl").write_text("".join(lines))
    warm(corpus)
    (corpus / "c.jsonl").write_text(lines[0] + lines[1][:20] + "\n" + lines[2])
    done = warm(corpus, "--sync", "evict", exit_code=3)
    assert (done["stopped"], done["removed"]) == ("unreadable", 0)
    assert len(stored()) == 8
    result = invoke(corpus, "--model", "tiny", "--sync", "evict")
    assert "nothing was given up" in result.stdout


@pytest.mark.parametrize("option", ["--pin", "--sync=evict"])
def test_a_server_that_does_not_tell_its_model_may_be_one_of_several(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(DiskEngine, "fingerprints", lambda _: [])
    assert answer(corpus, "--url", "u", option)["computed"] == 5
    monkeypatch.setattr(engines, "FINGERPRINT", OTHER_FINGERPRINT)
    (corpus / "new.txt").write_text("words of another model")
    assert warm(corpus)["computed"] == 1
    for path in corpus.glob("[0-3].txt"):
        path.unlink()
    with pytest.raises(ConfigError, match="documents of 2 models"):
        answer(corpus, "--url", "u", option)
    assert len(stored()) == 6


@pytest.mark.parametrize(("budget", "limit"), [((), 32), (("--budget", "40GiB"), 40)])
def test_the_engine_may_hold_more_than_the_job_fills(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, budget: Any, limit: int
) -> None:
    given: list[Settings] = []

    def opened(settings: Settings, store: str | None) -> DiskEngine:
        given.append(settings)
        return DiskEngine(store or settings.store_folder(), settings.config())

    monkeypatch.setattr(prewarm_run, "open_engine", opened)
    warm(corpus, *budget)
    assert given[0].job_options().budget_bytes == limit << 30
    assert given[0].config().disk_bytes == (limit + 8) << 30


def test_a_watch_outlives_a_folder_that_is_gone_for_a_moment(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changes(*_: Any, **__: Any) -> Iterator[set[int]]:
        yield set()
        away = corpus.rename("away")
        yield {1}
        away.rename(corpus)
        (corpus / "new.txt").write_text("quite new words")
        yield {1}

    monkeypatch.setattr(watchfiles, "watch", changes)
    result = invoke(corpus, "--model", "tiny", "--watch")
    assert "does not exist" in result.stderr
    assert "1 documents computed" in result.stdout
    assert len(stored()) == 6


def test_expire_evicts_what_has_had_its_time(corpus: Path) -> None:
    warm(corpus, "--ttl", "1h")
    assert answer("expire", "prewarm.jsonl")["num_documents"] == 0
    warm(corpus, "--ttl", "0.001s", "--again")
    time.sleep(0.01)
    assert answer("expire", "prewarm.jsonl")["num_documents"] == 5
    assert stored() == []


def test_a_splitter_is_named_and_its_pieces_are_stored(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("own_splitter.py").write_text("def cut(text):\n    return [text[:8], text]\n")
    done = warm(corpus, "--splitter", "own_splitter:cut")
    # What all documents begin with is stored once.
    assert (done["computed"], done["repeated"]) == (6, 4)
    assert len(stored()) == 6
    # Without it, the sources have none of the pieces but the whole texts.
    assert warm(corpus, "--sync", "evict")["known"] == 5
    assert len(stored()) == 5


def test_another_template_is_warned_of(corpus: Path) -> None:
    assert "warning" not in invoke(corpus, "--model", "tiny").stderr
    other = invoke(corpus, "--model", "tiny", "--template", "> {text}")
    (line,) = map(json.loads, other.stderr.splitlines())
    assert line["event"] == "warning"
    assert "warmed with another document template" in line["message"]
    assert len(stored()) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model to run here, or --url"),
        (["--model", "m", "--url", "u"], "--model to run here, or --url"),
        (["--url", "u", "--budget", "1GB"], "--budget is the server's"),
        (["--url", "u", "--vllm", "a=1"], "--vllm is the server's"),
        (["--model", "m", "--store", ":memory:"], "name a folder"),
        (["-", "--model", "m", "--sync", "evict"], "standard input may end"),
        (["--model", "m", "--store", ""], "--store is empty"),
        (["--model", "m", "--shard", "0/2"], "there is no shard"),
        (["--model", "m", "--budget", "x"], "is no size"),
        (["--model", "m", "--ttl", "x"], "is no time"),
        (["--model", "m", "--template", "{x}"], "document_template"),
        (["--model", "m", "--splitter", "x"], "module:object"),
    ],
)
def test_what_does_not_go_together_is_refused(
    corpus: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        invoke(corpus, *arguments)
    assert not Path("prewarm.jsonl").exists()


def test_options_of_vllm_are_json_or_text(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def opened(settings: Settings, store: str | None) -> DiskEngine:
        given.append(settings.vllm_options())
        return DiskEngine(store or settings.store_folder())

    monkeypatch.setattr(prewarm_run, "open_engine", opened)
    warm(corpus, "--vllm", "max-model-len=512", "--vllm", "dtype=float32")
    assert given == [{"max_model_len": 512, "dtype": "float32"}]
    with pytest.raises(ConfigError, match="max_model_len=8192"):
        invoke(corpus, "--model", "tiny", "--vllm", "oops")


def test_standard_input_is_read(corpus: Path) -> None:
    lines = b'{"body": "One.", "key": "a"}\n{"body": "Two.", "key": "b"}\n'
    result = CliRunner().invoke(
        cli.app,
        ["prewarm", "-", "--model=tiny", "--text-field=body", "--id-field=key"],
        input=lines,
    )
    assert result.exit_code == 0, result.output
    assert [entry.id for entry in Manifest("prewarm.jsonl").entries()] == ["a", "b"]


# ---------------------------------------------------------------------- in a process

PROGRAM = """
import sys
from dataclasses import replace
from daric_rag import cli, prewarm_run
from tests.prewarm.engines import DiskEngine

class Led(DiskEngine):
    def prewarm_each(self, documents):
        sys.stderr.write("batch\\n")
        sys.stdin.readline()
        # As engines do, it keeps in memory what others evict on disk.
        outcomes = super().prewarm_each(documents)
        known = self.__dict__.setdefault("known", set())
        for index, outcome in enumerate(outcomes):
            if outcome.document_hash in known:
                self.disk.delete(outcome.document_hash)
                outcomes[index] = replace(outcome, saved_tokens=0)
            known.add(outcome.document_hash)
        return outcomes

def opened(settings, store):
    sys.stderr.write("opened\\n")
    return Led(settings.store_folder())

prewarm_run.open_engine = opened
cli.main()
"""


@pytest.fixture
def start(corpus: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    with ExitStack() as jobs:

        def started(*arguments: Any, program: str = PROGRAM) -> subprocess.Popen[str]:
            job = subprocess.Popen(
                [sys.executable, "-c", program, "prewarm", *map(str, arguments)],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            jobs.enter_context(job)
            jobs.callback(job.kill)
            return job

        yield started


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def next_line(job: Any) -> str:
    """Return what it says next, once its engine is open."""
    line: str = job.stderr.readline()
    return job.stderr.readline() if line == "opened\n" else line


def go_on(job: Any, num_batches: int = 1) -> None:
    job.stdin.write("\n" * num_batches)
    job.stdin.flush()


def test_a_watched_source_that_goes_is_an_error_until_it_is_back(
    corpus: Path, start: Any, tmp_path: Path
) -> None:
    job = start(corpus, "--model", "tiny", "--watch", "--manifest", tmp_path / "m")
    go_on(job, num_batches=100)
    told: list[dict[str, Any]] = []

    def until(event: str) -> dict[str, Any]:
        while not told or told[-1]["event"] != event:
            line = job.stderr.readline()
            assert line
            if line.startswith("{"):
                told.append(json.loads(line))
        return told.pop()

    assert until("run")["computed"] == 5
    corpus.rename(tmp_path / "away")
    assert "does not exist" in until("error")["message"]
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=60)
    # The last run failed, whatever those before did.
    assert job.returncode == 1
    assert "does not exist" in err


def settings_of(*sources: Path, **given: Any) -> Settings:
    unset: dict[str, Any] = dict.fromkeys(Settings.__dataclass_fields__)
    texts = {"template": "{text}", "namespace": "default", "shard": "1/1"}
    flags = {"pin": False, "again": False, "verbose": False, "vllm": ()}
    paths = tuple(map(str, sources))
    return Settings(
        **{**unset, **texts, **flags, "model": "tiny", "sources": paths, **given}
    )


def test_what_a_job_writes_is_no_change(tmp_path: Path) -> None:
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    for folder in (corpus, elsewhere):
        folder.mkdir()
    (corpus / "more").symlink_to(elsewhere)
    other = elsewhere / "prewarm-2-of-8.jsonl"
    other.write_text(json.dumps({"type": "header", "version": 1}) + "\n")
    settings = settings_of(
        corpus, manifest=corpus / "more" / "m.jsonl", store=str(corpus / "more" / "s")
    )
    is_change = settings.change_filter([elsewhere])
    for written in ("m.jsonl", "s/DARIC_STORE_2", "s/ab/cd/ef.val", other.name):
        assert not is_change(str(elsewhere / written)), written
    for changed in (elsewhere / "new.txt", corpus / "a.jsonl", corpus / "gone" / "x"):
        assert is_change(str(changed))
    assert not is_change(str(tmp_path / "other.txt"))


def test_files_that_are_no_documents_are_told(corpus: Path) -> None:
    for name in ("a.png", "b.PNG", "c.docx", "Makefile", ".hidden.png"):
        (corpus / name).touch()
    result = invoke(corpus, "--model", "tiny")
    (line,) = map(json.loads, result.stderr.splitlines())
    assert line["event"] == "ignored"
    assert "2 .png, 1 without, 1 .docx" in line["message"]
    assert len(stored()) == 5


def test_a_full_budget_is_named(corpus: Path) -> None:
    result = invoke(corpus, "--model", "tiny", "--budget", f"{5 * RECORD_BYTES}")
    assert result.exit_code == 4
    assert "would not fit in the budget of 1.4 KiB" in result.stdout


def test_damaged_lines_are_told(corpus: Path) -> None:
    warm(corpus)
    lines = Path("prewarm.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = b"rubbish\n"
    Path("prewarm.jsonl").write_bytes(b"".join(lines))
    done = warm(corpus)
    # The store knows what that line, and those before it, were about.
    assert (done["num_damaged_lines"], done["computed"], done["known"]) == (1, 0, 0)
    assert done["hit"] == 5
    lines[3] = b"more\n"
    Path("prewarm.jsonl").write_bytes(b"".join(lines))
    assert "damaged lines (2)" in invoke(corpus, "--model", "tiny").stdout


SLOW_START = """
import sys, time
from daric_rag import cli, prewarm_run
from tests.prewarm.engines import DiskEngine

def opened(settings, store):
    sys.stderr.write("opening\\n")
    for _ in range(10):
        time.sleep(0.1)
    return DiskEngine(settings.store_folder())

prewarm_run.open_engine = opened
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_batch_ends_in_order(
    corpus: Path, start: Any, number: signal.Signals
) -> None:
    job = start(corpus, "--model", "tiny", "--json", program=SLOW_START)
    assert job.stderr.readline() == "opening\n"
    job.send_signal(number)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 130, err
    assert json.loads(out)["stopped"] == "stopped"


def test_a_job_outlives_whoever_reads_its_log(corpus: Path, start: Any) -> None:
    (corpus / "bad.txt").write_bytes(b"\xff")
    job = start(corpus, "--model", "tiny", "--json", program=SLOW_START)
    assert job.stderr.readline() == "opening\n"
    job.stderr.close()
    assert json.loads(job.stdout.read())["failed"] == 1
    assert job.wait(timeout=60) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_batch(
    corpus: Path, start: Any, number: signal.Signals
) -> None:
    job = start(corpus, "--model", "tiny", "--batch-tokens", 5)
    assert next_line(job) == "batch\n"
    go_on(job)
    assert next_line(job) == "batch\n"
    job.send_signal(number)
    while "interrupt again" not in (line := job.stderr.readline()):
        assert line
    assert json.loads(line)["event"] == "interrupted"
    out, err = job.communicate("\n" * 5, timeout=60)
    assert job.returncode == 130, err
    assert "run the same command again" in out
    done = [entry.id for entry in Manifest("prewarm.jsonl").entries()]
    assert 1 <= len(done) == len(stored()) < 5
    assert warm(corpus)["known"] == len(done)


def test_a_second_signal_stops_at_once_and_the_job_goes_on(
    corpus: Path, start: Any
) -> None:
    job = start(corpus, "--model", "tiny", "--batch-tokens", 5)
    assert next_line(job) == "batch\n"
    job.send_signal(signal.SIGINT)
    while "interrupt again" not in (line := job.stderr.readline()):
        assert line
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=60)
    assert job.returncode == 130
    assert warm(corpus)["failed"] == 0
    assert len(stored()) == 5


def test_a_signal_ends_waiting_for_standard_input(corpus: Path, start: Any) -> None:
    program = PROGRAM.replace("        sys.stdin.readline()\n", "")
    job = start("-", "--model", "tiny", "--batch-tokens", 1, program=program)
    job.stdin.write('{"text": "a few words", "id": "a"}\n')
    job.stdin.flush()
    # It has been computed, and nobody says that this was all.
    assert next_line(job) == "batch\n"
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=60) == 130
    assert "run the same command again" in job.stdout.read()
    (entry,) = Manifest("prewarm.jsonl").entries()
    assert (entry.id, entry.status) == ("a", "computed")


def test_a_watched_folder_is_kept_up_with(
    corpus: Path, start: Any, tmp_path: Path
) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    (corpus / "more").symlink_to(linked)
    manifest = Manifest(corpus / "m.jsonl")
    options = ("--watch", "--sync", "evict", "--manifest", manifest.path)
    job = start(corpus, "--model", "tiny", *options)
    go_on(job, num_batches=100)
    wait_until(lambda: len(list(manifest.entries())) == 5)

    def is_stored(name: str) -> bool:
        entries = [e for e in manifest.entries() if e.is_stored]
        return name in {Path(entry.id).name for entry in entries}

    # A file may be seen before anything is in it, and then once more.
    (linked / "new.txt").write_text("quite new words")
    wait_until(lambda: is_stored("new.txt"))
    later = tmp_path / "later"
    later.mkdir()
    (corpus / "yet more").symlink_to(later)
    (corpus / "0.txt").unlink()
    wait_until(lambda: any(e.status == "removed" for e in manifest.entries()))
    # Links that came meanwhile are followed as well.
    time.sleep(1.5)
    (later / "newer.txt").write_text("newer words")
    wait_until(lambda: is_stored("newer.txt"))
    # One that comes back is stored again, whatever an engine has in memory.
    (corpus / "0.txt").write_text("document 0 of some words")
    wait_until(lambda: len(stored()) == 7)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert job.returncode in (0, 130), err
    assert err.count("opened") == 2
    # Its own manifest is neither a document nor a change.
    assert 4 <= err.count('"event": "run"') <= 10
