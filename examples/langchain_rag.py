"""Questions over a folder of texts with LangChain, BM25 and cached documents.

What the retriever finds is cached in the background, and found again at any position
in the prompts to come. Run it with

    pip install ".[examples]"
    python examples/langchain_rag.py [FOLDER]

It needs no network and no GPU; the model is the small one of `make demo`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import bm25s
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import PrivateAttr

from daric_rag.integrations.langchain import (
    ChatDaric,
    DaricPromptTemplate,
    PrewarmRetriever,
    PromptBuilder,
    create_daric_chain,
)

QUESTIONS = (
    "Who built the lighthouse of Skerrow?",
    "How long is the bridge over the Narrow, and who built it?",
    "What does the captain of the ferry do at the western rock?",
)
SYSTEM = "Answer from the documents, in one short sentence."


class BM25Retriever(BaseRetriever):
    """Ranks documents by the words that they share with the question."""

    documents: list[Document]
    top_k: int = 4

    _ranking: bm25s.BM25 = PrivateAttr(default_factory=bm25s.BM25)

    def model_post_init(self, context: Any) -> None:
        """Index the documents."""
        super().model_post_init(context)
        words = self._words([document.page_content for document in self.documents])
        self._ranking.index(words, show_progress=False)

    def _words(self, texts: list[str]) -> bm25s.tokenization.Tokenized:
        return bm25s.tokenize(texts, stopwords="en", show_progress=False)

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        num_found = min(self.top_k, len(self.documents))
        indices, _scores = self._ranking.retrieve(
            self._words([query]), k=num_found, show_progress=False
        )
        return [self.documents[index] for index in indices[0]]


def read(folder: Path) -> list[Document]:
    """Return the folder's texts; short ones need no splitting."""
    return [
        Document(path.read_text(), metadata={"title": path.stem})
        for path in sorted(folder.glob("*.txt"))
    ]


def main() -> None:
    """Ask, and say how much of every prompt was not computed."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "documents"
    builder = PromptBuilder(system=SYSTEM)
    retriever = BM25Retriever(documents=read(folder))
    with ChatDaric(model="smollm2-135m", store=":memory:", max_tokens=32) as model:
        queue = model.background_prewarm(builder)
        chain = create_daric_chain(
            PrewarmRetriever(retriever=retriever, queue=queue),
            model,
            DaricPromptTemplate(builder=builder),
        )
        for question in QUESTIONS:
            done = chain.invoke(question)
            answer, usage = done["answer"], done["answer"].usage_metadata
            titles = [document.metadata["title"] for document in done["documents"]]
            print(f"{question}\n  {answer.text.strip()}")
            print(
                f"  {usage['input_token_details']['cache_read']} of "
                f"{usage['input_tokens']} tokens from the cache, "
                f"{answer.response_metadata['ttft_s']:.2f} s to the first of the "
                f"answer; from {', '.join(titles)}"
            )


if __name__ == "__main__":
    main()
