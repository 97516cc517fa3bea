"""From what a retriever returns and a question to a prompt.

Everything that decides a document's hash is here and the same in every prompt: how its
text is written, and that nothing of the query is in it. `PromptBuilder` writes prompts
and names the texts to pre-warm alike::

    builder = PromptBuilder(system="Answer briefly.", max_documents=10)
    engine.prewarm(builder.document_parts(corpus))
    built = builder.build(retriever.invoke(question), question)
    engine.generate(built.prompt)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from daric_rag.config import shown
from daric_rag.document_text import text_of, title_of
from daric_rag.errors import ConfigError, PromptError
from daric_rag.keys import template_hash
from daric_rag.prompt_selection import (
    BuiltPrompt,
    DroppedDocument,
    Message,
    Reason,
    Selection,
    listed,
    messages_of,
    most_that_fit,
    ranked_first,
)
from daric_rag.prompt_text import (
    DocumentTemplate,
    SourceDocument,
    check_delimiter,
    check_template,
    joined,
    rendered,
)
from daric_rag.prompt_types import ChatMessage, ChatPrompt, ChunkedPrompt, DocumentPart
from daric_rag.tokenization import set_apart

__all__ = ["BuiltPrompt", "DroppedDocument", "PromptBuilder", "SourceDocument"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBuilder:
    """Writes documents and questions into prompts, always alike.

    Documents may be strings, dicts with ``"text"`` and ``"title"``, documents of
    LangChain, nodes of LlamaIndex (with score or without), or anything that
    `document_text.text_of` finds a text in.

    Attributes:
        system: System text, or None.
        document_template: How a document's text is written: a str with ``{text}`` and,
            if wanted, ``{title}`` and ``{source}``, or a function of a
            `SourceDocument`, which must return the same text for it every time.
        question_template: A str with ``{question}``.
        delimiter: For `delimited`; the engine's `DaricConfig.delimiter`.
        dedupe: Whether a text that comes again is dropped.
        max_documents: Most documents in a prompt, at least 1; None: no limit.

    Raises:
        ConfigError: A field cannot be used.
    """

    system: str | None = None
    document_template: DocumentTemplate = "{text}"
    question_template: str = "{question}"
    delimiter: str | None = None
    dedupe: bool = True
    max_documents: int | None = None

    def __post_init__(self) -> None:
        """Check every field, so that no document is met halfway."""
        if self.system is not None and not isinstance(self.system, str):
            raise ConfigError(f"system is {shown(self.system)}; pass a str or None")
        if not callable(self.document_template):
            fields = ("text", "title", "source")
            check_template("document_template", self.document_template, fields)
        check_template("question_template", self.question_template, ("question",))
        if self.delimiter is not None:
            check_delimiter(self.delimiter)
        limit = self.max_documents
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ConfigError(
                f"max_documents is {shown(limit)}; it must be an int of at least 1, or "
                f"None"
            )

    @property
    def template_hash(self) -> str:
        """Names how systems and documents are written, in 64 hex digits.

        Of a function it sees only what that makes of two samples, one of them with
        neither title nor source.
        """
        template = self.document_template
        if isinstance(template, str):
            return template_hash(self.system, [template])
        samples = [SourceDocument("text", "title", "source"), SourceDocument("text")]
        made = [rendered(template, sample) for sample in samples]
        return template_hash(self.system, made)

    def build(
        self,
        documents: Sequence[Any],
        question: str,
        history: Sequence[Message] = (),
    ) -> BuiltPrompt:
        """Return the prompt of documents and a question.

        Args:
            documents: In prompt order; empty and repeated ones are dropped.
            question: Put into `question_template`.
            history: Earlier messages: `ChatMessage`, mappings of its fields (as
                OpenAI's clients write them), pairs of role and text, or messages of
                LangChain or LlamaIndex. With any, the prompt is a `ChatPrompt`. A
                system message at the front takes the place of `system`.

        Raises:
            PromptError: There is neither document nor question, or an entry has no
                text.
        """
        selection = self._select(documents)
        return self._built(selection, question, messages_of(history))

    def fit(
        self,
        documents: Sequence[Any],
        question: str,
        max_prompt_tokens: int,
        count: Callable[[ChunkedPrompt | ChatPrompt], int],
        *,
        history: Sequence[Message] = (),
        scores: Sequence[float] | None = None,
    ) -> BuiltPrompt:
        """Return the prompt with as many documents as fit.

        Those of the lowest score go first, the later one where scores are equal; the
        last ones if there are no scores; and first of all one that does not fit even
        alone. Order is kept. `count` is called a few times, because documents' lengths
        add up: once if everything fits.

        Args:
            documents: As in `build`.
            question: As in `build`.
            max_prompt_tokens: Most tokens that the prompt may have.
            count: Tokens of a prompt: ``lambda p: engine.layout(p).prompt_len``.
            history: As in `build`.
            scores: Of every document, higher is better. None: those that LlamaIndex's
                nodes (and dicts with ``"score"``) carry, if all kept ones do.

        Raises:
            PromptTooLongError: The prompt without any document does not fit.
            PromptError: As in `build`, or `scores` has another length.
        """
        if scores is not None and len(scores) != len(documents):
            raise PromptError(
                f"{len(scores)} scores for {len(documents)} documents; give one each"
            )
        selection = self._select(documents)
        messages = messages_of(history)
        ranked = ranked_first(selection.kept, documents, scores)

        def built(indices: Sequence[int]) -> BuiltPrompt:
            return self._built(selection.only(set(indices)), question, messages)

        fewest = 0 if self._asked(question).strip() else min(1, len(ranked))
        while True:
            num_fit = most_that_fit(
                [len(selection.kept[index].text) for index in ranked],
                max_prompt_tokens,
                lambda n: count(built(ranked[:n]).prompt),
                fewest,
            )
            last = ranked[num_fit : num_fit + 1]
            if not last or count(built(last).prompt) <= max_prompt_tokens:
                return built(ranked[:num_fit])
            # It fits in no prompt, and must not keep out those behind it.
            ranked.remove(last[0])

    def delimited(self, documents: Sequence[Any], question: str) -> str:
        """Return the prompt as one text, for `DaricConfig.delimiter`.

        It is split again into as many chunks as `build`'s prompt has without a chat
        template, with the same tokens: system text, documents, question. A delimiter
        inside a text is broken by one sign behind its first character, a space where
        the delimiter holds none.

        Such a text is raw: special tokens written in it are special tokens. Use
        `build` for documents that are not trusted.

        Raises:
            ConfigError: The builder has no delimiter.
            PromptError: The question is empty, or an entry has no text.
        """
        if self.delimiter is None:
            raise ConfigError(
                "the builder has no delimiter; set PromptBuilder.delimiter to the "
                "engine's DaricConfig.delimiter"
            )
        asked = self._asked(question)
        if not asked.strip():
            raise PromptError(
                "the question is empty, and a delimited prompt ends with one; pass a "
                "question"
            )
        system = [self.system] if self.system else []
        parts = self._select(documents).kept.values()
        texts = [set_apart(text) for text in (*system, *(part.text for part in parts))]
        return joined([*texts, asked], self.delimiter)

    def document_parts(self, documents: Sequence[Any]) -> list[DocumentPart]:
        """Return documents as prompts hold them, titled, each text once.

        Whatever prompt one of these documents comes into, its cache is looked up by
        this text; so these are what to pre-warm.

        Raises:
            PromptError: An entry has no text.
        """
        parts: dict[str, DocumentPart] = {}
        for index, document in enumerate(listed(documents)):
            part = self._part(index, document)
            if part.text.strip():
                parts.setdefault(part.text, part)
        return list(parts.values())

    def document_texts(self, documents: Sequence[Any]) -> list[str]:
        """Return exactly the texts whose caches prompts look up, each once.

        Raises:
            PromptError: An entry has no text.
        """
        return [part.text for part in self.document_parts(documents)]

    def cached_first(
        self, documents: Sequence[Any], is_cached: Callable[[str], bool]
    ) -> list[Any]:
        """Return documents with the cached ones in front, else in their order.

        Hits in front are contiguous, but models also read by position: the order
        changes answers. So `build` never does this by itself.

        Args:
            documents: As in `build`.
            is_cached: Whether a text, as `document_texts` gives it, is in the store.

        Raises:
            PromptError: An entry has no text.
        """
        texts = [self._part(i, doc).text for i, doc in enumerate(listed(documents))]
        cached = {text: is_cached(text) for text in dict.fromkeys(texts)}
        order = sorted(range(len(texts)), key=lambda index: not cached[texts[index]])
        return [documents[index] for index in order]

    def _asked(self, question: str) -> str:
        if not isinstance(question, str):
            raise PromptError(f"question is a {type(question).__name__}; pass a str")
        return self.question_template.format(question=question)

    def _part(self, index: int, document: Any) -> DocumentPart:
        source = SourceDocument.of(index, document)
        text = rendered(self.document_template, source)
        return DocumentPart(text, title_of(document, source.text))

    def _select(self, documents: Sequence[Any]) -> Selection:
        selection = Selection([], {}, {})
        seen: set[str] = set()
        for index, document in enumerate(listed(documents)):
            part = self._part(index, document)
            bare = text_of(index, document).strip()
            selection.add(part, self._reason(part, bare in seen, selection.kept))
            seen.add(bare)
        return selection

    def _reason(
        self, part: DocumentPart, is_repeated: bool, kept: Sized
    ) -> Reason | None:
        """Return why a document is not in the prompt; None if it is."""
        if not part.text.strip():
            return "empty"
        if self.dedupe and is_repeated:
            return "duplicate"
        full = self.max_documents is not None and len(kept) >= self.max_documents
        return "max_documents" if full else None

    def _built(
        self, selection: Selection, question: str, history: Sequence[ChatMessage]
    ) -> BuiltPrompt:
        parts = list(selection.kept.values())
        asked = self._asked(question)
        prompt: ChunkedPrompt | ChatPrompt
        if history:
            messages = [*history, ChatMessage("user", [*parts, asked])]
            if self.system is not None and history[0].role != "system":
                messages.insert(0, ChatMessage("system", self.system))
            prompt = ChatPrompt(messages)
        else:
            prompt = ChunkedPrompt(system=self.system, documents=parts, question=asked)
        return BuiltPrompt(prompt, tuple(selection.kept), selection.report())
