"""Prompts as one delimited text: the same chunks, and no forged boundary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.errors import ConfigError, PromptError
from daric_rag.layout import split_delimited
from daric_rag.prompt import PromptBuilder
from daric_rag.prompt_text import joined, without_delimiter
from tests.core.chats import FakeTokenizer, processor

BUILDER = PromptBuilder(system="Be kind.", delimiter="##")


def test_a_delimited_prompt_has_the_chunks_of_the_structured_one():
    tokenizer = FakeTokenizer(adds_bos=True)
    documents = ["One.", "Two.\n", "", "One.", "- three"]
    text = BUILDER.delimited(documents, "Q?")
    assert text == "Be kind.\n\n##One.\n\n##Two.\n##- three\n\n##Q?"
    delimited = processor(tokenizer, delimiter="##").layout(text)
    structured = processor(tokenizer).layout(BUILDER.build(documents, "Q?").prompt)
    assert delimited.token_ids == structured.token_ids
    assert delimited.spans == structured.spans
    assert [c.reusable for c in delimited.chunks] == [
        c.reusable for c in structured.chunks
    ]


@pytest.mark.parametrize("documents", [[], ["One."], ["One.", "Two."]])
def test_without_a_system_text_too(documents):
    builder = PromptBuilder(delimiter="##")
    tokenizer = FakeTokenizer(adds_bos=True)
    text = builder.delimited(documents, "Q?")
    delimited = processor(tokenizer, delimiter="##").layout(text)
    structured = processor(tokenizer).layout(builder.build(documents, "Q?").prompt)
    assert delimited.token_ids == structured.token_ids
    assert delimited.spans == structured.spans


@pytest.mark.parametrize(
    ("text", "delimiter", "broken"),
    [
        ("a ## b", "##", "a # # b"),
        ("####", "##", "# # # #"),
        ("###", "##", "# # #"),
        ("a<|doc|>b", "<|doc|>", "a< |doc|>b"),
        ("a\n---\nb", "\n---\n", "a\n ---\nb"),
        ("# # a", "# #", "#- # a"),
        ("a§b", "§", "a b"),
        ("none", "##", "none"),
    ],
)
def test_a_forged_delimiter_is_broken_and_readable(text, delimiter, broken):
    assert without_delimiter(text, delimiter) == broken


DELIMITERS = st.sampled_from(
    ["##", "# #", "\n---\n", "<|doc|>", "§", "aba", "\n\n#", "#\n", "- -", "ab"]
)
TEXT = st.text(alphabet="#ab§-<|doc> \n", min_size=1, max_size=12)


@given(texts=st.lists(TEXT, min_size=1, max_size=5), delimiter=DELIMITERS)
def test_no_text_forges_a_boundary(texts, delimiter):
    pieces = split_delimited(joined(texts, delimiter), delimiter)
    assert len(pieces) == len(texts)
    for piece, text in zip(pieces, texts, strict=True):
        # One sign is added, or stands for a delimiter of one character.
        rest = iter(piece)
        assert all(char in rest for char in text if char not in delimiter)
        if delimiter not in text:
            assert piece[: len(text)] == text


@given(
    documents=st.lists(TEXT, max_size=4),
    question=TEXT.filter(str.strip),
    system=st.none() | TEXT,
    delimiter=DELIMITERS,
)
def test_forged_documents_keep_the_chunk_count(documents, question, system, delimiter):
    builder = PromptBuilder(system=system, delimiter=delimiter)
    tokenizer = FakeTokenizer(adds_bos=True)
    text = builder.delimited(documents, question)
    delimited = processor(tokenizer, delimiter=delimiter).layout(text)
    structured = processor(tokenizer).layout(builder.build(documents, question).prompt)
    assert delimited.num_chunks == structured.num_chunks


def test_a_delimited_prompt_needs_delimiter_and_question():
    with pytest.raises(ConfigError, match=r"set PromptBuilder\.delimiter"):
        PromptBuilder().delimited(["One."], "Q?")
    with pytest.raises(PromptError, match="the question is empty"):
        BUILDER.delimited(["One."], " ")
    with pytest.raises(PromptError, match="question is a NoneType"):
        BUILDER.delimited(["One."], None)
