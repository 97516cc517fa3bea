"""Text to token ids where a prompt is put together from many people's texts.

Two rules: role markers come from the chat template alone, and an ordinary text gets
the ids that the template rendered at once would give it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from daric_rag.errors import EngineError, UnsupportedModelError

__all__ = [
    "BREAK",
    "ChatTemplate",
    "TextEncoder",
    "TokenCache",
    "Tokenizer",
    "bos_of",
]

BREAK = "\n\n"
"""Put behind a text, so that it does not run into the next one."""

_LETTER = "A"

# Letters only, so that no template trims them or takes them for a directive.
_USER_PLACEHOLDER = "QdaricUserTextQ"
_SYSTEM_PLACEHOLDER = "QdaricSystemTextQ"


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
        conversation: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> Any:
        """Return the rendered conversation."""
        ...


class TextEncoder:
    """Text to ids, where text that is not ours never becomes a control token.

    Control tokens are all special ones and every added token that the chat template
    writes: some models do not mark their role markers as special, so that a
    tokenizer's ``split_special_tokens`` would let them pass. Where a text spells one,
    it is cut behind that token's first character and tokenised in parts: not a
    character is lost, and the model reads plain text.

    Args:
        tokenizer: The model's.
        template_text: Everything that its chat template writes itself.
    """

    def __init__(self, tokenizer: Tokenizer, template_text: str) -> None:
        """Find out which tokens control the model."""
        self._tokenizer = tokenizer
        self._letter = _letter_id(tokenizer)
        added = tokenizer.added_tokens_decoder
        used = set(self.trusted(template_text))
        self._control = frozenset(
            index for index, token in added.items() if token.special or index in used
        )
        spellings = [added[index].content for index in self._control]
        # Without alternatives, a pattern that matches nothing.
        self._spelling = re.compile("|".join(map(re.escape, spellings)) or "(?!)")

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
        ids = []
        start = 0
        while match := self._spelling.search(text, start):
            ids += self.trusted(text[start : match.start() + 1])
            start = match.start() + 1
        ids += self.trusted(text[start:], goes_on=goes_on)
        # What is left has one character, or is spelt after normalisation only.
        # Except: a plain text may hold what the vocabulary lacks.
        dropped = self._control - {self._tokenizer.unk_token_id}
        return [i for i in ids if i not in dropped]

    def mixed(
        self, before: str, text: str, after: str, *, goes_on: bool = False
    ) -> list[int]:
        """Return the ids of somebody's text between two of our own.

        They are tokenised as one unless that changes which control tokens there are.
        """
        whole = self.trusted(before + text + after, goes_on=goes_on)
        head, tail = self.trusted(before), self.trusted(after, goes_on=goes_on)
        if self.controls(whole) == self.controls([*head, *tail]):
            return whole
        return [*head, *self.untrusted(text), *tail]

    def controls(self, ids: list[int]) -> list[int]:
        """Return the control tokens among the ids, in order."""
        return [i for i in ids if i in self._control]


class ChatTemplate:
    """A tokenizer's chat template, rendered around placeholders.

    A template that refuses or drops a system message gets the system text at the
    start of the user's turn.

    Raises:
        UnsupportedModelError: The template fails, or does not write the user's text
            exactly once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Find out whether the template knows a system role."""
        self._tokenizer = tokenizer
        self._has_system_role = self._probe()

    def fixed_text(self) -> str:
        """Return everything the template writes itself, with and without system."""
        return "".join([*self.render(None), *self.render_apart()])

    def render(self, system: str | None) -> tuple[str, str]:
        """Return the text before and after what the user's turn holds.

        Raises:
            UnsupportedModelError: The template fails, or does not write the user's
                text exactly once.
        """
        user = _USER_PLACEHOLDER
        while system is not None and user in system:
            user += "Q"
        try:
            text = self._apply(system, user)
        except EngineError:  # Of the server that renders, not of the template.
            raise
        except Exception as error:  # Jinja's own, which is not ours to import.
            raise UnsupportedModelError(
                f"the chat template cannot render one user message ({error}); pass "
                f"TokenPrompt with your own tokenisation"
            ) from error
        if text.count(user) != 1:
            raise UnsupportedModelError(
                f"the chat template writes the user's text {text.count(user)} times "
                f"instead of once; pass TokenPrompt with your own tokenisation"
            )
        opening, _, ending = text.partition(user)
        return opening, ending

    def render_apart(self) -> tuple[str, str, str]:
        """Return the text before and after a system text, and after the user's."""
        opening, ending = self.render(_SYSTEM_PLACEHOLDER)
        before, _, between = opening.partition(_SYSTEM_PLACEHOLDER)
        return before, between, ending

    def _probe(self) -> bool:
        self._has_system_role = True
        try:
            text = self._apply(_SYSTEM_PLACEHOLDER, _USER_PLACEHOLDER)
        except EngineError:
            raise
        except Exception:
            return False
        return text.count(_SYSTEM_PLACEHOLDER) == 1 and text.find(
            _SYSTEM_PLACEHOLDER
        ) < text.find(_USER_PLACEHOLDER)

    def _apply(self, system: str | None, user: str) -> str:
        messages = [{"role": "user", "content": user}]
        if system is not None and self._has_system_role:
            messages.insert(0, {"role": "system", "content": system})
        elif system:
            messages[0]["content"] = system + BREAK + user
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        )


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
    """Least recently used token ids of documents, bounded by their characters."""

    def __init__(self, capacity_chars: int) -> None:
        self._capacity_chars = capacity_chars
        self._num_chars = 0
        self._ids: OrderedDict[str, Sequence[int]] = OrderedDict()

    def get(self, text: str) -> Sequence[int] | None:
        """Return a text's ids, if they are held."""
        ids = self._ids.get(text)
        if ids is not None:
            self._ids.move_to_end(text)
        return ids

    def put(self, text: str, ids: Sequence[int]) -> None:
        """Hold a text's ids."""
        self._ids[text] = ids
        self._num_chars += len(text)
        while self._num_chars > self._capacity_chars:
            oldest, _ = self._ids.popitem(last=False)
            self._num_chars -= len(oldest)
