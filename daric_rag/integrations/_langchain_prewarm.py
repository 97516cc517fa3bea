"""A retriever whose documents are cached in the background."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field, SkipValidation

from daric_rag.prewarm_queue import BackgroundPrewarm

__all__ = ["PrewarmRetriever"]


class PrewarmRetriever(BaseRetriever):
    """Retrieves as another one does, and has what it finds cached meanwhile.

    Attributes:
        retriever: Finds the documents.
        queue: From `ChatDaric.background_prewarm`, with the prompt's own builder.
    """

    retriever: BaseRetriever
    queue: SkipValidation[BackgroundPrewarm] = Field(exclude=True, repr=False)

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        config: Any = {"callbacks": run_manager.get_child()}
        documents = self.retriever.invoke(query, config)
        self.queue.submit(documents)
        return documents

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        config: Any = {"callbacks": run_manager.get_child()}
        documents = await self.retriever.ainvoke(query, config)
        self.queue.submit(documents)
        return documents
