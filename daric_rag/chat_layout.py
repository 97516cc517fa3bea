"""From conversations to chunks of token ids.

The chat template is rendered once over the whole conversation, with signs in place of
what people wrote (`chat_skeleton`), and cut into these chunks::

    chunk 1           template's opening, system text, opening of the first turn
    tools             one each, where the template writes them
    rest of opening   behind tools only: what follows them, opening of the first turn
    documents         one each, tokenised alone, wherever they stand
    earlier turns     one each: its text, and what the template writes behind it, up to
                      and including the opening of the next turn
    last chunk        last text, template's ending, opening of the answer

A turn thus ends with the next one's role marker, so that the last chunk of a prompt
is a whole chunk of the prompt that goes on with the answer: conversations grow by
whole chunks where the template opens an answer and an earlier one alike. Templates
that rewrite earlier turns (most take out old reasoning) change these chunks. So do
tokenizers that read white space by what follows it, as GPT-2's, where an answer's
opening ends in a blank line: at the prompt's end that is another token than before the
answer's text, and the chunk is computed once more.

Ids of a chunk depend on its neighbours in two cases. Where a template writes tools as a
list, what separates them ends every tool's chunk but the last one's: keep tools in one
order. Without a chat template and a system text, the first document's chunk begins with
the tokenizer's bos: it is found there only if it came first before, and never as it was
pre-warmed. A system text mends that.

A template that knows no system role, or drops it, gets the system text at the start of
the first user message. Role markers come from the template alone, whatever a text
holds, if they are tokens of the vocabulary: see `tokenization`.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from daric_rag.chat_pieces import SYSTEM_TITLE, Piece, cut_rendering, pieces_of
from daric_rag.chat_skeleton import Skeleton, join_parts
from daric_rag.chat_template import ChatTemplate
from daric_rag.errors import PromptError
from daric_rag.prompt_types import ChatMessage
from daric_rag.tokenization import (
    BREAK,
    TextEncoder,
    TokenCache,
    Tokenizer,
    bos_of,
    set_apart,
)

__all__ = ["ChatChunker", "TitledIds"]

TitledIds = tuple[str, Sequence[int]]
"""A chunk's title and ids."""

_MAX_RENDERINGS = 128
_MAX_RENDERED_CHARS = 64 * 1024
_MAX_CACHED_CHARS = 16 * 1024 * 1024


class ChatChunker:
    """Client process. Cuts conversations into chunks; one thread at a time.

    Without a chat template chunk 1 is what the tokenizer itself begins a text with
    (bos) and the system text; without a system text, the first document takes that
    place. Only a lone user message, with or without a system text, is taken then.

    Args:
        tokenizer: The model's.

    Attributes:
        encoder: Of the tokenizer, with all that its template writes.
        bos: What the tokenizer itself begins a text with, at most one id.

    Raises:
        UnsupportedModelError: The chat template cannot be used.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Learn what the chat template does."""
        self._template = (
            ChatTemplate(tokenizer) if tokenizer.chat_template is not None else None
        )
        fixed = self._template.fixed_text() if self._template else ""
        self.encoder = TextEncoder(tokenizer, fixed)
        # What templates look for in an answer, they must find there.
        tags = self.encoder.tags
        self._spared = (
            self._template.looked_for(tags) if self._template else frozenset()
        )
        self.bos = bos_of(tokenizer)
        self._cache = TokenCache(_MAX_CACHED_CHARS)
        self._renderings: OrderedDict[object, str] = OrderedDict()

    def chunks(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[TitledIds]:
        """Return every chunk of a conversation; the last one is the fresh end.

        Raises:
            PromptError: The template refuses the conversation, or leaves out, repeats
                or reorders what is in it.
        """
        if self._template is None:
            return self._untemplated(messages, tools)
        skeleton = Skeleton(messages, tools, self._template, self.encoder, self._spared)
        text = self._rendered(self._template, skeleton)
        pieces = cut_rendering(text, skeleton, self._template)
        return self._encoded(pieces, skeleton.cut)

    def document(self, text: str) -> Sequence[int]:
        """Return the ids of a document's chunk, the same in every prompt."""
        ids = self._cache.get(text)
        if ids is None:
            ids = array("I", self.encoder.untrusted(set_apart(text), goes_on=True))
            self._cache.put(text, ids)
        return ids

    def _untemplated(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> list[TitledIds]:
        *system, user = messages
        if tools or user.role != "user" or any(m.role != "system" for m in system):
            raise PromptError(
                "the tokenizer has no chat template, so that nothing can tell turns "
                "and tools apart; set tokenizer.chat_template, write them into one "
                "user message, or pass TokenPrompt with your own tokenisation"
            )
        opening = list(join_parts([p for message in system for p in message.parts()]))
        if opening and isinstance(opening[-1], str):
            opening[-1] += BREAK
        pieces = pieces_of(opening, SYSTEM_TITLE) + pieces_of(join_parts(user.parts()))
        chunks = self._encoded(pieces, "")
        return [(chunks[0][0], [*self.bos, *chunks[0][1]]), *chunks[1:]]

    def _rendered(self, template: ChatTemplate, skeleton: Skeleton) -> str:
        # Some templates name the day, so that a rendering lasts until midnight.
        key = (json.dumps([skeleton.messages, skeleton.tools]), date.today())
        text = self._renderings.get(key)
        if text is None:
            text = template.render(skeleton.messages, skeleton.tools)
        # What is long is a conversation that has grown, and will not come again.
        if len(text) <= _MAX_RENDERED_CHARS:
            self._renderings[key] = text
            self._renderings.move_to_end(key)
            if len(self._renderings) > _MAX_RENDERINGS:
                self._renderings.popitem(last=False)
        return text

    def _encoded(self, pieces: Sequence[Piece], cut: str) -> list[TitledIds]:
        chunks: list[TitledIds] = []
        for index, piece in enumerate(pieces):
            if piece.document is not None:
                chunks.append((piece.title, self.document(piece.document)))
            elif index == len(pieces) - 1:
                chunks.append(("", self._ids(piece, cut, goes_on=False)))
            else:
                chunks.append((piece.title, self._cached_ids(piece, cut)))
        chunks = [(title, ids) for title, ids in chunks if len(ids)]
        if not chunks:
            raise PromptError("the prompt has no token; pass some text in it")
        return chunks

    def _cached_ids(self, piece: Piece, cut: str) -> Sequence[int]:
        key = (cut, piece.before, piece.text, piece.after)
        ids = self._cache.get(key)
        if ids is None:
            ids = array("I", self._ids(piece, cut, goes_on=True))
            self._cache.put(key, ids)
        return ids

    def _ids(self, piece: Piece, cut: str, *, goes_on: bool) -> list[int]:
        before, after = (
            text.split(cut) if cut else [text] for text in (piece.before, piece.after)
        )
        if not piece.text:
            return self.encoder.ours(before, goes_on=goes_on)
        return self.encoder.mixed(before, piece.text, after, goes_on=goes_on)
