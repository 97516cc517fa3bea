"""Pre-warm jobs on engines: full hits afterwards, honest counts, kills.

DARIC_KILLS=20 pytest tests/runtime/test_prewarming.py -k killed
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from daric_rag import ChunkedPrompt, EmbeddedEngine, PromptBuilder
from daric_rag.keys import document_hash
from daric_rag.prewarm import JobOptions, Manifest, PrewarmJob
from daric_rag.prewarm.audit import audit
from daric_rag.storage import DiskTier
from daric_rag.storage.disk import NO_LIMIT
from daric_rag.storage.documents import DocumentTree
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import Harness

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).parents[2]
KIND = "llama-gqa-tied"
BUILDER = PromptBuilder(system="Answer briefly.", document_template="{title}: {text}")
DOCUMENTS = [
    {"title": f"Report {n}", "text": "the ferry leaves at noon. " * (3 + 7 * n % 60)}
    for n in range(40)
]
NUM_KILLS = int(os.environ.get("DARIC_KILLS", "2"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prewarmed")


@pytest.fixture
def harness(harness_of: HarnessPool, folder: Path) -> Harness:
    return harness_of(KIND, store=str(folder / "store"))


@pytest.fixture
def disk(harness: Harness, folder: Path) -> Iterator[DiskTier]:
    with closing(DiskTier(folder / "store", NO_LIMIT)) as tier:
        yield tier


def run(engine: EmbeddedEngine, manifest: Path, **options: Any) -> Any:
    job = PrewarmJob(
        engine,
        [*DOCUMENTS, {"text": "Q7" * 5000}, DOCUMENTS[0]],
        builder=BUILDER,
        manifest=manifest,
        options=JobOptions(batch_tokens=2000, **options),
    )
    return job.run().totals


def test_every_prewarmed_document_is_a_full_hit(
    harness: Harness, disk: DiskTier, folder: Path
) -> None:
    engine, manifest = harness.engine, folder / "m.jsonl"
    totals = run(engine, manifest)
    assert (totals.computed, totals.failed, totals.repeated) == (40, 1, 1)
    lens = [engine.document_layout(p).prompt_len for p in parts()]
    assert totals.computed_tokens == sum(lens)
    nbytes = sum(row.nbytes for row in disk.segments())
    assert totals.nbytes == pytest.approx(nbytes, rel=0.05)
    found = audit(Manifest(manifest), disk)
    assert found.is_good
    assert found.num_documents == 40
    ranks = {row.fingerprint.hex() for row in disk.segments()}
    assert ranks == {*engine.fingerprints()}
    engine.clear_host()
    engine.clear_prefix_cache()
    chance = random.Random(0)
    stored = 0  # of the chunk with the system text, from the first prompt on
    for count in (1, 2, 3, 3):
        built = BUILDER.build(chance.sample(DOCUMENTS, count), "When?")
        reuse = engine.generate(built.prompt, max_tokens=1).reuse
        first, *chunks, _ = engine.layout(built.prompt).chunks
        assert reuse.hit_tokens == stored + sum(c.end - c.start for c in chunks)
        assert reuse.generated_tokens == 0
        stored = first.end


def test_another_run_computes_nothing(harness: Harness, folder: Path) -> None:
    totals = run(harness.engine, folder / "m.jsonl")
    assert (totals.known, totals.computed, totals.hit) == (40, 0, 0)
    harness.engine.clear_prefix_cache()
    totals = run(harness.engine, folder / "m.jsonl", again=True)
    assert (totals.computed, totals.hit) == (0, 40)


def test_outcomes_tell_of_each_document(harness: Harness) -> None:
    engine = harness.engine
    texts = ["Quite new. " * 9, "", "Q7" * 5000, "Quite new. " * 9]
    new, empty, too_long, same = engine.prewarm_each(texts)
    layout = engine.document_layout(texts[0])
    assert new.document_hash == document_hash(layout.token_ids) == same.document_hash
    assert new.num_tokens == same.num_tokens == layout.prompt_len
    assert new.error == same.error == ""
    assert new.saved_tokens + same.saved_tokens == layout.prompt_len
    assert "empty" in empty.error
    assert "max_model_len" in too_long.error
    (hit,) = engine.prewarm_each(texts[:1])
    assert (hit.saved_tokens, hit.error) == (0, "")


def test_what_was_evicted_is_stored_again_whatever_the_prefix_cache_has(
    harness: Harness, disk: DiskTier
) -> None:
    engine, text = harness.engine, "Soon to be evicted. " * 30
    (new,) = engine.prewarm_each([text])
    engine.flush()
    rows = [
        document.key
        for document in DocumentTree(disk.segments()).documents
        if document.document_hash == new.document_hash
    ]
    assert len(rows) == 1
    disk.evict(rows)
    engine.clear_host()
    (again,) = engine.prewarm_each([text])
    engine.flush()
    held = {d.document_hash for d in DocumentTree(disk.segments()).documents}
    assert bool(again.error) == (new.document_hash not in held)


# ------------------------------------------------------------------------------ kills

JOB = """
import json, sys
from daric_rag import EmbeddedEngine
from daric_rag.prewarm import JobOptions, PrewarmJob
from tests.runtime.test_prewarming import BUILDER, DOCUMENTS
model, folder = sys.argv[1:]
with EmbeddedEngine(
    model, store=folder + "/store", dtype="float32", max_model_len=4096
) as engine:
    print("up", flush=True)
    job = PrewarmJob(
        engine,
        DOCUMENTS,
        builder=BUILDER,
        manifest=folder + "/m.jsonl",
        options=JobOptions(batch_tokens=500, commit_interval_s=0),
    )
    totals = job.run().totals
    print(json.dumps([totals.known, totals.hit, totals.computed]))
"""


def start(model: Path, folder: Path) -> subprocess.Popen[str]:
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(model), str(folder)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "up\n"
    return job


def records(folder: Path) -> dict[bytes, tuple[int, str]]:
    """Keys, lengths and checksums' verdicts of a store."""
    with closing(DiskTier(folder / "store", NO_LIMIT)) as disk:
        return {
            row.key: (row.num_tokens, str(disk.verify(row.key)))
            for row in disk.segments()
        }


def test_a_killed_job_ends_as_a_clean_one(
    tiny_model: Any, no_engine: None, tmp_path: Path
) -> None:
    chance = random.Random(6)
    model = tiny_model(KIND)
    for _ in range(NUM_KILLS):
        job = start(model, tmp_path / "killed")
        time.sleep(chance.uniform(0.0, 0.6))
        job.kill()
        job.communicate()
    ends = [
        start(model, tmp_path / name).communicate()[0] for name in ("killed", "clean")
    ]
    known, hit, computed = json.loads(ends[0])
    assert known + hit + computed == len(DOCUMENTS)
    assert json.loads(ends[1]) == [0, 0, len(DOCUMENTS)]
    assert records(tmp_path / "killed") == records(tmp_path / "clean")
    assert {why for _, why in records(tmp_path / "killed").values()} == {"None"}


def parts() -> list[Any]:
    return BUILDER.document_parts(DOCUMENTS)


def test_a_store_holds_every_document_once(disk: DiskTier) -> None:
    names = [
        document.title
        for document in DocumentTree(disk.segments()).documents
        if document.title.startswith("Report")
    ]
    assert sorted(names) == sorted(document["title"] for document in DOCUMENTS)


def test_a_prompt_is_not_needed_for_a_hit(harness: Harness) -> None:
    """The documents alone, without the builder's system text."""
    prompt = ChunkedPrompt(documents=parts()[:3], question="When?")
    assert harness.engine.generate(prompt, max_tokens=1).reuse.generated_tokens == 0
