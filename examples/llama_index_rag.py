"""Questions over a folder of texts with LlamaIndex, BM25 and cached documents.

Every text of the folder is computed once, while it is indexed. Whatever questions come,
and in whatever order BM25 ranks the texts, their KV is then found in the store. Run it
with

    pip install ".[examples]"
    python examples/llama_index_rag.py [FOLDER]

It needs no network and no GPU; the model is the small one of `make demo`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import bm25s
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle, TextNode

from daric_rag import PromptBuilder
from daric_rag.integrations.llama_index import (
    DaricLLM,
    DaricPrewarmTransform,
    DaricQueryEngine,
)

QUESTIONS = (
    "Who built the lighthouse of Skerrow?",
    "How long is the bridge over the Narrow, and who built it?",
    "What does the captain of the ferry do at the western rock?",
)
SYSTEM = "Use only the documents below and reply with the answer alone, in a few words."


class BM25Retriever(BaseRetriever):
    """Ranks nodes by the words that they share with the question."""

    def __init__(self, nodes: list[BaseNode], top_k: int) -> None:
        """Index the nodes."""
        super().__init__()
        self._nodes, self._top_k = nodes, min(top_k, len(nodes))
        self._ranking = bm25s.BM25()
        words = self._words([node.get_content() for node in nodes])
        self._ranking.index(words, show_progress=False)

    def _words(self, texts: list[str]) -> bm25s.tokenization.Tokenized:
        return bm25s.tokenize(texts, stopwords="en", show_progress=False)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        indices, scores = self._ranking.retrieve(
            self._words([query_bundle.query_str]), k=self._top_k, show_progress=False
        )
        return [
            NodeWithScore(node=self._nodes[index], score=float(score))
            for index, score in zip(indices[0], scores[0], strict=True)
        ]


def read(folder: Path) -> list[BaseNode]:
    """Return the folder's texts as nodes; short ones need no splitting."""
    return [
        TextNode(id_=path.stem, text=path.read_text(), metadata={"title": path.stem})
        for path in sorted(folder.glob("*.txt"))
    ]


def main() -> None:
    """Index, ask, and say how much of every prompt was not computed."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "documents"
    nodes = read(folder)
    builder = PromptBuilder(system=SYSTEM, question_template="Question: {question}")
    with DaricLLM("smollm2-135m", store=":memory:", max_tokens=32) as llm:
        DaricPrewarmTransform(llm=llm, builder=builder)(nodes)
        query_engine = DaricQueryEngine.from_retriever(
            BM25Retriever(nodes, top_k=4), llm, builder=builder
        )
        for question in QUESTIONS:
            response = query_engine.query(question)
            report = response.metadata["daric"]
            usage = report["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"{question}\n  {str(response).strip()}")
            print(
                f"  {cached} of {usage['prompt_tokens']} tokens from the cache, "
                f"{report['ttft_s']:.2f} s to the first of the answer; "
                f"from {', '.join(report['kept'])}"
            )


if __name__ == "__main__":
    main()
