"""Several engine processes on one folder, and what an operator sees in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daric_rag import ChunkedPrompt, DaricConfig
from daric_rag.document_info import decode_document
from daric_rag.errors import DaricError
from daric_rag.keys import document_hash
from daric_rag.storage import DiskTier
from daric_rag.storage.documents import DocumentTree
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import Harness

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).parents[2]
KIND = "llama-gqa-tied"
TEXTS = [f"Report {n}: {'the ferry leaves at noon. ' * (9 + n)}" for n in range(3)]
DOCUMENTS = [
    SimpleNamespace(page_content=text, metadata={"title": f"Report no. {n}"})
    for n, text in enumerate(TEXTS)
]
# Whole documents, so that each must be loaded and none lies in the recompute set.
CONFIG = DaricConfig(max_segment_len=32, avg_chunk_budget=2)

PREWARM = """
import json, sys
from daric_rag import DaricConfig, EmbeddedEngine
model, store, config, texts = json.loads(sys.argv[1])
with EmbeddedEngine(
    model, store=store, config=DaricConfig(**config), dtype="float32",
    max_model_len=4096,
) as engine:
    print("computed", engine.prewarm(texts))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "store"


@pytest.fixture
def harness(harness_of: HarnessPool, store: Path) -> Harness:
    return harness_of(KIND, store=str(store), config=CONFIG)


def prewarm_elsewhere(model: Path, store: Path, texts: list[str]) -> str:
    arguments: list[Any] = [str(model), str(store), CONFIG.to_dict(), texts]
    done = subprocess.run(
        [sys.executable, "-c", PREWARM, json.dumps(arguments)],
        check=True,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=200,
    )
    return done.stdout.splitlines()[-1]


def test_what_another_process_computes_is_hit_without_a_restart(
    harness: Harness, store: Path, tiny_model: Any
) -> None:
    prompt = ChunkedPrompt(documents=DOCUMENTS[::-1], question="When?")
    # The engine is up and knows the store to be empty.
    assert harness.engine.generate(prompt, max_tokens=1).reuse.hit_tokens == 0
    harness.engine.flush()

    fresh = [text.replace("noon", "dawn") for text in TEXTS]
    assert prewarm_elsewhere(tiny_model(KIND), store, fresh) == "computed 3"

    options = {"max_tokens": 21, "logprobs": 20, "ignore_eos": True}
    prompt = ChunkedPrompt(documents=fresh[::-1], question="When?")
    answer = harness.engine.generate(prompt, **options)
    layout = harness.engine.layout(prompt)
    documents = [chunk for chunk in layout.chunks if chunk.reusable]
    assert answer.reuse.hit_tokens >= sum(c.end - c.start for c in documents[-3:])
    assert answer.reuse.generated_tokens == 0
    harness.check(answer, layout)


def test_an_operator_sees_documents_with_their_titles(
    harness: Harness, store: Path
) -> None:
    prompt = ChunkedPrompt(documents=DOCUMENTS, question="When?")
    harness.engine.generate(prompt, max_tokens=1)
    harness.engine.flush()
    layout = harness.engine.layout(prompt)

    tier = DiskTier(store, 1 << 40)
    rows = tier.segments()
    tier.close()

    by_hash = {one.document_hash: one for one in DocumentTree(rows).documents}
    for chunk in layout.chunks[-4:-1]:
        ids = layout.token_ids[chunk.start : chunk.end]
        document = by_hash[document_hash(ids)]
        assert (document.title, document.num_tokens) == (chunk.title, len(ids))
        assert (document.namespace, document.complete) == ("default", True)
        assert document.num_segments == -(-len(ids) // CONFIG.max_segment_len)
    assert {f"Report no. {n}" for n in range(3)} <= {d.title for d in by_hash.values()}
    # Nothing but the last segment of a document says anything about it.
    parents = {row.parent for row in rows}
    assert all(
        decode_document(row.side_data) is None for row in rows if row.key in parents
    )


def test_tenants_do_not_meet(harness: Harness) -> None:
    prompt = ChunkedPrompt(documents=DOCUMENTS, question="Why?")
    mine = harness.engine.generate(prompt, max_tokens=1)
    theirs = harness.engine.generate(prompt, max_tokens=1, namespace="another")
    assert mine.reuse.hit_tokens > 0
    assert theirs.reuse.hit_tokens == 0


def test_an_encrypted_store_hides_its_records_and_serves_them(
    harness_of: HarnessPool, tmp_path: Path, no_engine: None
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("5e" * 32)
    key_file.chmod(0o600)
    store = tmp_path / "store"
    config = DaricConfig(
        max_segment_len=32, avg_chunk_budget=2, encryption_key_file=str(key_file)
    )
    harness = harness_of(KIND, store=str(store), config=config)
    prompt = ChunkedPrompt(documents=DOCUMENTS, question="When?")
    options = {"max_tokens": 21, "logprobs": 20, "ignore_eos": True}
    harness.engine.generate(prompt, **options)
    harness.engine.flush()
    harness.engine.clear_host()
    harness.engine.clear_prefix_cache()
    warm = harness.engine.generate(prompt, **options)
    assert warm.reuse.hit_tokens > 0
    assert warm.reuse.generated_tokens == 0
    harness.check(warm, harness.engine.layout(prompt))
    harness_of.close()

    content = b"".join(p.read_bytes() for p in store.rglob("*") if p.is_file())
    assert b"Report no." not in content
    with pytest.raises(DaricError, match="key"):
        harness_of(KIND, store=str(store), config=CONFIG)
