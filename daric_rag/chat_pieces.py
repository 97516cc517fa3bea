"""Where a rendered conversation is cut: from a text with signs to chunks' texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from daric_rag.chat_skeleton import Part, Sign, Skeleton
from daric_rag.chat_template import ChatTemplate, ToolFrame
from daric_rag.document_text import one_line, title_of
from daric_rag.errors import PromptError
from daric_rag.prompt_types import DocumentPart
from daric_rag.tokenization import set_apart

__all__ = ["SYSTEM_TITLE", "Piece", "cut_rendering", "pieces_of"]

SYSTEM_TITLE = "(system prompt)"
_TEMPLATE_TITLE = "(chat template)"
_TITLES = {
    "system": "(system message)",
    "user": "(user message)",
    "assistant": "(assistant message)",
    "tool": "(tool result)",
}


@dataclass(slots=True)
class Piece:
    """A chunk before tokenisation.

    Attributes:
        title: What the store's listing calls it.
        before: Written by the template.
        text: Somebody's, if not a document.
        after: Written by the template.
        document: The text of a document, which then is the whole chunk.
    """

    title: str
    before: str = ""
    text: str = ""
    after: str = ""
    document: str | None = None

    @property
    def is_something(self) -> bool:
        """Whether there is anything to tokenise."""
        return bool(self.before or self.text or self.after or self.document)

    @property
    def tail(self) -> str:
        """What the template wrote last."""
        return self.after if self.text else self.before

    @tail.setter
    def tail(self, tail: str) -> None:
        if self.text:
            self.after = tail
        else:
            self.before = tail


def pieces_of(parts: Sequence[Part], title: str = "") -> list[Piece]:
    """Return a message's parts, each in a piece of its own."""
    pieces = []
    for index, part in enumerate(parts):
        if isinstance(part, DocumentPart):
            named = title_of(part, part.text)
            pieces.append(Piece(named, document=part.text))
        else:
            last = index == len(parts) - 1
            pieces.append(Piece(title, text=part if last else set_apart(part)))
    return pieces


def cut_rendering(text: str, skeleton: Skeleton, template: ChatTemplate) -> list[Piece]:
    """Return the pieces of a rendered conversation, in order; see `chat_layout`.

    Args:
        text: What the template made of the skeleton.
        skeleton: Its signs say what stands where.
        template: Says how it opens answers and frames tools.

    Raises:
        PromptError: The template left out, repeated or reordered what is in it.
    """
    opening, found = skeleton.split(text)
    _check_counts(skeleton, [sign for sign, _ in found])
    _check_order([sign for sign, _ in found])
    with_system = skeleton.messages[0]["role"] == "system"
    frame = _frame(opening, found, template, with_system=with_system)
    num_tools = len(skeleton.tools)
    cutter = _Cutter(template, frame)
    cutter.write(opening)
    for sign, behind in found:
        cutter.pass_sign(sign)
        cutter.write(behind)
        if sign.kind == "tool" and sign.index == num_tools - 1:
            cutter.end_tools()
    return cutter.close()


class _Cutter:
    """Walks over a rendering and opens a new piece wherever a chunk begins."""

    def __init__(self, template: ChatTemplate, frame: ToolFrame | None) -> None:
        self._template = template
        self._frame = frame
        self._pieces: list[Piece] = []
        self._piece = Piece(SYSTEM_TITLE)
        self._last: Sign | None = None
        self._behind_sign = 0  # where in the tail the text behind it begins

    def write(self, text: str) -> None:
        self._behind_sign = len(self._piece.tail)
        self._piece.tail += text

    def pass_sign(self, sign: Sign) -> None:
        if sign.kind == "content":
            self._put_parts(sign)
        elif sign.kind == "start":
            self._open(Piece(_TITLES[sign.role]))
        elif sign.kind == "tool":
            if self._frame is not None:
                offset = len(self._piece.tail) - len(self._frame.opening)
                self._cut(offset, one_line(sign.text))
        elif sign.role == "assistant":
            self._begin_answer(sign)
        self._last = sign

    def end_tools(self) -> None:
        ending = self._frame.ending if self._frame is not None else ""
        if ending and self._piece.tail.endswith(ending):
            self._cut(len(self._piece.tail) - len(ending), _TEMPLATE_TITLE)

    def close(self) -> list[Piece]:
        self._open(Piece(""))
        return self._pieces

    def _put_parts(self, sign: Sign) -> None:
        title = SYSTEM_TITLE if sign.leads else _TITLES[sign.role]
        pieces = pieces_of(sign.parts, title)
        if not sign.leads:
            self._open(Piece(title))
        elif pieces and pieces[0].document is None and not self._piece.text:
            self._piece.text = pieces.pop(0).text
        for piece in pieces:
            self._open(piece)
        if self._piece.document is not None:
            self._open(Piece(title))

    def _begin_answer(self, sign: Sign) -> None:
        """Cut before an earlier answer, as where the prompt to it ended."""
        last = self._last
        if last is not None and last.index == sign.index and last.kind != "content":
            return  # already begun, by its text or another call
        tail, title = self._piece.tail, _TITLES["assistant"]
        opening = self._template.answer_opening(last.role) if last is not None else None
        if opening is not None and tail.startswith(opening, self._behind_sign):
            self._cut(self._behind_sign + len(opening), title)
        elif sign.kind == "end" and tail.endswith(sign.text.lstrip()):
            self._cut(len(tail) - len(sign.text.lstrip()), title)

    def _cut(self, offset: int, title: str) -> None:
        tail = self._piece.tail
        self._piece.tail = tail[:offset]
        self._open(Piece(title, before=tail[offset:]))

    def _open(self, piece: Piece) -> None:
        if self._piece.is_something:
            self._pieces.append(self._piece)
        self._piece = piece


def _frame(
    opening: str,
    found: Sequence[tuple[Sign, str]],
    template: ChatTemplate,
    *,
    with_system: bool,
) -> ToolFrame | None:
    """Return what frames the tools, if it is there around each of them."""
    frame = template.tool_frame(with_system)
    in_front = [opening, *(behind for _, behind in found)]
    tools = [i for i, (sign, _) in enumerate(found) if sign.kind == "tool"]
    names = {found[i][0].index for i in tools}
    if frame is None or len(names) < len(tools):
        return None
    fits = all(in_front[i].endswith(frame.opening) for i in tools)
    return frame if fits else None


def _check_counts(skeleton: Skeleton, found: Sequence[Sign]) -> None:
    counts = Counter(sign.number for sign in found)
    for sign in skeleton.signs:
        count = counts[sign.number]
        if count == 0:
            raise PromptError(_left_out(sign))
        if count > 1 and sign.kind not in ("call", "tool"):
            raise PromptError(
                f"the chat template writes message {sign.index} ({sign.role}) {count} "
                f"times instead of once; leave it out, or pass TokenPrompt with your "
                f"own tokenisation"
            )


def _check_order(found: Sequence[Sign]) -> None:
    # Where a system text stands is the template's own affair: some put it into the
    # last user message.
    order = [
        sign.index
        for sign in found
        if sign.kind in ("content", "end") and sign.role != "system"
    ]
    if order != sorted(order):
        raise PromptError(
            f"the chat template writes messages in the order {order}; pass them in "
            f"that order, or pass TokenPrompt with your own tokenisation"
        )


def _left_out(sign: Sign) -> str:
    if sign.kind == "tool":
        return (
            f"the chat template writes no tools ({sign.text!r}); describe them in the "
            f"system text, or take a model whose template has tools"
        )
    if sign.kind == "call":
        return (
            f"the chat template writes no tool calls (message {sign.index}); put the "
            f"call into the message's text, or take a model whose template has tools"
        )
    return (
        f"the chat template leaves out message {sign.index} ({sign.role}); leave it "
        f"out yourself, or put what it says into a message that is written (some "
        f"templates write no text beside tool calls, or the last tool results only)"
    )
