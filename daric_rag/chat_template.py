"""A tokenizer's chat template: what it can render, and what it writes where.

What a template does with a conversation is learned by rendering short ones around
placeholders, never by reading the template.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from daric_rag.errors import (
    ConfigError,
    EngineError,
    PromptError,
    UnsupportedModelError,
    WireError,
)
from daric_rag.tokenization import Tokenizer

__all__ = ["ChatTemplate", "ToolFrame"]

# Letters only, so that no template trims or escapes them or takes them for a directive.
_TEXT = "QdaricTextQ"
_SYSTEM = "QdaricSystemTextQ"
_TOOLS = ("QdaricToolAQ", "QdaricToolBQ")

_ROLES = ("system", "user", "tool")

# Some templates take call ids of nine letters and digits only.
_CALL_ID = "daricCall"

_Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFrame:
    """What a template writes around a tool's description.

    Attributes:
        opening: Before the tool's name, the same for every tool.
        ending: Behind the last tool, up to the next text that is not the template's.
    """

    opening: str
    ending: str


class ChatTemplate:
    """A tokenizer's chat template, rendered around placeholders.

    Attributes:
        has_system_role: Whether it writes a system message, in front of the user's. If
            not, the system text belongs at the start of the first user message.

    Raises:
        UnsupportedModelError: The template fails on a lone user message, or does not
            write the user's text exactly once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Find out whether the template knows a system role."""
        self._tokenizer = tokenizer
        self.has_system_role = self._probe_system()
        self._check_user()
        self.answer_opening = cache(self._answer_opening)
        self.tool_frame = cache(self._tool_frame)
        self.trims = cache(self._trims)
        self.keeps = cache(self._keeps)

    def render(
        self, messages: Sequence[_Message], tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """Return the rendered conversation, up to where the answer begins.

        Raises:
            PromptError: The template refuses the conversation.
        """
        variables = {"tools": list(tools)} if tools else {}
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tokenize=False,
                    add_generation_prompt=True,
                    **variables,
                )
            )
        except (EngineError, ConfigError, WireError):
            # Of the server that renders or of what stands before it, not of a template.
            raise
        except Exception as error:  # Jinja's own, which is not ours to import.
            raise PromptError(
                f"the chat template refuses the conversation ({error}); give it the "
                f"roles in the order that the model was trained on, for most models "
                f"user and assistant in turn, or pass TokenPrompt"
            ) from error

    def fixed_text(self) -> str:
        """Return all that the template writes itself around the messages it takes."""
        conversations = [_ending_in(role, _TEXT) for role in _ROLES]
        answer = _assistant("B")
        # Some open and close reasoning only where they are handed some.
        reasoned = answer | {"reasoning_content": "C"}
        conversations += [[_user("A"), a, _user(_TEXT)] for a in (answer, reasoned)]
        conversations.append(_ending_in("tool", _TEXT, reasoned))
        rendered = [self._try(messages) for messages in conversations]
        rendered.append(self._try([_user(_TEXT)], [_tool(_TOOLS[0])]))
        return "".join(filter(None, rendered))

    def looked_for(self, tags: Sequence[str]) -> frozenset[str]:
        """Return which tags it looks for in answers, as for those around reasoning.

        Tags stand in an answer, together and each alone, and then letters in place of
        one: a template that does not look for it writes both alike.
        """
        none, every = frozenset[str](), frozenset(tags)
        shown, hidden = self._answers(tags, none), self._answers(tags, every)
        if not _differ(shown, hidden):
            return none
        return frozenset(
            tag
            for tag in tags
            if _differ(self._answers(tags, {tag}), shown)
            or _differ(self._answers(tags, every - {tag}), hidden)
        )

    def _answers(
        self, tags: Sequence[str], hidden: Collection[str]
    ) -> list[str | None]:
        """Return renderings of answers with these tags, some hidden from it."""
        letters = {tag: f"QdaricTag{'a' * n}Q" for n, tag in enumerate(tags)}
        texts = [letters[tag] if tag in hidden else tag for tag in tags]
        answer = "".join(f"B{text}" for text in texts) + "B"
        rendered = [
            self._try([_user("A"), _assistant(answer), _user(_TEXT)]),
            self._try(_ending_in("tool", _TEXT, _assistant(answer))),
        ]
        for tag, letter in letters.items():
            rendered = [text and text.replace(letter, tag) for text in rendered]
        return rendered

    def _answer_opening(self, role: str) -> str | None:
        """Return what stands between a message's text and the answer to it.

        Args:
            role: ``"user"`` or ``"tool"``; None is returned for others.
        """
        if role not in ("user", "tool"):
            return None
        text = self._try(_ending_in(role, _TEXT)) or ""
        return text.partition(_TEXT)[2] if text.count(_TEXT) == 1 else None

    def _trims(self, role: str) -> bool:
        """Return whether white space around a message's text is taken off."""
        bare = self._try(_ending_in(role, _TEXT))
        return bare is not None and bare == self._try(
            _ending_in(role, f" \n{_TEXT}\n ")
        )

    def _keeps(self, role: str) -> bool:
        """Return whether a message's text is written as it is, not escaped."""
        text = f'{_TEXT}"\n\\{_TEXT}'
        return text in (self._try(_ending_in(role, text)) or "")

    def _tool_frame(self, with_system: bool) -> ToolFrame | None:
        """Return what stands around tools; None if they cannot be told apart."""
        messages = [_user(_TEXT)]
        if with_system and self.has_system_role:
            messages.insert(0, _system(_SYSTEM))
        text = self._try(messages, [_tool(name) for name in _TOOLS])
        first, second = _TOOLS
        if text is None or not text.count(first) == text.count(second) == 1:
            return None
        before, _, rest = text.partition(first)
        between, found, behind = rest.partition(second)
        if not found:
            return None
        ends = [behind.find(name) for name in (_SYSTEM, _TEXT) if name in behind]
        behind = behind[: min(ends)] if ends else behind
        # Behind a name: the rest of its tool, what separates tools, the next opening.
        rest_len = _num_shared(between, behind)
        opening_len = _num_shared(before[::-1], between[::-1])
        # What separates tools may also follow the last one: all then end alike.
        opening_len = min(opening_len, len(between) - rest_len)
        opening = between[len(between) - opening_len :]
        return ToolFrame(opening, behind[rest_len:])

    def _probe_system(self) -> bool:
        text = self._try([_system(_SYSTEM), _user(_TEXT)]) or ""
        return text.count(_SYSTEM) == 1 and text.find(_SYSTEM) < text.find(_TEXT)

    def _check_user(self) -> None:
        mend = "pass TokenPrompt with your own tokenisation"
        try:
            text = self.render([_user(_TEXT)])
        except PromptError as error:
            raise UnsupportedModelError(
                f"the chat template cannot render one user message "
                f"({error.__cause__}); {mend}"
            ) from error.__cause__
        if text.count(_TEXT) != 1:
            raise UnsupportedModelError(
                f"the chat template writes the user's text {text.count(_TEXT)} times "
                f"instead of once; {mend}"
            )

    def _try(
        self, messages: Sequence[_Message], tools: Sequence[dict[str, Any]] = ()
    ) -> str | None:
        try:
            return self.render(messages, tools)
        except PromptError:
            return None


def _num_shared(left: str, right: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _differ(left: Sequence[str | None], right: Sequence[str | None]) -> bool:
    """Return whether a rendering differs from its counterpart, where there are both."""
    pairs = zip(left, right, strict=True)
    return any(a != b for a, b in pairs if a is not None and b is not None)


def _ending_in(role: str, text: str, answer: _Message | None = None) -> list[_Message]:
    """Return a short conversation around one message of that role.

    Args:
        role: Of the message.
        text: What it says.
        answer: The assistant's message before a tool's; its calls are added.
    """
    if role == "system":
        return [_system(text), _user("A")]
    if role == "user":
        return [_user(text)]
    calling = (answer or _assistant("")) | {"tool_calls": [_call(_TOOLS[0])]}
    result = {"role": "tool", "content": text, "name": _TOOLS[0]}
    return [_user("A"), calling, result | {"tool_call_id": _CALL_ID}]


def _user(text: str) -> _Message:
    return {"role": "user", "content": text}


def _system(text: str) -> _Message:
    return {"role": "system", "content": text}


def _assistant(text: str) -> _Message:
    return {"role": "assistant", "content": text}


def _call(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"key": "value"}}
    return {"id": _CALL_ID, "type": "function", "function": function}


def _tool(name: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    function = {"name": name, "description": "What.", "parameters": parameters}
    return {"type": "function", "function": function}
