"""The prompt builder: what is kept, what fits, how texts and hashes stay the same."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.engine import ChatMessage, ChatPrompt, ChunkedPrompt, DocumentPart
from daric_rag.errors import ConfigError, PromptError, PromptTooLongError
from daric_rag.prompt import DroppedDocument, PromptBuilder, SourceDocument
from tests.core.chats import FakeTokenizer, chatml, processor

PLAIN = PromptBuilder(system="S")
TITLED = PromptBuilder(document_template="{title} ({source}): {text}")


def words(prompt):
    """A tokenizer of sorts: one token a word, one more a document."""
    texts = [prompt.question, *prompt.texts()]
    return sum(len(text.split()) + 1 for text in texts)


def node(text, score=None, **metadata):
    """As LlamaIndex's `NodeWithScore`, whose `text` refuses other nodes than text."""
    inner = SimpleNamespace(get_content=lambda: text, metadata=metadata)
    return SimpleNamespace(node=inner, score=score, get_content=lambda: text)


# -------------------------------------------------------------------------- documents


def test_documents_of_every_form():
    documents = [
        "Plain.",
        {"text": "Of a dict.", "title": "Dict"},
        SimpleNamespace(page_content="LangChain's.", metadata={"source": "a.txt"}),
        node("LlamaIndex's.", 0.5, title="Node"),
        SimpleNamespace(text="A text node's.", metadata={"file_name": "n.txt"}),
        DocumentPart("A part.", "Part"),
    ]
    built = PLAIN.build(documents, "Q?")
    assert built.prompt.titled_texts() == [
        ("Plain.", "Plain."),
        ("Of a dict.", "Dict"),
        ("LangChain's.", "a.txt"),
        ("LlamaIndex's.", "Node"),
        ("A text node's.", "n.txt"),
        ("A part.", "Part"),
    ]
    assert (built.kept, built.dropped) == (tuple(range(6)), ())
    assert (built.prompt.system, built.prompt.question) == ("S", "Q?")


def test_documents_of_langchain():
    documents = pytest.importorskip("langchain_core.documents")
    document = documents.Document("One.", metadata={"title": "First", "score": 0.3})
    built = TITLED.build([document], "Q?")
    assert built.prompt.titled_texts() == [("First (): One.", "First")]


def test_nodes_of_llama_index():
    schema = pytest.importorskip("llama_index.core.schema")
    text = schema.TextNode(text="One.", metadata={"file_path": "/a/one.txt"})
    other = schema.Document(text="Two.", metadata={"title": "Second"})
    nodes = [schema.NodeWithScore(node=n, score=0.5) for n in (text, other)]
    built = TITLED.build([*nodes, text], "Q?")
    assert built.prompt.texts() == [" (/a/one.txt): One.", "Second (): Two."]
    assert [drop.reason for drop in built.dropped] == ["duplicate"]


def test_a_document_template_writes_what_does_not_change():
    document = node("One {text}.", 0.7, title=" The\nfirst ", url="http://a/b")
    built = TITLED.build([document, "Two."], "Q?")
    assert built.prompt.texts() == [
        "The first (http://a/b): One {text}.",
        " (): Two.",
    ]
    again = TITLED.build(
        [node("One {text}.", 0.1, title="The first", url="http://a/b")], "Q?"
    )
    assert again.prompt.texts() == built.prompt.texts()[:1]


def test_a_function_may_write_documents():
    builder = PromptBuilder(document_template=lambda d: f"<{d.source}>{d.text}")
    document = {"text": "One.", "source": "a"}
    assert builder.build([document], "Q?").prompt.texts() == ["<a>One."]
    with pytest.raises(PromptError, match="returned a NoneType"):
        PromptBuilder(document_template=lambda d: None).build(["One."], "Q?")


def test_a_question_template():
    builder = PromptBuilder(question_template="Q: {question}\nA:")
    assert builder.build([], "Why {so}?").prompt.question == "Q: Why {so}?\nA:"


@pytest.mark.parametrize(
    ("documents", "named"),
    [
        ("text", "documents is a str"),
        ({"text": "a"}, "documents is a dict"),
        (None, "documents is a NoneType"),
        (["a", 5], "document 1 is a int without text"),
        (["a", {"title": "b"}], "document 1 is a dict without text"),
        ([node(5)], "document 0"),
    ],
)
def test_what_is_no_document_is_refused(documents, named):
    for use in (lambda d: PLAIN.build(d, "Q?"), PLAIN.document_texts):
        with pytest.raises(PromptError, match=named):
            use(documents)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"system": 5}, "system is 5"),
        ({"document_template": "{title}"}, r"document_template .* must hold \{text\}"),
        ({"document_template": "{text}{score}"}, "no other fields"),
        ({"document_template": "{text!r}"}, "no other fields"),
        ({"document_template": "{text:>9}"}, "no other fields"),
        ({"document_template": "{text"}, "malformed"),
        ({"document_template": 5}, "document_template is a int"),
        ({"question_template": "Q"}, r"must hold \{question\}"),
        ({"question_template": None}, "question_template is a NoneType"),
        ({"delimiter": ""}, "delimiter is ''"),
        ({"delimiter": " \n"}, "white space"),
        ({"delimiter": "# -_~."}, "leave one of them out"),
        ({"max_documents": 0}, "max_documents is 0"),
        ({"max_documents": True}, "max_documents is True"),
        ({"max_documents": 1.5}, "max_documents is 1.5"),
    ],
)
def test_a_builder_is_checked_at_once(fields, named):
    with pytest.raises(ConfigError, match=named):
        PromptBuilder(**fields)


# ------------------------------------------------------------------- kept and dropped


def test_the_report_says_what_was_dropped_and_why():
    documents = ["One.", " \n", "Two.", " One.\n", "", "Three.", "Four."]
    built = PromptBuilder(max_documents=2).build(documents, "Q?")
    assert built.prompt.texts() == ["One.", "Two."]
    assert built.kept == (0, 2)
    assert built.dropped == (
        DroppedDocument(1, "", "empty"),
        DroppedDocument(3, "One.", "duplicate"),
        DroppedDocument(4, "", "empty"),
        DroppedDocument(5, "Three.", "max_documents"),
        DroppedDocument(6, "Four.", "max_documents"),
    )


def test_duplicates_are_known_by_their_text_not_by_their_title():
    documents = [{"text": "One.", "title": "A"}, {"text": "One.", "title": "B"}]
    assert TITLED.build(documents, "Q?").prompt.texts() == ["A (): One."]
    both = PromptBuilder(dedupe=False).build(documents, "Q?")
    assert both.prompt.texts() == ["One.", "One."]


DOCUMENTS = st.lists(
    st.sampled_from(["a", "b c", " a ", "", "d\n", "e f g"]), max_size=8
)


@given(documents=DOCUMENTS)
def test_dropping_is_idempotent_and_keeps_the_order(documents):
    built = PLAIN.build(documents, "Q?")
    kept = [documents[index] for index in built.kept]
    assert built.prompt.texts() == kept
    assert PLAIN.build(kept, "Q?").dropped == ()
    indices = sorted([*built.kept, *(drop.index for drop in built.dropped)])
    assert indices == list(range(len(documents)))
    assert list(built.kept) == sorted(built.kept)
    assert {text.strip() for text in kept} == {d.strip() for d in documents} - {""}


# ------------------------------------------------------------------------ conversations


def test_a_history_makes_a_conversation():
    history = [
        ("user", "Hi"),
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
    ]
    prompt = PLAIN.build(["One."], "Q?", history).prompt
    assert [m.role for m in prompt.messages] == [
        *("system", "user", "assistant", "assistant", "user")
    ]
    assert prompt.messages[3].parts() == ("Hello.",)
    assert prompt.messages[-1].parts() == (DocumentPart("One.", "One."), "Q?")
    bare = PromptBuilder().build([], "Q?", [("user", "a"), ("assistant", "b")]).prompt
    assert bare == ChatPrompt(
        [*map(ChatMessage, ("user", "assistant"), "ab"), ChatMessage("user", ["Q?"])]
    )


ASKED = ChatMessage("user", "Hi")
CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def history_of(*history):
    """The messages that a history becomes."""
    *earlier, _ = PromptBuilder().build(["One."], "Q?", history).prompt.messages
    return earlier


def test_messages_as_openais_client_dumps_them():
    unused = dict.fromkeys(("refusal", "audio", "function_call", "annotations"))
    dumped = unused | {"role": "assistant", "content": "Hello.", "tool_calls": None}
    calling = unused | {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    refusing = dumped | {"content": None, "refusal": "No.", "reasoning_content": "Hm."}
    asked = {"role": "user", "content": "Hi", "name": None}
    assert history_of(asked, dumped, calling, refusing) == [
        ASKED,
        ChatMessage("assistant", "Hello."),
        ChatMessage("assistant", tool_calls=[CALLED]),
        ChatMessage("assistant", "No."),
    ]
    told = {"role": "developer", "content": "Be kind."}
    assert history_of(told)[0] == ChatMessage("system", "Be kind.")


def test_messages_of_openai():
    chat = pytest.importorskip("openai.types.chat")
    dumped = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    message = chat.ChatCompletionMessage.model_validate(dumped)
    expected = [ASKED, ChatMessage("assistant", tool_calls=[CALLED])]
    assert history_of(("user", "Hi"), message.model_dump()) == expected
    assert history_of(("user", "Hi"), message) == expected


def test_messages_of_langchain():
    messages = pytest.importorskip("langchain_core.messages")
    call = {"name": "f", "args": {"x": 1}, "id": "a"}
    history = [
        messages.SystemMessage("S"),
        messages.HumanMessage("Hi"),
        messages.AIMessage("", tool_calls=[call]),
        messages.ToolMessage("r", tool_call_id="a", name="f"),
        messages.AIMessageChunk(content="So."),
    ]
    called = CALLED | {"function": {"name": "f", "arguments": {"x": 1}}}
    assert history_of(*history) == [
        ChatMessage("system", "S"),
        ASKED,
        ChatMessage("assistant", tool_calls=[called]),
        ChatMessage("tool", "r", tool_call_id="a", name="f"),
        ChatMessage("assistant", "So."),
    ]


def test_messages_of_llama_index():
    llms = pytest.importorskip("llama_index.core.llms")
    history = [
        llms.ChatMessage("Hi", role="user"),
        llms.ChatMessage(
            "", role="assistant", additional_kwargs={"tool_calls": [CALLED]}
        ),
        llms.ChatMessage("r", role="tool", additional_kwargs={"tool_call_id": "a"}),
    ]
    assert history_of(*history) == [
        ASKED,
        ChatMessage("assistant", tool_calls=[CALLED]),
        ChatMessage("tool", "r", tool_call_id="a"),
    ]


def test_a_history_may_begin_with_its_own_system_text():
    history = [("system", "Other."), ("user", "a"), ("assistant", "b")]
    first, *_ = PLAIN.build([], "Q?", history).prompt.messages
    assert first == ChatMessage("system", "Other.")
    roles = [m.role for m in PLAIN.build([], "Q?", history).prompt.messages]
    assert roles == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    "entry",
    [
        "Hi",
        ("user",),
        {"text": "Hi"},
        ("robot", "Hi"),
        {"role": "user", "a": 1},
        {"role": "assistant", "content": None, "function_call": {"name": "f"}},
        SimpleNamespace(content="Hi"),
        SimpleNamespace(role="user", content="Hi", blocks=[SimpleNamespace(url="u")]),
    ],
)
def test_what_is_no_message_is_refused(entry):
    with pytest.raises(PromptError, match=r"history\[1\] is no message"):
        PLAIN.build([], "Q?", [("user", "a"), entry])


def test_the_next_prompt_begins_with_this_one():
    subject = processor(FakeTokenizer(chatml))
    first = PLAIN.build(["One.", "Two."], "What?")
    history = [first.turn, ChatMessage("assistant", "This.")]
    second = PLAIN.build(["Three."], "Why?", history)
    history += [second.turn, ChatMessage("assistant", "So.")]
    third = PLAIN.build([], "Oh?", history)
    shorter, longer, longest = (
        subject.layout(b.prompt) for b in (first, second, third)
    )
    for short, long in ((shorter, longer), (longer, longest)):
        assert long.token_ids[: short.prompt_len] == short.token_ids
        assert long.spans[: short.num_chunks] == short.spans


# --------------------------------------------------------------------------------- fit


def test_everything_fits_with_one_count():
    calls = []

    def count(prompt):
        calls.append(prompt)
        return words(prompt)

    built = PLAIN.fit(["a b", "c"], "q", 7, count)
    assert (built.kept, built.dropped, len(calls)) == ((0, 1), (), 1)


def test_the_last_documents_go_first():
    documents = ["a b", "c", "d e f", "g"]
    built = PLAIN.fit(documents, "q", max_prompt_tokens=9, count=words)
    assert built.kept == (0, 1)
    assert built.dropped == (
        DroppedDocument(2, "d e f", "max_prompt_tokens"),
        DroppedDocument(3, "g", "max_prompt_tokens"),
    )


def test_those_of_the_lowest_score_go_first():
    documents = ["a", "b", "c", "d"]
    built = PLAIN.fit(documents, "q", 6, words, scores=[0.1, 0.9, 0.5, 0.9])
    assert built.kept == (1, 3)
    nodes = [
        node(text, score) for text, score in zip("abcd", (1, 4, 3, 2), strict=True)
    ]
    assert PLAIN.fit(nodes, "q", 6, words).kept == (1, 2)
    # A score that some lack says nothing.
    assert PLAIN.fit([*nodes[:3], "e"], "q", 6, words).kept == (0, 1)
    with pytest.raises(PromptError, match="1 scores for 4 documents"):
        PLAIN.fit(documents, "q", 6, words, scores=[1])


def test_a_question_that_does_not_fit_is_refused():
    with pytest.raises(PromptTooLongError) as caught:
        PLAIN.fit(["a"], "q r s", 3, words)
    assert (caught.value.prompt_len, caught.value.limit) == (4, 3)
    # Without a question one document must stay.
    assert PLAIN.fit(["a", "b"], "", 3, words).kept == (0,)
    with pytest.raises(PromptTooLongError):
        PLAIN.fit(["a b c", "b"], "", 3, words)


def test_a_conversation_may_be_fitted_too():
    def count(prompt):
        assert isinstance(prompt, ChatPrompt)
        return 10 + 5 * len(prompt.messages[-1].parts())

    history = [("user", "a"), ("assistant", "b")]
    assert PLAIN.fit(["a", "b", "c"], "q", 25, count, history=history).kept == (0, 1)


LONG = st.lists(st.integers(1, 400).map(lambda n: f"{n} " + "w " * n), max_size=40)


@given(documents=LONG, limit=st.integers(2, 4000), is_dense=st.booleans())
def test_as_many_documents_fit_as_can(documents, limit, is_dense):
    num_calls = 0

    def count(prompt):
        nonlocal num_calls
        num_calls += 1
        return words(prompt) * (3 if is_dense else 1)

    all_kept = PLAIN.build(documents, "q").kept
    try:
        built = PLAIN.fit(documents, "q", limit, count)
    except PromptTooLongError:
        assert count(ChunkedPrompt(question="q")) > limit
        return
    used_calls = num_calls
    able = [
        i for i in all_kept if count(PLAIN.build([documents[i]], "q").prompt) <= limit
    ]
    # One that does not fit even alone takes a search of its own.
    assert used_calls <= (4 + 6 + 1) * (1 + len(all_kept) - len(able))
    assert count(built.prompt) <= limit
    # Of those that fit alone, what is dropped is a suffix.
    assert list(built.kept) == able[: len(built.kept)]
    if list(built.kept) != able:
        one_more = [documents[i] for i in able[: len(built.kept) + 1]]
        assert count(PLAIN.build(one_more, "q").prompt) > limit


def test_documents_of_like_length_are_fitted_in_a_few_counts():
    num_calls = 0

    def count(prompt):
        nonlocal num_calls
        num_calls += 1
        return words(prompt)

    documents = [f"{i} " + "word " * (80 + i % 7) for i in range(100)]
    assert len(PLAIN.fit(documents, "q", 2000, count).kept) == 23
    assert num_calls <= 4 + 1


def test_documents_of_very_unlike_density_are_fitted_by_halves():
    num_calls = 0

    def count(prompt):
        nonlocal num_calls
        num_calls += 1
        return 1000 if len(prompt.texts()) == 200 else 0

    assert len(PLAIN.fit([f"{i:3}" for i in range(200)], "q", 1, count).kept) == 199
    assert num_calls <= 2 + 3 + 8 + 1


def test_a_document_that_fits_in_no_prompt_keeps_no_other_out():
    texts = ["word " * 500, "the ferry", "word " * 300, "leaves at nine"]
    built = PLAIN.fit(texts, "When?", 50, words)
    assert built.kept == (1, 3)
    assert [dropped.index for dropped in built.dropped] == [0, 2]


# --------------------------------------------------------------------- hashes and order


def test_the_texts_to_prewarm_are_those_of_prompts():
    documents = [{"text": "One.", "title": t} for t in "ABAB"] + ["", "Two."]
    texts = TITLED.document_texts(documents)
    assert texts == ["A (): One.", "B (): One.", " (): Two."]
    # Whichever of them a prompt holds.
    for document in documents:
        if document:
            assert set(TITLED.build([document], "Q?").prompt.texts()) <= set(texts)
    titles = [part.title for part in TITLED.document_parts(documents)]
    assert titles == ["A", "B", "Two."]
    assert PromptBuilder(max_documents=1).document_texts(["a", "b"]) == ["a", "b"]
    assert [part.title for part in PLAIN.document_parts(documents)] == ["A", "Two."]


def test_prewarmed_chunks_are_those_of_the_prompt():
    subject = processor(FakeTokenizer(chatml))
    documents = [{"text": "One.", "title": "A"}, "Two.\n"]
    layout = subject.layout(TITLED.build(documents, "Q?").prompt)
    ids = [layout.token_ids[start:end] for start, end in layout.spans[1:-1]]
    texts = TITLED.document_texts(documents)
    assert ids == [subject.document_ids(text) for text in texts]


def test_a_template_hash_names_systems_and_documents():
    base = PromptBuilder(system="S").template_hash
    assert (
        base
        == PromptBuilder(
            system="S", question_template="Q: {question}", max_documents=3
        ).template_hash
    )
    written = "07fc1e38bd43ddd8"
    assert (len(base), base[:16]) == (64, written)  # stable over versions
    others = [
        PromptBuilder(),
        PromptBuilder(system=""),
        PromptBuilder(system="S", document_template="{title}{text}"),
        PromptBuilder(system="S", document_template=lambda d: d.text),
        PromptBuilder(system="S", document_template=lambda d: d.text + d.title),
        PromptBuilder(system="S", document_template=lambda d: d.text * 2),
    ]
    assert len({base, *(builder.template_hash for builder in others)}) == 7

    def same(document):
        return f"{document.text}"

    assert PromptBuilder(system="S", document_template=same).template_hash == (
        others[3].template_hash
    )


def test_cached_documents_may_come_first():
    documents = [{"text": text, "title": "T"} for text in "abca"]
    asked = []

    def is_cached(text):
        asked.append(text)
        return text in ("T (): b", "T (): a")

    ordered = TITLED.cached_first(documents, is_cached)
    assert [d["text"] for d in ordered] == ["a", "b", "a", "c"]
    assert asked == ["T (): a", "T (): b", "T (): c"]
    assert documents[0]["text"] == "a"


def test_builders_are_values():
    assert PromptBuilder(system="S") == PLAIN
    assert hash(PLAIN) == hash(PromptBuilder(system="S"))
    assert SourceDocument("a") == SourceDocument("a", "", "")
