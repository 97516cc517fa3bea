"""The client's vocabulary: prompts in, completions out, and the `Engine` protocol.

Integrations and the command line see this module only, so they run alike on an
embedded engine, a remote one, or a fake of a few lines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from daric_rag.generation import GenerationOptions, Reuse
from daric_rag.keys import DocumentHash
from daric_rag.layout import PromptLayout
from daric_rag.prompt_types import (
    ChatMessage,
    ChatPrompt,
    ChunkedPrompt,
    DocumentPart,
    Prompt,
    TokenPrompt,
)
from daric_rag.trace import RequestTrace

__all__ = [
    "ChatMessage",
    "ChatPrompt",
    "ChunkedPrompt",
    "Completion",
    "Delta",
    "DocumentOutcome",
    "DocumentPart",
    "Engine",
    "GenerationOptions",
    "Prompt",
    "Reuse",
    "ReuseStats",
    "TokenPrompt",
]


@dataclass(frozen=True, slots=True)
class ReuseStats:
    """Where a prompt's KV came from. Never silently zero: see `reason`.

    Loaded tokens that lie in the recompute set count as both hit and recomputed.

    Attributes:
        prompt_tokens: Tokens in the prompt, padding included.
        padding_tokens: Of these, padding.
        num_chunks: Chunks, the question included.
        gpu_prefix_tokens: Taken from vLLM's own prefix cache.
        contiguous_hit_tokens: Loaded; every chunk before them was hit too.
        disjoint_hit_tokens: Loaded behind a miss.
        generated_tokens: Of missing chunks, computed on their own in this request.
        recomputed_tokens: Computed in full context: windows and question.
        saved_tokens: Written to the store.
        load_s: Seconds of reading, re-encoding and placing.
        generation_s: Seconds of generating, saving and placing missing chunks.
        recompute_s: Seconds of the forward passes over the recompute set; requests in
            one batch share them.
        reason: Why nothing was reused, or "".
    """

    prompt_tokens: int = 0
    padding_tokens: int = 0
    num_chunks: int = 0
    gpu_prefix_tokens: int = 0
    contiguous_hit_tokens: int = 0
    disjoint_hit_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    saved_tokens: int = 0
    load_s: float = 0.0
    generation_s: float = 0.0
    recompute_s: float = 0.0
    reason: str = ""

    @property
    def hit_tokens(self) -> int:
        """Tokens loaded from the store."""
        return self.contiguous_hit_tokens + self.disjoint_hit_tokens

    @property
    def reused_tokens(self) -> int:
        """Tokens that were not computed for this request's prefill at all, at most."""
        return self.hit_tokens + self.gpu_prefix_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer; the first one, where several were asked for.

    Attributes:
        text: The answer.
        token_ids: Its tokens, [num_generated].
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``.
        logprobs: Per generated token, token id to log-probability; None if not asked.
        ttft_s: Seconds from submission to the arrival of this answer's first token at
            the client.
        reuse: Where the prompt's KV came from.
        trace: What became of every chunk, and when; None if not asked, or if the
            engine sent none.
        alternatives: The other answers to the same request, in order; each with its
            own counts, and without alternatives.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[dict[int, float], ...] | None
    ttft_s: float
    reuse: ReuseStats = field(default_factory=ReuseStats)
    trace: RequestTrace | None = None
    alternatives: tuple[Completion, ...] = ()

    @property
    def answers(self) -> tuple[Completion, ...]:
        """All answers to the request, this one first."""
        return (self, *self.alternatives)


@dataclass(frozen=True, slots=True)
class Delta:
    """One streamed piece of an answer.

    Attributes:
        text: New text, possibly empty while a character is incomplete.
        token_ids: New tokens.
        logprobs: Of the new tokens, as in `Completion`.
        completion: The whole answer, on the request's last delta only.
        index: Which of the request's answers it continues, counted from 0; those of
            several arrive interleaved.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...] | None = None
    completion: Completion | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class DocumentOutcome:
    """What pre-warming one document came to.

    Attributes:
        document_hash: Names it by its token ids; None if it was refused.
        num_tokens: Of the document; 0 if it was refused.
        saved_tokens: Of these, computed and written to the store now.
        error: Why it is not in the store now; "" if it is.
    """

    document_hash: DocumentHash | None
    num_tokens: int = 0
    saved_tokens: int = 0
    error: str = ""


class Engine(Protocol):
    """Client process. Answers prompts; embedded, remote or fake.

    ``options`` are the fields of `GenerationOptions`. Bad input raises a subclass of
    `DaricError` before any work. Every method may be called from any thread.
    """

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """Answer one prompt."""
        ...

    def generate_batch(
        self, prompts: Sequence[Prompt], **options: Any
    ) -> list[Completion]:
        """Answer several prompts, batched by the engine; in their order."""
        ...

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Delta]:
        """Answer one prompt piece by piece; closing the iterator aborts."""
        ...

    async def agenerate(self, prompt: Prompt, **options: Any) -> Completion:
        """Answer one prompt; concurrent calls are batched. Cancelling aborts."""
        ...

    def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Delta]:
        """Answer one prompt piece by piece, concurrently with others."""
        ...

    def prewarm(self, documents: Sequence[Any], *, namespace: str | None = None) -> int:
        """Compute and store documents ahead of the prompts that will hold them.

        Args:
            documents: As in `ChunkedPrompt.documents`.
            namespace: Tenant to store them for; None is the configuration's.

        Returns:
            How many documents had to be computed.
        """
        ...

    def prewarm_each(self, documents: Sequence[Any]) -> list[DocumentOutcome]:
        """Do the same and tell of each document; one that is refused stops none.

        Args:
            documents: As in `ChunkedPrompt.documents`.

        Returns:
            One outcome per document, in their order.

        Raises:
            EngineError: The engine failed; some documents may be stored.
        """
        ...

    def layout(self, prompt: Prompt) -> PromptLayout:
        """Return the tokens, chunks and recompute set of a prompt, without running."""
        ...

    def close(self) -> None:
        """Release everything; harmless when repeated."""
        ...
