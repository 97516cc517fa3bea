"""From a prompt to token ids, layout and wire. Pure: the tokenizer is injected.

How a conversation becomes chunks is said in `chat_layout`. A `ChunkedPrompt` is one of
a system text and a user message, hence::

    chunk 1           template's opening, system text, opening of the user's turn
    chunk 2 .. M - 1  one document each, tokenised alone, so that its ids never depend
                      on its neighbours
    chunk M           question, template's ending, opening of the answer

A str is raw text, used as it is, as vLLM takes it: no chat template, the tokenizer's
own bos in front, and special tokens written in it are special tokens. If
`DaricConfig.delimiter` is set the text is split there and each piece is a chunk, the
last one the question; otherwise it is one chunk.

A lone chunk is an exact prefix and reusable: the index then degenerates to fixed-size
prefix matching.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from threading import RLock

from daric_rag.chat_layout import ChatChunker
from daric_rag.config import DaricConfig
from daric_rag.errors import ConfigError, PromptError, PromptTooLongError
from daric_rag.layout import PromptLayout, build_layout, split_delimited
from daric_rag.prompt_types import ChatPrompt, ChunkedPrompt, Prompt, TokenPrompt
from daric_rag.selection import ReuseMode
from daric_rag.tokenization import Tokenizer
from daric_rag.wire import RequestWire

__all__ = ["InputProcessor", "Tokenizer"]

_Ids = Sequence[int]


class InputProcessor:
    """Client process. Makes layouts; may be called from any thread.

    Args:
        tokenizer: The model's. It is used under a lock, so pass an instance that
            nobody else reconfigures meanwhile.
        config: Layout, selection and namespace.
        block_size: Tokens per KV block of the engine.
        max_model_len: Tokens that prompt and answer may have together.

    Raises:
        ConfigError: ``alignment="block"`` and the tokenizer has no end-of-turn token
            to pad with.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        config: DaricConfig,
        block_size: int,
        max_model_len: int,
    ) -> None:
        """Take over what the engine knows."""
        if config.alignment == "block" and tokenizer.eos_token_id is None:
            raise ConfigError(
                'alignment="block" pads with the end-of-turn token, and this tokenizer '
                'has no eos_token; use alignment="exact"'
            )
        self._tokenizer = tokenizer
        self._config = config
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._lock = RLock()
        self._chunker = ChatChunker(tokenizer)

    def layout(self, prompt: Prompt | str) -> PromptLayout:
        """Return the tokens, chunks and recompute set of a prompt.

        Args:
            prompt: Documents and a question, a conversation, chunks of token ids, or
                raw text.

        Raises:
            PromptError: The prompt is empty or is of another type, or the chat
                template does not take it as it is.
        """
        chunks: Sequence[_Ids]
        titles: Sequence[str] | None = None
        if isinstance(prompt, TokenPrompt):
            chunks = _listed(prompt.chunks)
        elif isinstance(prompt, ChunkedPrompt | ChatPrompt):
            _check_texts(prompt.named_texts())
            with self._lock:
                titles, chunks = zip(*self._chunked(prompt), strict=True)
        elif isinstance(prompt, str):
            _check_texts([("the prompt", prompt)])
            with self._lock:
                chunks = self._raw(prompt)
        else:
            raise PromptError(
                f"a prompt is a ChunkedPrompt, a ChatPrompt, a TokenPrompt or a str, "
                f"not a {type(prompt).__name__}"
            )
        return build_layout(
            chunks,
            config=self._config,
            block_size=self._block_size,
            pad_token_id=self._tokenizer.eos_token_id or 0,
            reusable=[True] if len(chunks) == 1 else None,
            titles=titles,
        )

    def document_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a document's chunk, the same in every prompt.

        With ``alignment="block"`` trailing padding is part of it. Pre-warming uses
        this, so that what it stores is what prompts look for.

        Raises:
            PromptError: The document is empty, or no text that tokenizers take.
        """
        if not text.strip():
            raise PromptError("the document is empty; drop it")
        _check_texts([("the document", text)])
        with self._lock:
            ids = tuple(self._chunker.document(text))
        if self._config.alignment == "block":
            pad_len = -len(ids) % self._block_size
            ids += (self._tokenizer.eos_token_id or 0,) * pad_len
        return ids

    def document_layout(self, text: str, title: str) -> PromptLayout:
        """Return a document's chunk as a prompt of its own, to compute it ahead.

        Raises:
            PromptError: As in `document_ids`.
        """
        return build_layout(
            [self.document_ids(text)],
            config=self._config,
            block_size=self._block_size,
            pad_token_id=self._tokenizer.eos_token_id or 0,
            reusable=[True],
            titles=[title],
        )

    def check_len(self, layout: PromptLayout, max_tokens: int) -> int:
        """Return how many tokens can be generated, at most `max_tokens`.

        As in vLLM, only a prompt that leaves no room for a single token is refused;
        an answer that reaches the context's end stops there, with finish reason
        ``"length"``.

        Raises:
            PromptTooLongError: The prompt itself does not fit.
        """
        if layout.prompt_len >= self._max_model_len:
            raise PromptTooLongError(layout.prompt_len, self._max_model_len - 1)
        return min(max_tokens, self._max_model_len - layout.prompt_len)

    def request_wire(
        self,
        layout: PromptLayout,
        *,
        reuse: ReuseMode,
        save_tail: bool = False,
        namespace: str | None = None,
        conversation: str | None = None,
        trace: bool = False,
    ) -> RequestWire:
        """Return what the scheduler side has to know of a prompt.

        Args:
            layout: From `layout`.
            reuse: ``"daric"`` or ``"full_reuse"``; a request with ``"off"`` is an
                ordinary one and carries nothing.
            save_tail: See `RequestWire`.
            namespace: The request's tenant; None is the configuration's.
            conversation: See `RequestWire`.
            trace: See `RequestWire`.

        Raises:
            WireError: `reuse` is something else.
        """
        config = self._config
        if namespace is not None:
            config = replace(config, namespace=namespace)
        return RequestWire(
            ends=tuple(chunk.end for chunk in layout.chunks),
            reusable=tuple(chunk.reusable for chunk in layout.chunks),
            titles=tuple(chunk.title for chunk in layout.chunks),
            mode=reuse,
            config=config,
            save_tail=save_tail,
            conversation=conversation,
            trace=trace,
        )

    def _chunked(self, prompt: ChunkedPrompt | ChatPrompt) -> list[tuple[str, _Ids]]:
        """Return every chunk's title and ids."""
        if isinstance(prompt, ChatPrompt):
            return self._chunker.chunks(prompt.messages, prompt.tools)
        return self._chunker.chunks(prompt.messages())

    def _raw(self, text: str) -> list[_Ids]:
        if not text:
            raise PromptError("the prompt is empty; pass some text")
        delimiter = self._config.delimiter
        pieces = [text] if delimiter is None else split_delimited(text, delimiter)
        if len(pieces) == 1:
            return [self._tokenizer.encode(pieces[0], add_special_tokens=True)]
        if not pieces:
            raise PromptError("the prompt is empty; it holds delimiters only")
        *pieces, last = pieces
        encoder, bos = self._chunker.encoder, self._chunker.bos
        chunks = [encoder.trusted(piece, goes_on=True) for piece in pieces]
        chunks.append(encoder.trusted(last))
        if chunks[0][: len(bos)] != bos:
            chunks[0] = bos + chunks[0]
        return _non_empty(chunks)


def _check_texts(texts: Iterable[tuple[str, str]]) -> None:
    """Refuse text that no tokenizer takes: half a character, as decoders leave it."""
    for name, text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"{name} holds a lone surrogate at character {error.start}; decode it "
                f'with errors="replace"'
            ) from error


def _listed(chunks: Iterable[_Ids]) -> list[_Ids]:
    try:
        return list(chunks)
    except TypeError as error:
        raise PromptError(
            f"TokenPrompt.chunks is a {type(chunks).__name__}; pass a list of lists of "
            f"token ids"
        ) from error


def _non_empty(chunks: Iterable[_Ids]) -> list[_Ids]:
    return [chunk for chunk in chunks if len(chunk)]
