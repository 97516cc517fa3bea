"""On a real store: audits, vanished documents, pins, lifetimes, templates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from daric_rag.errors import ConfigError
from daric_rag.prewarm import JobOptions, Manifest, PrewarmJob, refresh
from daric_rag.prewarm.audit import audit
from daric_rag.prewarm.manifest_writer import ManifestWriter
from daric_rag.prewarm.options import engine_identity
from daric_rag.prewarm.refresh import expire, give_up, pin_all
from daric_rag.prewarm.templates import FILE_NAME, note_template, other_templates
from daric_rag.storage import Record, RecordHeader, store_name
from daric_rag.storage.documents import DocumentTree
from daric_rag.storage.format import SegmentIdentity
from tests.prewarm.engines import DiskEngine
from tests.storage.records import OTHER_FINGERPRINT, ROOT, record_files

TEXTS = [f"document {number} of some words" for number in range(6)]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[DiskEngine]:
    with closing(DiskEngine(tmp_path / "store")) as engine:
        yield engine


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return Manifest(tmp_path / "m.jsonl")


def run(engine: DiskEngine, manifest: Manifest, texts: Any, **options: Any) -> Any:
    job = PrewarmJob(
        engine,
        texts,
        manifest=manifest.path,
        options=JobOptions(commit_interval_s=0, **options),
    )
    return job, job.run()


def num_documents(engine: DiskEngine) -> int:
    return len(DocumentTree(engine.disk.segments()).documents)


def test_what_a_job_did_passes_its_audit(
    engine: DiskEngine, manifest: Manifest
) -> None:
    run(engine, manifest, TEXTS)
    found = audit(manifest, engine.disk)
    assert found.is_good
    assert (found.num_documents, found.records.num_records) == (6, 12)


@pytest.mark.parametrize("loss", ["damaged", "cut", "deleted", "evicted"])
def test_an_audit_finds_what_is_not_whole(
    engine: DiskEngine, manifest: Manifest, loss: str
) -> None:
    run(engine, manifest, TEXTS)
    file = record_files(engine.disk.directory)[0]
    if loss == "evicted":
        row = engine.disk.segments()[0]
        engine.disk.evict([row.key])
    elif loss == "deleted":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + (b"" if loss == "cut" else b"\x01"))
    found = audit(manifest, engine.disk)
    assert not found.is_good
    bad = found.missing if loss == "evicted" else found.damaged
    assert [entry.id for entry in bad] == [entry.id for entry in bad[:1]]
    other = found.damaged if loss == "evicted" else found.missing
    assert other == []


def test_an_audit_is_of_all_tenants_and_one_model(
    engine: DiskEngine, manifest: Manifest
) -> None:
    run(engine, manifest, TEXTS[:1], identity={"namespace": "other"})
    assert len(audit(manifest, engine.disk).missing) == 1
    run(engine, manifest, TEXTS[:2], identity={"fingerprints": ["00" * 32]})
    assert len(audit(manifest, engine.disk).missing) == 2
    run(engine, manifest, TEXTS[:3])
    found = audit(manifest, engine.disk)
    # This engine has no tenants: the other one's document is not there.
    assert (found.num_documents, len(found.missing), len(found.damaged)) == (4, 1, 0)


def test_nothing_is_written_off_that_is_in_another_store(
    engine: DiskEngine, manifest: Manifest, tmp_path: Path
) -> None:
    store = {"store": str(engine.disk.directory)}
    run(engine, manifest, TEXTS[:2], lifetime_s=1, identity=store)
    before = manifest.path.read_bytes()
    with (
        closing(DiskEngine(tmp_path / "other")) as other,
        pytest.raises(ConfigError, match="name that one with --store"),
    ):
        expire(other.disk, manifest, now=1e12)
    assert manifest.path.read_bytes() == before
    assert expire(engine.disk, manifest, now=1e12)[0] == 2


def test_expiry_leaves_audits_what_they_are_of(
    engine: DiskEngine, manifest: Manifest
) -> None:
    older = {"fingerprints": ["00" * 32]}
    run(engine, manifest, TEXTS[:1], lifetime_s=1, identity=older)
    run(engine, manifest, TEXTS[1:3])
    assert expire(engine.disk, manifest, now=1e12)[0] == 1
    assert audit(manifest, engine.disk).num_documents == 2


def test_every_tenants_documents_go_when_their_time_is_over(
    engine: DiskEngine, manifest: Manifest
) -> None:
    run(engine, manifest, TEXTS[:2], lifetime_s=1, identity={"namespace": "other"})
    run(engine, manifest, TEXTS[2:3], lifetime_s=1)
    assert expire(engine.disk, manifest, now=1e12)[0] == 3
    assert expire(engine.disk, manifest, now=1e12)[0] == 0


@pytest.mark.parametrize(("how", "left"), [("evict", 4), ("unpin", 6)])
def test_vanished_documents_are_evicted_or_unpinned(
    engine: DiskEngine, manifest: Manifest, how: Any, left: int
) -> None:
    job, _ = run(engine, manifest, TEXTS)
    assert pin_all(engine.disk, manifest, job.header) == 6
    assert pin_all(engine.disk, manifest, job.header) == 0
    job = PrewarmJob(engine, TEXTS[:4], manifest=manifest.path)
    job.on_vanished = lambda entries: give_up(engine.disk, job.header, entries, how)
    assert job.run().totals.removed == 2
    documents = DocumentTree(engine.disk.segments()).documents
    assert (len(documents), sum(d.pinned for d in documents)) == (left, 4)
    assert audit(manifest, engine.disk).num_documents == 4


def test_documents_go_when_their_time_is_over(
    engine: DiskEngine, manifest: Manifest
) -> None:
    run(engine, manifest, TEXTS[:2], lifetime_s=100)
    run(engine, manifest, TEXTS[2:])
    (end,) = {
        round(entry.expires - entry.time)
        for entry in manifest.entries()
        if entry.expires is not None
    }
    assert end == 100
    now = min(entry.time for entry in manifest.entries())
    assert expire(engine.disk, manifest, now=now + 50) == (0, 0)
    num, freed = expire(engine.disk, manifest, now=now + 1000)
    assert (num, num_documents(engine)) == (2, 4)
    assert freed > 0
    assert expire(engine.disk, manifest, now=now + 1000) == (0, 0)
    assert run(engine, manifest, TEXTS)[1].totals.computed == 2


def test_what_two_texts_share_stays_with_the_last_one(
    engine: DiskEngine, manifest: Manifest
) -> None:
    run(engine, manifest, TEXTS[:3])
    # Other texts of the same tokens; this engine's tokens are words.
    same = [TEXTS[0], "document  1 of some words"]
    job = PrewarmJob(engine, same, manifest=manifest.path)
    job.on_vanished = lambda entries: give_up(engine.disk, job.header, entries, "evict")
    assert job.run().totals.removed == 1
    assert num_documents(engine) == 2
    assert audit(manifest, engine.disk).is_good


def test_what_two_texts_share_goes_when_both_have_had_their_time(
    engine: DiskEngine, manifest: Manifest
) -> None:
    run(engine, manifest, TEXTS[:1], lifetime_s=100)
    run(engine, manifest, ["document  0 of some words"], lifetime_s=1000)
    now = min(entry.time for entry in manifest.entries())
    assert expire(engine.disk, manifest, now=now + 500) == (0, 0)
    assert audit(manifest, engine.disk).is_good
    assert expire(engine.disk, manifest, now=now + 2000)[0] == 2
    assert num_documents(engine) == 0


def test_expiry_is_written_down_before_documents_go(
    engine: DiskEngine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(engine, manifest, TEXTS[:1], lifetime_s=1)
    written: list[tuple[str, bool]] = []

    def spy(*_: Any) -> int:
        written.extend((e.status, e.time > 0) for e in manifest.entries())
        return 0

    monkeypatch.setattr(refresh, "give_up", spy)
    expire(engine.disk, manifest, now=1e12)
    assert written[1:] == [("removed", True)]


def test_a_store_that_was_emptied_is_found_out(
    engine: DiskEngine, manifest: Manifest
) -> None:
    run(engine, manifest, TEXTS)
    engine.disk.evict([row.key for row in engine.disk.segments()])
    assert run(engine, manifest, TEXTS)[1].totals.known == 6
    assert len(audit(manifest, engine.disk).missing) == 6
    assert run(engine, manifest, TEXTS, again=True)[1].totals.computed == 6
    assert audit(manifest, engine.disk).is_good


def test_a_store_knows_its_templates(engine: DiskEngine) -> None:
    folder = engine.disk.directory
    assert other_templates(folder, "aa") == []
    note_template(folder, "aa", "{text}")
    note_template(folder, "bb", "{title}")
    assert other_templates(folder, "aa") == ["bb"]
    assert other_templates(folder, "cc") == ["aa", "bb"]
    (folder / FILE_NAME).write_text("{broken")
    assert other_templates(folder, "cc") == []
    with closing(DiskEngine(folder)) as again:
        assert again.disk.reclaim().nbytes == 0
    assert (folder / FILE_NAME).exists()


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    note_template(tmp_path, "aa", "{text}")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_done_to_documents_of_a_model_that_nobody_named(
    engine: DiskEngine, manifest: Manifest
) -> None:
    run(engine, manifest, TEXTS[:2], lifetime_s=1)
    header = {**manifest.headers()[-1], "fingerprints": []}
    with ManifestWriter(manifest.path.with_name("server.jsonl"), header) as writer:
        writer.append(list(manifest.entries()))
    of_server = Manifest(writer.path)
    assert audit(of_server, engine.disk).is_good
    # Another model's, of the same tokens.
    rows = engine.disk.segments()
    ends = [row for row in rows if row.side_data]
    for row in ends:
        identity = SegmentIdentity(
            row.key[::-1], ROOT, OTHER_FINGERPRINT, 0, row.side_data
        )
        head = RecordHeader.for_shape(identity, (1, 3, 1, 4), "bfloat16")
        engine.disk.write(Record(head, memoryview(bytes(48)), row.side_data))
    for act in (
        lambda: audit(of_server, engine.disk),
        lambda: expire(engine.disk, of_server, now=1e12),
    ):
        with pytest.raises(ConfigError, match="documents of 2 models"):
            act()
    assert len(engine.disk.segments()) == len(rows) + len(ends)
    assert audit(manifest, engine.disk).is_good


def test_what_could_not_be_synced_is_not_called_done(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with closing(DiskEngine(tmp_path / "unsynced", keeps_pages=False)) as engine:
        monkeypatch.setattr(os, "fdatasync", fail)
        _, report = run(engine, manifest, TEXTS[:2])
        monkeypatch.undo()
        assert (report.totals.computed, report.totals.failed) == (0, 2)
        _, report = run(engine, manifest, TEXTS[:2])
        assert report.totals.computed == 2
        assert engine.num_computed == 4
        assert audit(manifest, engine.disk).is_good


class Engine:
    """Tells where its store is, as embedded ones do."""

    def __init__(self, store: str) -> None:
        self.store_path = store_name(store)


def test_a_manifest_knows_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert engine_identity(Engine("store"))["store"] == str(tmp_path / "store")
    assert engine_identity(Engine("other"))["store"] != str(tmp_path / "store")
    first, second = (engine_identity(Engine(":memory:"))["store"] for _ in range(2))
    assert first.startswith(":memory:")
    assert first != second
