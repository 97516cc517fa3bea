"""LlamaIndex on daric_rag: a model, a response synthesizer, a query engine.

Retrieved nodes are chunks of their own, so that a node that was in some earlier prompt
is not computed again, wherever it stands in this one::

    llm = DaricLLM("smollm2-135m")
    query_engine = DaricQueryEngine.from_index(index, llm)
    print(query_engine.query("When was the bridge built?"))

Neither torch nor vLLM is imported before the engine opens.
"""

from daric_rag.integrations._llama_index_llm import DaricLLM
from daric_rag.integrations._llama_index_prewarm import (
    DaricPrewarmPostprocessor,
    DaricPrewarmTransform,
)
from daric_rag.integrations._llama_index_query_engine import DaricQueryEngine
from daric_rag.integrations._llama_index_synthesizer import (
    REPORT_KEY,
    DaricSynthesizer,
)

__all__ = [
    "REPORT_KEY",
    "DaricLLM",
    "DaricPrewarmPostprocessor",
    "DaricPrewarmTransform",
    "DaricQueryEngine",
    "DaricSynthesizer",
]
