"""Text to token ids where a prompt is put together from many people's texts.

Two rules: role markers come from the chat template alone, and an ordinary text gets
the ids that the template rendered at once would give it. The first one holds for role
markers that are tokens. Where a template writes plain text for them (``[INST]`` of some
vocabularies) the model itself cannot tell a forged one: take such text out yourself.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

__all__ = [
    "BREAK",
    "TextEncoder",
    "TokenCache",
    "Tokenizer",
    "bos_of",
    "set_apart",
]

BREAK = "\n\n"
"""Put behind a text, so that it does not run into the next one."""

_LETTER = "A"


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer. No state of it is changed."""

    @property
    def bos_token_id(self) -> int | None:
        """Token that begins a text."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """End-of-turn token; also the padding of ``alignment="block"``."""
        ...

    @property
    def unk_token_id(self) -> int | None:
        """Token for what the vocabulary lacks."""
        ...

    @property
    def chat_template(self) -> Any:
        """None if the model has no chat template."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens, with attributes ``content`` and ``special``, by id."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's ids."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> Any:
        """Return the rendered conversation; ``tools`` come only if there are any."""
        ...


class TextEncoder:
    """Text to ids, where text that is not ours never becomes a control token.

    Control tokens are all special ones and every added token that the chat template was
    seen to write: some models do not mark their role markers as special, so that a
    tokenizer's ``split_special_tokens`` would let them pass. Where a text spells one,
    it is cut behind that token's first character and tokenised in parts: not a
    character is lost, and the model reads plain text.

    Args:
        tokenizer: The model's.
        template_text: Everything that its chat template writes itself.

    Attributes:
        tags: Spellings of the control tokens that are not special.
    """

    def __init__(self, tokenizer: Tokenizer, template_text: str) -> None:
        """Find out which tokens control the model."""
        self._tokenizer = tokenizer
        self._letter = _letter_id(tokenizer)
        added = tokenizer.added_tokens_decoder
        used = set(self.trusted(template_text))
        # Some vocabularies add blank lines as tokens. They mark no role.
        self._control = frozenset(
            index
            for index, token in added.items()
            if token.special or (index in used and token.content.strip())
        )
        # A plain text may hold what the vocabulary lacks.
        self._forbidden = self._control - {tokenizer.unk_token_id}
        self._id_of = {added[index].content: index for index in self._control}
        self.tags = tuple(
            added[index].content
            for index in sorted(self._control)
            if not added[index].special
        )
        # The longest first, as tokenizers match; else a pattern that matches nothing.
        spellings = sorted(self._id_of, key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, spellings)) or "(?!)")
        self._beginnings = {text[:i] for text in spellings for i in range(1, len(text))}
        self._endings = {text[i:] for text in spellings for i in range(1, len(text))}
        self._longest = len(spellings[0]) if spellings else 0
        self._single = [ord(text) for text in spellings if len(text) == 1]

    def trusted(self, text: str, *, goes_on: bool = False) -> list[int]:
        """Return ids; control tokens in the text are control tokens.

        Args:
            text: To be tokenised alone.
            goes_on: Whether other text follows in the prompt. Trailing white space
                then gets the ids that it has before a word: many tokenizers make one
                token of a blank line at the text's end, and two in its midst.
        """
        if goes_on and self._letter is not None and text[-1:].isspace():
            ids = self._tokenizer.encode(text + _LETTER, add_special_tokens=False)
            if ids[-1:] == [self._letter]:
                return ids[:-1]
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def untrusted(self, text: str, *, goes_on: bool = False) -> list[int]:
        """Return ids as `trusted`; control tokens in the text are plain text."""
        ids = self.trusted(text, goes_on=goes_on)
        if self._control.isdisjoint(ids):
            return ids
        *parts, last = self._cut(text)
        ids = [i for part in parts for i in self.trusted(part)]
        ids += self.trusted(last, goes_on=goes_on)
        # What is left has one character, or is spelt after normalisation only.
        return [i for i in ids if i not in self._forbidden]

    def guarded(self, text: str, mark: str, spared: Collection[str] = ()) -> str:
        """Return somebody's text for a template to write, marked where to cut it.

        The parts between the marks hold no control token but the spared ones, and
        complete none with what stands around them. Control tokens of one character are
        left out.
        """
        text = text.translate(dict.fromkeys(self._single, mark))
        text = mark.join(self._cut(text, spared))
        near = range(1, self._longest)
        if any(text[:n] in self._endings for n in near):
            text = mark + text
        if any(text[-n:] in self._beginnings for n in near):
            text = text + mark
        return text

    def ours(self, parts: Sequence[str], *, goes_on: bool = False) -> list[int]:
        """Return the ids of what a template wrote, cut at the marks of `guarded`."""
        ids: list[int] = []
        for index, part in enumerate(parts):
            ids += self._ours(part, goes_on=goes_on and index == len(parts) - 1)
        return ids

    def mixed(
        self,
        before: Sequence[str],
        text: str,
        after: Sequence[str],
        *,
        goes_on: bool = False,
    ) -> list[int]:
        """Return the ids of somebody's text between what a template wrote.

        They are tokenised as one, but for the marks, unless that changes which control
        tokens there are.
        """
        *head, left = before or ("",)
        right, *tail = after or ("",)
        ends = goes_on and not tail
        whole = self.trusted(left + text + right, goes_on=ends)
        if self._controls(whole) != self._spelt(left) + self._spelt(right):
            whole = self._ours(left) + self.untrusted(text)
            whole += self._ours(right, goes_on=ends)
        return self.ours(head) + whole + self.ours(tail, goes_on=goes_on)

    def _cut(self, text: str, spared: Collection[str] = ()) -> list[str]:
        """Return the text in parts that spell no control token of two characters."""
        parts = []
        start = begin = 0
        while match := self._spelling.search(text, begin):
            if match[0] in spared:
                begin = match.end()
                continue
            parts.append(text[start : match.start() + 1])
            start = begin = match.start() + 1
        return [*parts, text[start:]]

    def _ours(self, text: str, *, goes_on: bool = False) -> list[int]:
        ids = self.trusted(text, goes_on=goes_on)
        if self._controls(ids) == self._spelt(text):
            return ids
        # Somebody's text in it spells a control token after normalisation only.
        ids = []
        start = 0
        for match in self._spelling.finditer(text):
            ids += self.untrusted(text[start : match.start()])
            ids.append(self._id_of[match[0]])
            start = match.end()
        return ids + self.untrusted(text[start:], goes_on=goes_on)

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in self._forbidden]

    def _spelt(self, text: str) -> list[int]:
        ids = [self._id_of[match[0]] for match in self._spelling.finditer(text)]
        return self._controls(ids)


def set_apart(text: str) -> str:
    """Return text that does not run into what follows it."""
    return text if text[-1:].isspace() else text + BREAK


def bos_of(tokenizer: Tokenizer) -> list[int]:
    """Return the one token that the tokenizer itself begins a text with, or none."""
    added = tokenizer.encode("", add_special_tokens=True)
    starts = bool(added) and added[0] == tokenizer.bos_token_id
    return added[:1] if starts else []


def _letter_id(tokenizer: Tokenizer) -> int | None:
    """Return the id of a letter behind white space; None if it is no token then."""
    space = tokenizer.encode("\n", add_special_tokens=False)
    ids = tokenizer.encode("\n" + _LETTER, add_special_tokens=False)
    return ids[-1] if ids[:-1] == space and len(ids) > len(space) else None


class TokenCache:
    """Least recently used token ids of texts, bounded by their characters.

    A key is a text, or several that are tokenised together.
    """

    def __init__(self, capacity_chars: int) -> None:
        self._capacity_chars = capacity_chars
        self._num_chars = 0
        self._ids: OrderedDict[str | tuple[str, ...], Sequence[int]] = OrderedDict()

    def get(self, key: str | tuple[str, ...]) -> Sequence[int] | None:
        """Return a text's ids, if they are held."""
        ids = self._ids.get(key)
        if ids is not None:
            self._ids.move_to_end(key)
        return ids

    def put(self, key: str | tuple[str, ...], ids: Sequence[int]) -> None:
        """Hold a text's ids."""
        self._ids[key] = ids
        self._num_chars += _num_chars(key)
        while self._num_chars > self._capacity_chars:
            oldest, _ = self._ids.popitem(last=False)
            self._num_chars -= _num_chars(oldest)


def _num_chars(key: str | tuple[str, ...]) -> int:
    return len(key) if isinstance(key, str) else sum(map(len, key))
