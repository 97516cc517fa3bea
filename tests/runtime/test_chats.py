"""Conversations that a builder writes, on an engine: what they reuse as they grow."""

from __future__ import annotations

import pytest

from daric_rag import PromptBuilder
from tests.runtime.conftest import HarnessPool

pytestmark = pytest.mark.engine

BUILDER = PromptBuilder(system="Be kind.", document_template="{title}: {text}")
DOCUMENTS = [
    {"title": "Ferry", "text": "It leaves for the island at nine sharp. " * 6},
    {"title": "Tickets", "text": "They are sold at the pier, to all who ask. " * 6},
]


def test_a_conversation_reuses_its_turns_and_prewarmed_documents(
    harness_of: HarnessPool,
) -> None:
    engine = harness_of("llama-gqa-tied").engine
    engine.prewarm(BUILDER.document_parts(DOCUMENTS))
    lens = [len(text) for text in BUILDER.document_texts(DOCUMENTS)]
    assert min(lens) > 200

    first = BUILDER.build(DOCUMENTS[:1], "When does it leave?")
    done = engine.generate(first.prompt, max_tokens=4, conversation="ferry")
    first_layout = engine.layout(first.prompt)
    document = first_layout.chunks[1]
    assert done.reuse.hit_tokens >= document.end - document.start

    history = [first.turn, ("assistant", "At nine.")]
    second = BUILDER.build(DOCUMENTS[1:], "Where are tickets sold?", history)
    done = engine.generate(second.prompt, max_tokens=4, conversation="ferry")
    # All full blocks of the first prompt come from vLLM's own prefix cache.
    whole_blocks = first_layout.prompt_len // engine.block_size * engine.block_size
    assert done.reuse.gpu_prefix_tokens >= whole_blocks
    document = engine.layout(second.prompt).chunks[-2]
    assert document.title == "Tickets"
    assert done.reuse.hit_tokens >= document.end - document.start
    assert done.reuse.reason == ""
