"""What a pre-warming request's reuse counts say of its document."""

from __future__ import annotations

from daric_rag.engine import DocumentOutcome, ReuseStats
from daric_rag.keys import document_hash
from daric_rag.layout import PromptLayout

__all__ = ["outcome_of"]


def outcome_of(layout: PromptLayout, reuse: ReuseStats) -> DocumentOutcome:
    """Return what became of a document that the engine did not refuse."""
    error = ""
    # A prefix hit alone says nothing of the store where a reason does.
    in_prefix_cache = reuse.gpu_prefix_tokens and not reuse.reason
    if not (reuse.saved_tokens or reuse.hit_tokens or in_prefix_cache):
        error = reuse.reason or (
            "the store did not take it: see `daric store stats` and the engine's log"
        )
    return DocumentOutcome(
        document_hash(layout.token_ids), layout.prompt_len, reuse.saved_tokens, error
    )
