"""Messages and conversations refuse what no template could render as it is meant."""

from dataclasses import FrozenInstanceError, fields
from types import SimpleNamespace

import pytest

from daric_rag.document_text import score_of, source_of, text_of, title_of
from daric_rag.engine import ChatMessage, ChatPrompt, ChunkedPrompt, DocumentPart
from daric_rag.errors import PromptError
from tests.core.chats import call, told


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"role": "robot"}, "role is 'robot'; it must be one of system, user"),
        ({"role": ["user"]}, "role is"),
        ({"role": "user", "content": 5}, "content is a int"),
        ({"role": "user", "content": None}, "content is a NoneType"),
        ({"role": "user", "content": ["a", 5]}, "content holds a int"),
        ({"role": "user", "content": [{"text": "a"}]}, "content holds a dict"),
        ({"role": "user", "tool_calls": [call("f", {})]}, "a user message has tool"),
        ({"role": "assistant", "tool_calls": "f"}, "tool_calls is a str"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, r"tool_calls\[0\]"),
        ({"role": "assistant", "tool_calls": [call("f", {1, 2})]}, "plain JSON"),
        ({"role": "assistant", "content": [DocumentPart("a")]}, "DocumentPart; put"),
        ({"role": "tool", "tool_call_id": 5}, "tool_call_id is a int"),
        ({"role": "tool", "name": b"f"}, "name is a bytes"),
    ],
)
def test_what_is_no_message_is_refused(wrong, named):
    with pytest.raises(PromptError, match=named):
        ChatMessage(**wrong)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "must end with a message to answer"),
        (told("a", "b"), "must end with a message to answer"),
        ([ChatMessage("system", "a")], "must end with a message to answer"),
        ([{"role": "user", "content": "a"}], "message 0 is a dict"),
        ([SimpleNamespace()], "message 0 is a types.SimpleNamespace"),
        ("a", "messages is a str"),
        (None, "messages is a NoneType"),
        (told("a", "b", " \n"), r"message 2 \(user\) is empty"),
        (
            [ChatMessage("user", [DocumentPart(" "), ""]), *told("a")],
            r"message 0 \(user\) is empty",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(messages, named):
    with pytest.raises(PromptError, match=named):
        ChatPrompt(messages)


def test_tools_nested_beyond_reason_are_refused():
    nested = {}
    for _ in range(100_000):
        nested = {"a": nested}
    tool = {"function": {"name": "f", "parameters": nested}}
    with pytest.raises(PromptError, match="plain JSON"):
        ChatPrompt(told("a"), [tool])


@pytest.mark.parametrize("wrong", [{"text": 5}, {"text": "a", "title": None}])
def test_a_document_part_is_text(wrong):
    with pytest.raises(PromptError, match="DocumentPart"):
        DocumentPart(**wrong)


def test_blank_documents_and_empty_texts_are_no_parts():
    message = ChatMessage("user", ["", DocumentPart(" \n"), " ", DocumentPart("a")])
    assert message.parts() == (" ", DocumentPart("a"))
    assert message.has_documents
    assert ChatMessage("tool", "").parts() == ()


def test_messages_are_immutable():
    for value in (ChatMessage("user", "a"), DocumentPart("a"), ChatPrompt(told("a"))):
        name = fields(value)[0].name
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)


def test_a_chunked_prompt_is_a_conversation_of_one_question():
    prompt = ChunkedPrompt(system="S", documents=["One.", ""], question="Q?")
    assert prompt.messages() == (
        ChatMessage("system", "S"),
        ChatMessage("user", [DocumentPart("One.", "One."), "Q?"]),
    )
    assert [m.role for m in ChunkedPrompt(question="Q?").messages()] == ["user"]


class Picky:
    """As LlamaIndex's `NodeWithScore` around a node that is no text."""

    node = SimpleNamespace(text=None, get_content=lambda: "content", metadata={"a": 1})
    score = 0.25

    @property
    def text(self):
        raise ValueError("no text")


def test_text_title_source_and_score_are_found_wherever_they_are():
    assert text_of(0, Picky()) == "content"
    assert title_of(Picky(), "content\nof it") == "content of it"
    assert (source_of(Picky()), score_of(Picky())) == ("", 0.25)
    page = SimpleNamespace(page_content="a", metadata={"url": "u", "title": " "})
    assert (title_of(page, "a"), source_of(page), score_of(page)) == ("u", "u", None)
    listed = {"text": "a", "title": "T", "source": "s", "score": 1}
    assert (title_of(listed, "a"), source_of(listed), score_of(listed)) == ("T", "s", 1)
    assert score_of({"score": True}) is None
