"""The job: what reaches the engine, what is written down, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from daric_rag.engine import DocumentOutcome
from daric_rag.errors import ConfigError, EngineError
from daric_rag.prewarm import (
    Entry,
    JobOptions,
    JobReport,
    Manifest,
    PrewarmJob,
    Shard,
    SourceItem,
    Totals,
    text_hash,
)
from daric_rag.prewarm.seen import SeenDocuments
from daric_rag.prompt import PromptBuilder
from daric_rag.storage import StoreStats, TierStats
from tests.prewarm.engines import FolderEngine

TEXTS = [f"document {number} of some words" for number in range(20)]


@pytest.fixture
def engine(tmp_path: Path) -> FolderEngine:
    return FolderEngine(tmp_path / "store")


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return tmp_path / "m.jsonl"


def run(engine: Any, source: Any, manifest: Path | None = None, **more: Any) -> Any:
    options = JobOptions(**{"batch_tokens": 30, "commit_interval_s": 0, **more})
    return PrewarmJob(engine, source, manifest=manifest, options=options).run()


def entries(manifest: Path) -> list[Entry]:
    return list(Manifest(manifest).entries())


def test_every_document_is_stored_and_written_down(
    engine: FolderEngine, manifest: Path
) -> None:
    report = run(engine, TEXTS, manifest)
    assert engine.texts == sorted(TEXTS)
    assert report == JobReport(replace(Totals(), computed=20, computed_tokens=100))
    assert len(engine.batches[0]) == 1
    assert max(map(len, engine.batches)) > 3
    written = entries(manifest)
    assert [entry.id for entry in written] == [f"item {n}" for n in range(20)]
    assert {entry.status for entry in written} == {"computed"}
    assert {entry.num_tokens for entry in written} == {5}
    assert all(entry.seconds > 0 and entry.time > 0 for entry in written)
    assert len({entry.document for entry in written}) == 20


def test_another_run_does_nothing(engine: FolderEngine, manifest: Path) -> None:
    run(engine, TEXTS, manifest)
    engine.batches.clear()
    before = manifest.read_bytes()
    assert run(engine, TEXTS, manifest).totals == replace(Totals(), known=20)
    assert engine.batches == []
    assert manifest.read_bytes() == before
    again = run(engine, TEXTS, manifest, again=True).totals
    assert (again.hit, again.computed) == (20, 0)


def test_equal_documents_are_computed_once(engine: FolderEngine) -> None:
    totals = run(engine, [*TEXTS, *TEXTS[:5]]).totals
    assert (totals.computed, totals.repeated) == (20, 5)
    assert sum(map(len, engine.batches)) == 20


def test_bad_documents_stop_nothing_and_are_tried_again(
    engine: FolderEngine, manifest: Path
) -> None:
    bad = ["refuse this", " ", object(), SourceItem("x.pdf", error="is no PDF")]
    report = run(engine, [TEXTS[0], *bad, TEXTS[1]], manifest)
    assert (report.totals.computed, report.totals.failed) == (2, 3)
    assert report.totals.skipped == 1
    reasons = {entry.id: entry.error for entry in entries(manifest)}
    assert reasons["item 1"] == "the document is too long"
    assert reasons["item 2"] == "the document is empty"
    assert "without text" in reasons["item 3"]
    assert reasons["x.pdf"] == "is no PDF"
    engine.batches.clear()
    before = manifest.read_bytes()
    report = run(engine, [TEXTS[0], *bad], manifest)
    assert engine.batches == [["refuse this"]]
    # It is counted and told again, and the manifest says so already.
    assert (report.totals.failed, report.totals.skipped) == (3, 1)
    assert manifest.read_bytes() == before
    bad[2] = {"text": "refuse this, too", "id": "item 3"}
    run(engine, [TEXTS[0], *bad], manifest)
    assert [entry.error for entry in entries(manifest)[-1:]] == [reasons["item 1"]]


def test_a_text_that_was_lost_under_another_name_is_written_down(
    manifest: Path,
) -> None:
    lost = Entry("a", "failed", "0" * 32, error="lost")
    with SeenDocuments() as seen:
        seen.load([lost])
        assert seen.is_told(lost)
        assert not seen.is_told(replace(lost, error="too long"))
        assert not seen.is_told(replace(lost, id="b"))
        seen.load([Entry("b", "computed", "0" * 32, "ab")])
        # Else the manifest would go on calling it stored.
        assert not seen.is_told(lost)
        seen.load([Entry("a", "computed", "1" * 32, "cd")])
        assert not seen.is_told(lost)


def test_documents_are_written_as_prompts_hold_them(engine: FolderEngine) -> None:
    builder = PromptBuilder(system="Be brief.", document_template="{title}\n{text}")
    documents = [{"title": "T", "text": text} for text in TEXTS[:2]]
    job = PrewarmJob(engine, documents, builder=builder)
    job.run()
    assert engine.texts == sorted(builder.document_texts(documents))
    same = PrewarmJob(
        engine, [], builder=PromptBuilder(document_template="{title}\n{text}")
    )
    assert job.template == same.template == job.header["template"]
    assert job.template != PrewarmJob(engine, []).template


def test_shards_share_a_corpus(engine: FolderEngine, tmp_path: Path) -> None:
    source = [*TEXTS, *TEXTS]
    totals = [
        run(engine, source, tmp_path / f"{i}.jsonl", shard=Shard(i, 3)).totals
        for i in (1, 2, 3)
    ]
    assert sum(one.computed for one in totals) == len(TEXTS)
    assert sum(one.hit for one in totals) == 0
    assert all(one.computed + one.repeated + one.others == 40 for one in totals)
    assert engine.texts == sorted(TEXTS)


def test_nothing_is_written_down_before_the_store_is_flushed(
    engine: FolderEngine, manifest: Path
) -> None:
    seen: list[int] = []
    engine.flush = lambda: seen.append(len(entries(manifest)))  # type: ignore[method-assign]
    run(engine, TEXTS, manifest)
    assert seen[0] == 0
    assert len(seen) > 1
    assert seen == sorted(seen)
    assert seen[-1] < len(TEXTS) == len(entries(manifest))


def test_a_batch_is_computed_while_another_is_settled(tmp_path: Path) -> None:
    """The second batch has to start before the first one may end."""

    class Waiting(FolderEngine):
        started = threading.Barrier(2, timeout=30)

        def prewarm_each(self, documents: Sequence[Any]) -> list[DocumentOutcome]:
            self.started.wait()
            return super().prewarm_each(documents)

    engine = Waiting(tmp_path / "store")
    report = run(engine, TEXTS[:4], batch_documents=1)
    assert report.totals.computed == 4


def test_no_more_is_read_than_is_under_way(engine: FolderEngine) -> None:
    """A source of a million documents must not pile up."""
    most = 0

    def source() -> Iterator[str]:
        nonlocal most
        for number in range(300):
            done = sum(map(len, engine.batches))
            most = max(most, number - done)
            yield f"document {number} of some words"

    run(engine, source())
    assert most < 30


class ForgetfulEngine:
    """Stores nothing and is fast."""

    def prewarm_each(self, documents: Sequence[Any]) -> list[DocumentOutcome]:
        return [DocumentOutcome(bytes(32), 5, 5) for _ in documents]


def test_no_more_is_kept_than_is_told(manifest: Path) -> None:
    """However fast the engine is, and however seldom the store is flushed."""
    most = num_told = 0

    def source() -> Iterator[str]:
        nonlocal most
        for number in range(9000):
            most = max(most, number - num_told)
            yield f"document {number}"

    def on_entry(entry: Entry, totals: Totals) -> None:
        nonlocal num_told
        num_told += 1

    options = JobOptions(commit_interval_s=1000)
    PrewarmJob(
        ForgetfulEngine(),
        source(),
        manifest=manifest,
        options=options,
        on_entry=on_entry,
    ).run()
    assert num_told == 9000
    assert most < 3000


def test_stopping_finishes_what_runs(engine: FolderEngine, manifest: Path) -> None:
    job: PrewarmJob

    def source() -> Iterator[str]:
        for number, text in enumerate(TEXTS):
            if number == 12:
                job.stop()
            yield text

    options = JobOptions(batch_tokens=30)
    job = PrewarmJob(engine, source(), manifest=manifest, options=options)
    report = job.run()
    assert report.stopped == "stopped"
    assert 1 <= report.totals.computed < len(TEXTS)
    assert len(entries(manifest)) == report.totals.computed == len(engine.texts)
    rest = run(engine, TEXTS, manifest).totals
    assert (rest.known, rest.hit) == (report.totals.computed, 0)
    assert engine.texts == sorted(TEXTS)


def test_an_engine_that_fails_loses_nothing_that_was_done(
    tmp_path: Path, manifest: Path
) -> None:
    class Failing(FolderEngine):
        def prewarm_each(self, documents: Sequence[Any]) -> list[DocumentOutcome]:
            if len(self.batches) == 3:
                raise EngineError("out of memory")
            return super().prewarm_each(documents)

    engine = Failing(tmp_path / "store")
    with pytest.raises(EngineError, match="out of memory"):
        run(engine, TEXTS, manifest, commit_interval_s=1000)
    done = entries(manifest)
    assert len(done) == len(engine.texts) > 0


def test_a_source_that_fails_loses_nothing_that_was_read(
    engine: FolderEngine, manifest: Path
) -> None:
    def source() -> Iterator[str]:
        yield from TEXTS[:15]
        raise RuntimeError("the loader broke")

    with pytest.raises(RuntimeError, match="the loader broke"):
        run(engine, source(), manifest, commit_interval_s=1000)
    assert len(entries(manifest)) == len(engine.texts) > 5


def test_bytes_count_once_a_document_is_settled(
    engine: FolderEngine, manifest: Path
) -> None:
    items = [
        SourceItem(text, {"text": text}, source_bytes=10)
        for text in [*TEXTS[:6], " ", TEXTS[0]]
    ]
    run(engine, items[:2], manifest)
    seen = []

    def note(entry: Entry, totals: Totals) -> None:
        seen.append((totals.source_bytes, totals.known_bytes, totals.engine_s))

    options = JobOptions(batch_tokens=5, commit_interval_s=0)
    job = PrewarmJob(engine, items, manifest=manifest, options=options, on_entry=note)
    totals = job.run().totals
    assert (totals.source_bytes, totals.known_bytes) == (80, 20)
    assert (totals.engine_bytes, totals.waiting_bytes) == (40, 0)
    assert (totals.known, totals.computed) == (2, 4)
    # What was read and is under way is not among them.
    assert seen[0][:2] == (30, 20)
    assert seen[0][2] > 0
    assert seen == sorted(seen)


def test_callbacks_hear_of_every_document(engine: FolderEngine) -> None:
    heard: list[tuple[str, int]] = []
    PrewarmJob(
        engine,
        TEXTS,
        on_entry=lambda entry, totals: heard.append((entry.id, totals.computed)),
    ).run()
    assert heard == [(f"item {n}", n + 1) for n in range(20)]


# -------------------------------------------------------------------------- the store


@dataclass
class Disk:
    """A store of 10 bytes per token that evicts when it is full."""

    engine: FolderEngine
    capacity_bytes: int
    lost: int = 0
    others_bytes: int = 0

    def stats(self) -> StoreStats:
        words = sum(len(text.split()) for text in self.engine.texts)
        nbytes = 10 * words + self.others_bytes
        tier = TierStats(0, 0, 0, 0, self.lost, 0, nbytes, self.capacity_bytes)
        tier = replace(tier, written_bytes=10 * words)
        return StoreStats(tier, tier, 0, 0, 0, 0, 0, False)


def with_disk(engine: FolderEngine, capacity_bytes: int) -> Disk:
    disk = Disk(engine, capacity_bytes)
    engine.store_stats = disk.stats  # type: ignore[attr-defined]
    return disk


@pytest.mark.parametrize(
    ("capacity", "budget", "limit"),
    [(600, None, 600), (10_000, 450, 450), (300, 9_000, 300), (10_000, None, 10_000)],
)
def test_a_job_stops_before_it_evicts(
    engine: FolderEngine, manifest: Path, capacity: int, budget: Any, limit: int
) -> None:
    disk = with_disk(engine, capacity)
    report = run(engine, TEXTS, manifest, budget_bytes=budget)
    held = disk.stats().disk
    assert held is not None
    assert held.nbytes <= limit
    if limit == 10_000:
        assert (report.stopped, held.nbytes) == ("", 1000)
        assert {entry.nbytes for entry in entries(manifest)} == {50}
    else:
        assert report.stopped == "budget"
        # No more than a batch is missing.
        assert held.nbytes > limit - 350
        more = run(engine, TEXTS, manifest, budget_bytes=budget)
        assert more.stopped == "budget"


def test_what_others_write_meanwhile_is_not_ones_own(
    engine: FolderEngine, manifest: Path
) -> None:
    disk = with_disk(engine, 10_000)
    engine.on_write = lambda: setattr(disk, "others_bytes", disk.others_bytes + 77)
    report = run(engine, TEXTS, manifest)
    assert report.totals.nbytes == 10 * report.totals.computed_tokens
    assert {entry.nbytes for entry in entries(manifest)} == {50}


def test_a_store_that_takes_nothing_stops_the_job(
    engine: FolderEngine, manifest: Path
) -> None:
    disk = with_disk(engine, 10_000)
    engine.on_write = lambda: setattr(disk, "lost", disk.lost + 1)
    report = run(engine, [*TEXTS, *(f"{t} more" for t in TEXTS)], manifest)
    assert report.stopped == "store"
    assert report.totals.computed == 0
    assert 0 < report.totals.failed == len(engine.texts) < 40
    # It may be mended: all is tried again, and the engine finds what was kept.
    engine.on_write = lambda: None
    assert run(engine, TEXTS, manifest).stopped == ""


def test_what_the_store_lost_is_not_called_done(
    engine: FolderEngine, manifest: Path
) -> None:
    disk = with_disk(engine, 10_000)
    engine.on_write = lambda: setattr(disk, "lost", 1)
    report = run(engine, TEXTS[:1], manifest)
    assert report.totals.failed == 1
    (entry,) = entries(manifest)
    assert "daric store stats" in entry.error
    assert run(engine, TEXTS[:1], manifest).totals.hit == 1


def test_a_loss_may_be_of_what_is_under_way(
    engine: FolderEngine, manifest: Path
) -> None:
    """While the second document is written down, two more are being stored."""
    disk = with_disk(engine, 10_000)
    num_flushes = 0

    def flush() -> None:
        nonlocal num_flushes
        num_flushes += 1
        disk.lost = int(num_flushes >= 2)

    engine.flush = flush  # type: ignore[method-assign]
    run(engine, TEXTS[:6], manifest, batch_documents=1)
    statuses = [entry.status for entry in entries(manifest)]
    assert statuses == ["computed", *["failed"] * 3, "computed", "computed"]


def test_the_store_is_not_asked_before_every_batch(engine: FolderEngine) -> None:
    """It answers between two steps only."""
    disk, num_looks = with_disk(engine, 10_000), 0

    def stats() -> StoreStats:
        nonlocal num_looks
        num_looks += 1
        return disk.stats()

    engine.store_stats = stats  # type: ignore[attr-defined]
    run(engine, TEXTS, batch_documents=1, commit_interval_s=1000)
    # At first, when it starts, after the first document, and at the end.
    assert num_looks == 4


def test_a_budget_needs_a_store_that_can_be_seen(engine: FolderEngine) -> None:
    with pytest.raises(ConfigError, match="--disk-bytes"):
        run(engine, TEXTS, budget_bytes=1)


# ---------------------------------------------------------------------------- refresh


def synced(engine: Any, source: Any, manifest: Path) -> tuple[JobReport, list[str]]:
    gone: list[str] = []
    options = JobOptions(commit_interval_s=0)
    job = PrewarmJob(engine, source, manifest=manifest, options=options)
    job.on_vanished = lambda entries: gone.extend(entry.id for entry in entries)
    return job.run(), gone


def test_what_vanished_is_given_up_once(engine: FolderEngine, manifest: Path) -> None:
    run(engine, TEXTS, manifest)
    report, gone = synced(engine, [*TEXTS[:18], "new words"], manifest)
    assert gone == ["item 18", "item 19"]
    assert (report.totals.removed, report.totals.computed) == (2, 1)
    assert synced(engine, [*TEXTS[:18], "new words"], manifest)[1] == []
    # It is new again when it comes back.
    assert run(engine, TEXTS, manifest).totals.known == 18


def test_a_changed_document_takes_the_place_of_the_old_one(
    engine: FolderEngine, manifest: Path
) -> None:
    old = [{"id": "a", "text": "old"}, {"id": "b", "text": "other"}]
    run(engine, old, manifest)
    report, gone = synced(engine, [{"id": "a", "text": "new"}, old[1]], manifest)
    assert gone == ["a"]
    assert (report.totals.computed, report.totals.known) == (1, 1)


def test_what_vanished_is_given_up_where_the_store_is_asked_again(
    engine: FolderEngine, manifest: Path
) -> None:
    run(engine, TEXTS, manifest)
    gone: list[str] = []
    job = PrewarmJob(
        engine, TEXTS[:18], manifest=manifest, options=JobOptions(again=True)
    )
    job.on_vanished = lambda entries: gone.extend(entry.id for entry in entries)
    assert job.run().totals.hit == 18
    assert gone == ["item 18", "item 19"]


def test_a_job_can_run_twice(engine: FolderEngine, manifest: Path) -> None:
    with_disk(engine, 10_000)
    job = PrewarmJob(engine, TEXTS, manifest=manifest)
    assert job.run().totals.computed == 20
    assert job.run().totals.known == 20


def test_what_cannot_be_read_now_has_not_vanished(
    engine: FolderEngine, manifest: Path
) -> None:
    run(engine, [SourceItem("a", "A."), SourceItem("b", "B.")], manifest)
    source = [SourceItem("a", "A."), SourceItem("b", error="cannot be read")]
    assert synced(engine, source, manifest)[1] == []


def test_what_is_empty_now_loses_nothing(engine: FolderEngine, manifest: Path) -> None:
    class Source:
        """The last documents lie where nothing is found in the end."""

        def __init__(self, *indices: int) -> None:
            self.indices = indices

        def __iter__(self) -> Iterator[SourceItem]:
            for index in self.indices:
                place = f"/{'near' if index < 2 else 'far'}/{index}"
                yield SourceItem(str(index), {"text": TEXTS[index]}, place=place)

        def emptied(self, place: str) -> str:
            return "/far" if place.startswith("/far") else ""

    given_up: list[str] = []

    def sync(*indices: int) -> JobReport:
        job = PrewarmJob(engine, Source(*indices), manifest=manifest)
        job.on_vanished = lambda entries: given_up.extend(e.id for e in entries)
        return job.run()

    sync(0, 1, 2, 3)
    report = sync(0)
    assert given_up == ["1"]
    assert (report.totals.removed, report.totals.failed) == (1, 1)
    *_, told, removed = entries(manifest)
    assert (told.id, told.status, removed.id) == ("/far (empty)", "failed", "1")
    assert "2 documents that were in it are kept" in told.error
    assert sync(0, 2, 3).totals.known == 3


def test_documents_are_followed_to_where_they_are(
    engine: FolderEngine, manifest: Path
) -> None:
    def at(place: str) -> list[SourceItem]:
        return [
            SourceItem(f"{place}/x", {"text": TEXTS[0]}, place=f"{place}/x"),
            SourceItem("b", {"text": TEXTS[1]}, place="/b"),
        ]

    run(engine, at("/old"), manifest, lifetime_s=100)
    first = entries(manifest)
    for _ in range(2):
        assert run(engine, at("/new"), manifest).totals.known == 2
    (moved,) = entries(manifest)[2:]
    assert (moved.id, moved.place, moved.status) == ("/new/x", "/new/x", "hit")
    # It is the same document, and has the same time.
    same = ("hash", "document", "expires")
    assert [getattr(moved, n) for n in same] == [getattr(first[0], n) for n in same]


def test_a_shard_that_has_nothing_left_is_no_empty_source(
    engine: FolderEngine, manifest: Path
) -> None:
    shard = Shard.parse("1/2")
    mine = [text for text in TEXTS if shard.holds(text_hash(text))]
    others = [text for text in TEXTS if text not in mine]
    run(engine, TEXTS, manifest, shard=shard)
    given_up: list[Entry] = []
    options = JobOptions(shard=shard)
    job = PrewarmJob(engine, others, manifest=manifest, options=options)
    job.on_vanished = given_up.extend
    assert job.run().stopped == ""
    assert len(given_up) == len(mine) > 0


def test_an_empty_source_does_not_empty_the_store(
    engine: FolderEngine, manifest: Path
) -> None:
    run(engine, TEXTS, manifest)
    report, gone = synced(engine, [], manifest)
    assert (report.stopped, gone) == ("empty", [])
    assert run(engine, TEXTS, manifest).totals.known == 20


def test_a_job_that_was_stopped_gives_nothing_up(
    engine: FolderEngine, manifest: Path
) -> None:
    run(engine, TEXTS, manifest)
    job = PrewarmJob(engine, TEXTS[:3], manifest=manifest)
    job.on_vanished = lambda entries: pytest.fail("gave up documents")
    job.stop()
    assert job.run().stopped == "stopped"


def test_nothing_is_given_up_where_documents_may_be_hidden(
    engine: FolderEngine, manifest: Path
) -> None:
    run(engine, TEXTS, manifest)
    hidden = SourceItem("folder", error="cannot be read", hides_others=True)
    source: list[Any] = [*TEXTS[:3], hidden]
    job = PrewarmJob(engine, source, manifest=manifest)
    gone: list[Entry] = []
    job.on_vanished = gone.extend
    assert job.run().stopped == "unreadable"
    assert gone == []
    # The next run may see everything.
    del source[-1]
    assert job.run().stopped == ""
    assert len(gone) == 17


def test_vanished_documents_are_written_down_before_they_go(
    engine: FolderEngine, manifest: Path
) -> None:
    run(engine, TEXTS, manifest)
    job = PrewarmJob(engine, TEXTS[:18], manifest=manifest)
    written: list[str] = []
    job.on_vanished = lambda _: written.extend(e.status for e in entries(manifest))
    job.run()
    assert written[-2:] == ["removed"] * 2


def test_every_entry_has_its_time(engine: FolderEngine, manifest: Path) -> None:
    run(engine, [TEXTS[0], TEXTS[1]], manifest)
    synced(engine, [TEXTS[0], " ", SourceItem("x", error="cannot be read")], manifest)
    statuses = {entry.status for entry in entries(manifest)}
    assert statuses == {"computed", "skipped", "failed", "removed"}
    assert all(entry.time > 0 for entry in entries(manifest))


def test_documents_of_other_shards_have_not_vanished(
    engine: FolderEngine, manifest: Path
) -> None:
    run(engine, TEXTS, manifest)
    job = PrewarmJob(
        engine, TEXTS[:18], manifest=manifest, options=JobOptions(shard=Shard(1, 2))
    )
    gone: list[str] = []
    job.on_vanished = lambda found: gone.extend(entry.id for entry in found)
    assert job.run().totals.others > 0
    assert gone == ["item 18", "item 19"]


def test_vanished_documents_make_room(engine: FolderEngine, manifest: Path) -> None:
    run(engine, TEXTS, manifest)
    with_disk(engine, 10_000)
    source = ["quite new words", *TEXTS[:18]]
    job = PrewarmJob(
        engine, source, manifest=manifest, options=JobOptions(budget_bytes=1)
    )
    gone: list[str] = []
    job.on_vanished = lambda found: gone.extend(entry.id for entry in found)
    report = job.run()
    assert report.stopped == "budget"
    assert report.totals.computed == 0
    assert gone == ["item 18", "item 19"]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_tokens": 0},
        {"max_in_flight": 0},
        {"budget_bytes": 0},
        {"lifetime_s": -1},
        {"commit_interval_s": -1},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        JobOptions(**options)
