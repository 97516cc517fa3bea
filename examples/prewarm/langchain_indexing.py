"""Pre-warm what a LangChain loader loads, in the pass that fills the vector store.

The documents that the retriever will return are those whose caches are stored: same
splitter, same template, hence the same hashes. Run it with

    python examples/prewarm/langchain_indexing.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore

from daric_rag import EmbeddedEngine, PromptBuilder
from daric_rag.data import load_demo_sets
from daric_rag.prewarm import PrewarmJob


class ArchiveLoader(BaseLoader):
    """Stands for any loader and splitter: what it yields is what is retrieved."""

    def lazy_load(self) -> Iterator[Document]:
        """Yield a page at a time."""
        record = load_demo_sets()["town_archive"][0]
        for number, text in enumerate(record.chunks):
            yield Document(text, id=f"page {number}", metadata={"title": f"{number}"})


def indexed(loader: BaseLoader, index: InMemoryVectorStore) -> Iterator[Document]:
    """Yield documents once they are in the index; none is loaded twice."""
    for document in loader.lazy_load():
        index.add_documents([document])
        yield document


def main() -> None:
    """Index and pre-warm, then ask: every retrieved document is a hit."""
    record = load_demo_sets()["town_archive"][0]
    builder = PromptBuilder(
        system=record.system, document_template="{title}\n{text}", max_documents=4
    )
    # Take embeddings of a model here.
    index = InMemoryVectorStore(DeterministicFakeEmbedding(size=64))
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedEngine("smollm2-135m", store=Path(folder, "store")) as engine,
    ):
        documents = indexed(ArchiveLoader(), index)
        report = PrewarmJob(
            engine,
            documents,
            builder=builder,
            manifest=Path(folder, "prewarm.jsonl"),
        ).run()
        print(f"{report.totals.computed} documents pre-warmed")
        # A job that stops early, as at a full disk, must keep nothing out of the index.
        for _ in documents:
            pass
        found = index.as_retriever().invoke(record.question)
        built = builder.build(found, record.question)
        done = engine.generate(built.prompt, max_tokens=24)
        print(f"{len(found)} retrieved; {done.reuse.generated_tokens} tokens missed")


if __name__ == "__main__":
    main()
