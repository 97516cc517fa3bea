"""Pre-warm the nodes of a LlamaIndex ingestion pipeline, as its last transformation.

python examples/prewarm/llama_index_ingestion.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, Document, TransformComponent

from daric_rag import EmbeddedEngine, PromptBuilder
from daric_rag.data import load_demo_sets
from daric_rag.prewarm import PrewarmJob


class Prewarmed(TransformComponent):
    """Stores the caches of nodes and hands them on unchanged."""

    engine: Any
    builder: Any
    manifest: Path

    def __call__(self, nodes: Sequence[BaseNode], **_: Any) -> Sequence[BaseNode]:
        """Compute what is new; the manifest knows the rest."""
        job = PrewarmJob(
            self.engine, nodes, builder=self.builder, manifest=self.manifest
        )
        totals = job.run().totals
        print(f"{totals.computed} nodes pre-warmed, {totals.known} known")
        return nodes


def main() -> None:
    """Ingest twice; the second time there is nothing to compute."""
    record = load_demo_sets()["town_archive"][0]
    documents = [Document(text=text) for text in record.chunks]
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedEngine("smollm2-135m", store=Path(folder, "store")) as engine,
    ):
        prewarmed = Prewarmed(
            engine=engine,
            builder=PromptBuilder(system=record.system),
            manifest=Path(folder, "prewarm.jsonl"),
        )
        splitter = SentenceSplitter(chunk_size=256, chunk_overlap=0)
        pipeline = IngestionPipeline(transformations=[splitter, prewarmed])
        for _ in range(2):
            nodes = pipeline.run(documents=documents)
            # A pipeline remembers its inputs; the manifest is asked all the same.
            pipeline.cache.clear()
        print(f"{len(nodes)} nodes")


if __name__ == "__main__":
    main()
