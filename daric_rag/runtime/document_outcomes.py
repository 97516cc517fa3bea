"""Pre-warming documents one by one: each has an outcome, whatever the others' are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from daric_rag.document_text import text_of, title_of
from daric_rag.engine import Completion, DocumentOutcome, ReuseStats
from daric_rag.errors import PromptError, PromptTooLongError
from daric_rag.keys import document_hash
from daric_rag.layout import PromptLayout
from daric_rag.runtime.request_stream import Submission

__all__ = ["prewarmed_each"]


def prewarmed_each(
    documents: Sequence[Any],
    submission_of: Callable[[str, str], Submission],
    complete: Callable[[Sequence[Submission]], list[Completion]],
) -> list[DocumentOutcome]:
    """Run the documents that are not refused, all together.

    Args:
        documents: As in `ChunkedPrompt.documents`.
        submission_of: From a document's text and title to its request.
        complete: Runs requests.

    Returns:
        One outcome per document, in their order.
    """
    outcomes: dict[int, DocumentOutcome] = {}
    submissions: dict[int, Submission] = {}
    for index, document in enumerate(documents):
        try:
            text = text_of(index, document)
            submissions[index] = submission_of(text, title_of(document, text))
        except PromptTooLongError as error:
            outcomes[index] = DocumentOutcome(None, error=_too_long(error))
        except PromptError as error:
            outcomes[index] = DocumentOutcome(None, error=str(error))
    completions = complete(list(submissions.values()))
    for (index, submission), done in zip(submissions.items(), completions, strict=True):
        outcomes[index] = _outcome(submission.layout, done.reuse)
    return [outcomes[index] for index in range(len(documents))]


def _too_long(error: PromptTooLongError) -> str:
    return (
        f"the document has {error.prompt_len} tokens and the limit is {error.limit}: "
        f"split it (a job: --splitter), or start the engine with a larger max_model_len"
    )


def _outcome(layout: PromptLayout, reuse: ReuseStats) -> DocumentOutcome:
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
