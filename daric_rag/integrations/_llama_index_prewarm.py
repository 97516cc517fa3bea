"""Nodes cached ahead of the prompts that hold them: at index time, on retrieval."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import (
    BaseNode,
    NodeWithScore,
    QueryBundle,
    TransformComponent,
)

from daric_rag.integrations._llama_index_llm import DaricLLM
from daric_rag.prewarm_queue import BackgroundPrewarm, PrewarmStats
from daric_rag.prompt import PromptBuilder

__all__ = ["DaricPrewarmPostprocessor", "DaricPrewarmTransform"]

# Documents per call of the engine: prompts and answers of a call are held in memory.
_BATCH_SIZE = 64


class DaricPrewarmTransform(TransformComponent):
    """Caches nodes while they are indexed; for the end of an ingestion pipeline.

    Nodes pass through as they are. With the pipeline's own cache, nodes that it knows
    are not looked at again.

    Attributes:
        llm: Its engine caches the nodes, for its ``namespace``.
        builder: Must write documents as the synthesizer's builder does.

    Raises:
        PromptTooLongError: On a call: a node does not fit into the context.
    """

    llm: DaricLLM
    builder: PromptBuilder = Field(default_factory=PromptBuilder, exclude=True)

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex serialises it by."""
        return "DaricPrewarmTransform"

    def __getstate__(self) -> NoReturn:
        """Refuse to move.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "DaricPrewarmTransform belongs to its engine's process; run the pipeline "
            "with num_workers=1"
        )

    # LlamaIndex hands every transformation whatever its pipeline was run with.
    def __call__(self, nodes: Sequence[BaseNode], **_: Any) -> Sequence[BaseNode]:
        """Cache nodes that are not cached yet, and return them all."""
        parts = self.builder.document_parts(nodes)
        engine, namespace = self.llm.engine, self.llm.namespace
        for start in range(0, len(parts), _BATCH_SIZE):
            batch = parts[start : start + _BATCH_SIZE]
            engine.prewarm(batch, namespace=namespace)
        return nodes

    async def acall(
        self, nodes: Sequence[BaseNode], **kwargs: Any
    ) -> Sequence[BaseNode]:
        """Cache nodes, without keeping the event loop waiting."""
        return await asyncio.to_thread(self, nodes, **kwargs)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return what LlamaIndex's pipeline cache tells transformations apart by."""
        return super().to_dict(**kwargs) | {"template": self.builder.template_hash}


class DaricPrewarmPostprocessor(BaseNodePostprocessor):
    """Caches retrieved nodes in the background; for a query engine's postprocessors.

    It neither changes nor delays the nodes. Put it in front of those that drop some:
    what was dropped for one question is often asked for by the next one.

    Attributes:
        llm: Its engine caches the nodes, for its ``namespace``.
        builder: Must write documents as the synthesizer's builder does.
        max_pending: Most nodes that wait; what comes on top is not cached ahead.
    """

    llm: DaricLLM = Field(exclude=True)
    builder: PromptBuilder = Field(default_factory=PromptBuilder, exclude=True)
    max_pending: int = Field(default=256, gt=0)

    _queue: BackgroundPrewarm = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Make the queue; its thread begins with the first node."""
        super().model_post_init(context)
        llm = self.llm
        self._queue = BackgroundPrewarm(
            lambda: llm.engine,
            builder=self.builder,
            namespace=llm.namespace,
            max_pending=self.max_pending,
        )

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex serialises it by."""
        return "DaricPrewarmPostprocessor"

    @property
    def stats(self) -> PrewarmStats:
        """What became of the nodes so far."""
        return self._queue.stats

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every node taken so far is cached; return whether all are."""
        return self._queue.flush(timeout_s)

    def close(self) -> None:
        """Give up what waits; harmless when repeated. The engine stays open."""
        self._queue.close()

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self._queue.submit(nodes)
        return nodes

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        # It does not wait, so it needs no thread of its own.
        return self._postprocess_nodes(nodes, query_bundle)
