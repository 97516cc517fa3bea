"""`DaricQueryEngine`: a retriever and a `DaricSynthesizer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.indices.base import BaseIndex
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers.base import BaseSynthesizer

from daric_rag.errors import ConfigError
from daric_rag.integrations._llama_index_llm import DaricLLM
from daric_rag.integrations._llama_index_synthesizer import DaricSynthesizer
from daric_rag.prompt import PromptBuilder

__all__ = ["DaricQueryEngine"]


class DaricQueryEngine(RetrieverQueryEngine):
    """A query engine whose retrieved nodes are chunks of their own.

    The same as ``index.as_query_engine(llm=llm, response_synthesizer=
    DaricSynthesizer(llm))``. `from_index` and `from_retriever` are the short forms.

    Args:
        retriever: Returns nodes in prompt order.
        response_synthesizer: A `DaricSynthesizer`.
        node_postprocessors: Applied to the nodes, one after the other.
        callback_manager: None: the synthesizer's.

    Raises:
        ConfigError: The synthesizer is missing or another one.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        response_synthesizer: BaseSynthesizer | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        """Open nothing yet."""
        if not isinstance(response_synthesizer, DaricSynthesizer):
            raise ConfigError(
                f"response_synthesizer is a {type(response_synthesizer).__name__}, "
                f"which joins nodes; pass DaricSynthesizer(llm), or use "
                f"DaricQueryEngine.from_retriever(retriever, llm)"
            )
        super().__init__(
            retriever, response_synthesizer, node_postprocessors, callback_manager
        )

    @classmethod
    def from_retriever(
        cls,
        retriever: BaseRetriever,
        llm: DaricLLM,
        *,
        builder: PromptBuilder | None = None,
        streaming: bool = False,
        output_cls: type[BaseModel] | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        callback_manager: CallbackManager | None = None,
    ) -> Self:
        """Return the query engine of a retriever and a model.

        Args:
            retriever: Returns nodes in prompt order.
            llm: Answers.
            builder: As in `DaricSynthesizer`.
            streaming: Whether responses stream.
            output_cls: As in `DaricSynthesizer`.
            node_postprocessors: Applied to the nodes, one after the other.
            callback_manager: Also for the model.

        Raises:
            ConfigError: `llm` is no `DaricLLM`.
        """
        synthesizer = DaricSynthesizer(
            llm,
            builder=builder,
            streaming=streaming,
            output_cls=output_cls,
            callback_manager=callback_manager,
        )
        return cls(retriever, synthesizer, list(node_postprocessors), callback_manager)

    @classmethod
    def from_index(
        cls,
        index: BaseIndex[Any],
        llm: DaricLLM,
        *,
        builder: PromptBuilder | None = None,
        streaming: bool = False,
        output_cls: type[BaseModel] | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        callback_manager: CallbackManager | None = None,
        **retriever_options: Any,
    ) -> Self:
        """Return the query engine of an index and a model.

        Args:
            index: Any of LlamaIndex.
            llm: As in `from_retriever`, like the following ones.
            builder: As in `DaricSynthesizer`.
            streaming: Whether responses stream.
            output_cls: As in `DaricSynthesizer`.
            node_postprocessors: Applied to the nodes, one after the other.
            callback_manager: Also for the model.
            **retriever_options: Of ``index.as_retriever``, as ``similarity_top_k``.

        Raises:
            ConfigError: `llm` is no `DaricLLM`.
        """
        return cls.from_retriever(
            index.as_retriever(**retriever_options),
            llm,
            builder=builder,
            streaming=streaming,
            output_cls=output_cls,
            node_postprocessors=node_postprocessors,
            callback_manager=callback_manager,
        )
