"""The client's vocabulary: prompts in, completions out, and the `Engine` protocol.

Integrations and the command line see this module only, so they run alike on an
embedded engine, a remote one, or a fake of a few lines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from daric_rag.errors import PromptError
from daric_rag.generation import GenerationOptions, Reuse
from daric_rag.layout import MAX_TITLE_LEN, PromptLayout
from daric_rag.trace import RequestTrace

__all__ = [
    "ChunkedPrompt",
    "Completion",
    "Delta",
    "Engine",
    "GenerationOptions",
    "Prompt",
    "Reuse",
    "ReuseStats",
    "TokenPrompt",
]


# As LangChain's loaders and LlamaIndex's readers name them.
_TITLE_FIELDS = ("title", "source", "file_name", "file_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedPrompt:
    """Retrieved documents and a question, each document a chunk of its own.

    Attributes:
        system: System text; it goes into the first chunk with the chat template's
            opening. None: the template's own default, if it has one.
        documents: Texts, or anything with a ``page_content`` or ``text`` attribute, in
            prompt order. Empty ones are dropped.
        question: The fresh end of the prompt, always computed in full context.

    Raises:
        PromptError: There is neither a document nor a question, or an entry is no
            text.
    """

    system: str | None = None
    documents: Sequence[Any] = ()
    question: str = ""

    def __post_init__(self) -> None:
        """Refuse what no prompt can be made of."""
        # A str is a sequence of letters, and an iterator is empty the second time.
        if isinstance(self.documents, str) or not isinstance(self.documents, Sequence):
            raise PromptError(
                f"documents is a {type(self.documents).__name__}; pass a list of "
                f"documents"
            )
        for name in ("system", "question"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "system" and value is None):
                raise PromptError(f"{name} is a {type(value).__name__}; pass a str")
        texts = self.texts()
        if not self.question.strip() and not texts:
            raise PromptError(
                "the prompt is empty: it has neither documents nor a question; pass "
                "at least a question"
            )

    def texts(self) -> list[str]:
        """Return the non-empty documents' texts, in order."""
        return [text for text, _ in self.titled_texts()]

    def titled_texts(self) -> list[tuple[str, str]]:
        """Return the non-empty documents' texts and titles, in order.

        A title is for people who look at the store: what the document's metadata say,
        else how its text begins.
        """
        texts = [_text_of(index, doc) for index, doc in enumerate(self.documents)]
        return [
            (text, _title_of(document, text))
            for text, document in zip(texts, self.documents, strict=True)
            if text.strip()
        ]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Chunks of token ids, for callers with their own tokenisation.

    Attributes:
        chunks: Ids per chunk; the last chunk is the question. With exact alignment
            the model sees precisely their concatenation.
    """

    chunks: Sequence[Sequence[int]]


Prompt = ChunkedPrompt | TokenPrompt


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

    def layout(self, prompt: Prompt) -> PromptLayout:
        """Return the tokens, chunks and recompute set of a prompt, without running."""
        ...

    def close(self) -> None:
        """Release everything; harmless when repeated."""
        ...


def _text_of(index: int, document: Any) -> str:
    if isinstance(document, str):
        return document
    for name in ("page_content", "text"):
        text = getattr(document, name, None)
        if isinstance(text, str):
            return text
    raise PromptError(
        f"document {index} is a {type(document).__name__} without text; pass a str or "
        f"an object with a page_content or text attribute"
    )


def _title_of(document: Any, text: str) -> str:
    metadata = getattr(document, "metadata", None)
    if isinstance(metadata, Mapping):
        for name in _TITLE_FIELDS:
            value = metadata.get(name)
            if isinstance(value, str) and value.strip():
                return _one_line(value)
    return _one_line(text[: 4 * MAX_TITLE_LEN])


def _one_line(text: str) -> str:
    # It will be printed on terminals and sent as JSON, whatever a document holds.
    line = " ".join(text.split())[:MAX_TITLE_LEN]
    return "".join(char if char.isprintable() else "?" for char in line)
