"""Tools, calls and results as chunks of a conversation."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daric_rag.engine import ChatMessage, ChatPrompt, DocumentPart
from daric_rag.errors import PromptError
from tests.core import chats
from tests.core.chats import FakeTokenizer, at_once, call, chatml, processor, told, tool

CALLED = [
    ChatMessage("user", "Weather?"),
    ChatMessage("assistant", tool_calls=[call("weather", {"city": "Lyon"})]),
    ChatMessage("tool", "Sunny.", tool_call_id="callnine1"),
    ChatMessage("assistant", "It is sunny."),
    ChatMessage("user", "Sure?"),
]


def layout(tokenizer, messages, tools=()):
    subject = processor(tokenizer, max_model_len=10_000)
    return subject.layout(ChatPrompt(messages, tools))


def chunk_ids(tokenizer, messages, tools=()):
    made = layout(tokenizer, messages, tools)
    return [made.token_ids[start:end] for start, end in made.spans]


def chunks(tokenizer, messages, tools=()):
    return [tokenizer.decode(ids) for ids in chunk_ids(tokenizer, messages, tools)]


@pytest.fixture
def lines(tiny_tokenizer):
    tiny_tokenizer.chat_template = chats.TOOL_LINES
    return tiny_tokenizer


@pytest.fixture
def listing(tiny_tokenizer):
    tiny_tokenizer.chat_template = chats.TOOL_LIST
    return tiny_tokenizer


# ------------------------------------------------------------------------------ tools


def test_every_tool_is_a_chunk_between_what_surrounds_them(lines):
    tools = [tool("first"), tool("second")]
    turns = told("Hi", system="Be kind.")
    made = layout(lines, turns, tools)
    assert chunks(lines, turns, tools) == [
        "<|im_start|>system\nBe kind.\n\n# Tools\n<tools>\n",
        json.dumps(tools[0]) + "\n",
        json.dumps(tools[1]) + "\n",
        "</tools>\nCall them.<|im_end|>\n<|im_start|>user\n",
        "Hi<|im_end|>\n<|im_start|>assistant\n",
    ]
    titles = ["(system prompt)", "first", "second", "(chat template)", ""]
    assert [chunk.title for chunk in made.chunks] == titles


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_a_tools_ids_do_not_depend_on_the_other_tools(lines, system):
    turns = told("Hi", "Hello.", "What?", system=system)
    a, b, c = tool("first"), tool("second", description="x"), tool("third")
    ids = chunk_ids(lines, turns, [a])[1]
    for tools in ([a, b], [b, a], [b, a, c], [c, b, a]):
        made = chunk_ids(lines, turns, tools)
        assert made[1 + tools.index(a)] == ids
        assert len(made) == len(tools) + 5


def test_the_order_of_a_tools_fields_does_not_change_its_ids(lines):
    plain = tool("first")
    turned = {"function": dict(reversed(plain["function"].items())), **plain}
    assert next(iter(turned)) == "function"
    turns = told("Hi")
    assert chunk_ids(lines, turns, [turned]) == chunk_ids(lines, turns, [plain])


def test_a_comma_belongs_to_the_tool_before_it(listing):
    tools = [tool("first"), tool("second"), tool("third")]
    a, b, c = map(json.dumps, tools)
    assert chunks(listing, told("Hi"), tools) == [
        "<|bos|>[TOOLS] [",
        a + ", ",
        b + ", ",
        c,
        "][/TOOLS][INST] ",
        "Hi [/INST]",
    ]


def test_tools_that_cannot_be_told_apart_stay_together(tiny_tokenizer):
    tiny_tokenizer.chat_template = chats.TOOL_DECLARATIONS
    tools = [tool("first"), tool("second")]
    assert chunks(tiny_tokenizer, told("Hi"), tools) == [
        "// Does first.\ndef first()\n// Does second.\ndef second()\n<|start|>user\n",
        "Hi<|eot|><|start|>assistant\n",
    ]


@pytest.mark.parametrize("name", ["TOOL_LINES", "TOOL_LIST", "TOOL_DECLARATIONS"])
def test_the_text_is_the_templates_own(tiny_tokenizer, name):
    tiny_tokenizer.chat_template = getattr(chats, name)
    tools = [tool("first"), tool("second", description='Says "<hi>" \u00e9.')]
    for turns in (told("Hi"), told("Hi", "Yes?", "What?"), CALLED[:3], CALLED):
        if name == "TOOL_DECLARATIONS" and turns in (CALLED[:3], CALLED):
            continue  # it writes no calls
        whole = at_once(tiny_tokenizer, turns, tools)
        made = layout(tiny_tokenizer, turns, tools)
        assert tiny_tokenizer.decode(made.token_ids) == whole
        expected = tiny_tokenizer.encode(whole, add_special_tokens=False)
        assert list(made.token_ids) == expected


def test_a_template_without_tools_says_what_to_do_instead():
    tokenizer = FakeTokenizer(lambda messages, tools=None: chatml(messages))
    with pytest.raises(PromptError, match=r"writes no tools \('f'\); describe them in"):
        layout(tokenizer, told("Hi"), [tool("f")])


@pytest.mark.real_model
def test_the_real_template_has_no_tools(real_tokenizer):
    with pytest.raises(PromptError, match="writes no tools"):
        layout(real_tokenizer, told("Hi"), [tool("f")])


@pytest.mark.parametrize(
    ("tools", "named"),
    [
        ("f", "tools is a str"),
        ([{"name": "f"}], r"tools\[0\] is not in OpenAI's form"),
        ([tool("f"), tool("")], r"tools\[1\]"),
        ([tool("f", parameters={1, 2})], "plain JSON"),
        ([{"function": {"name": 5}}], r"tools\[0\]"),
    ],
)
def test_what_is_no_tool_is_refused(tools, named):
    with pytest.raises(PromptError, match=named):
        ChatPrompt(told("Hi"), tools)


# ------------------------------------------------------------------- calls and results


def test_calls_and_results_are_chunks(lines):
    assert chunks(lines, CALLED) == [
        "<|im_start|>user\n",
        "Weather?<|im_end|>\n<|im_start|>assistant\n",
        '<call>{"name": "weather", "arguments": {"city": "Lyon"}}</call><|im_end|>\n'
        "<|im_start|>user\n<result>\n",
        "Sunny.\n</result><|im_end|>\n<|im_start|>assistant\n",
        "It is sunny.<|im_end|>\n<|im_start|>user\n",
        "Sure?<|im_end|>\n<|im_start|>assistant\n",
    ]


@pytest.mark.parametrize("name", ["TOOL_LINES", "TOOL_LIST", "TOOL_JSON"])
def test_a_conversation_with_calls_grows_by_whole_chunks(tiny_tokenizer, name):
    tiny_tokenizer.chat_template = getattr(chats, name)
    grown = [chunk_ids(tiny_tokenizer, CALLED[:n]) for n in (1, 3, 5)]
    for shorter, longer in pairwise(grown):
        assert longer[: len(shorter)] == shorter
        assert len(longer) == len(shorter) + 2


def test_text_beside_a_call_begins_the_turns_chunk(lines):
    calls = [call("weather", {"city": "Lyon"}), call("news", {})]
    turns = [CALLED[0], ChatMessage("assistant", "Let me see.", calls), CALLED[2]]
    assert chunks(lines, turns)[2] == (
        'Let me see.\n<call>{"name": "weather", "arguments": {"city": "Lyon"}}</call>\n'
        '<call>{"name": "news", "arguments": {}}</call><|im_end|>\n'
        "<|im_start|>user\n<result>\n"
    )


def test_text_behind_a_call_stays_with_it():
    def render(messages):
        turns = [
            "".join(c["function"]["name"] for c in m.get("tool_calls", ()))
            + m["content"]
            for m in messages
        ]
        return "".join(f"<|start|>{turn}<|eot|>" for turn in turns) + "<|start|>"

    turns = [CALLED[0], ChatMessage("assistant", "So.", [call("f", {})]), CALLED[2]]
    assert chunks(FakeTokenizer(render), turns)[2] == "fSo.<|eot|><|start|>"


def test_arguments_may_be_text_as_in_openais_answers(lines):
    text = ChatMessage("assistant", tool_calls=[call("weather", '{"city": "Lyon"}')])
    turns = [CALLED[0], text, *CALLED[2:]]
    assert chunk_ids(lines, turns) == chunk_ids(lines, CALLED)
    broken = ChatMessage("assistant", tool_calls=[call("weather", '{"city')])
    assert r'"arguments": "{\"city"}' in "".join(
        chunks(lines, [CALLED[0], broken, CALLED[2]])
    )


def test_results_may_hold_documents(lines):
    result = ChatMessage("tool", [DocumentPart("One."), DocumentPart("Two.")])
    turns = [*CALLED[:2], result]
    assert chunks(lines, turns)[-3:] == [
        "One.\n\n",
        "Two.\n\n",
        "\n</result><|im_end|>\n<|im_start|>assistant\n",
    ]
    ids = chunk_ids(lines, turns)[-3]
    assert ids == processor(lines).document_ids("One.")


def test_results_are_escaped_where_the_template_does(tiny_tokenizer):
    tiny_tokenizer.chat_template = chats.TOOL_JSON
    said = ChatMessage("tool", ' Sun "or"\nrain. ', tool_call_id="callnine1")
    turns = [*CALLED[:2], said, *CALLED[3:]]
    assert chunks(tiny_tokenizer, turns)[3] == (
        ' Sun \\"or\\"\\nrain. "}<|eot|><|start|>assistant<|end|>'
    )
    whole = at_once(tiny_tokenizer, turns)
    ids = layout(tiny_tokenizer, turns).token_ids
    assert list(ids) == tiny_tokenizer.encode(whole, add_special_tokens=False)


def test_documents_are_refused_where_they_would_be_escaped(tiny_tokenizer):
    tiny_tokenizer.chat_template = chats.TOOL_JSON
    result = ChatMessage("tool", [DocumentPart("One."), "Two."])
    with pytest.raises(
        PromptError, match=r"escapes what a tool .* into a user message"
    ):
        layout(tiny_tokenizer, [*CALLED[:2], result])
    user = ChatMessage("user", [DocumentPart("One."), "Sure?"])
    assert chunks(tiny_tokenizer, [*CALLED[:4], user])[-2] == "One.\n\n"


def test_a_result_may_be_empty(lines):
    turns = [*CALLED[:2], ChatMessage("tool", ""), *CALLED[3:]]
    assert chunks(lines, turns)[3].startswith("\n</result>")


def test_a_template_that_writes_the_last_results_only(tiny_tokenizer):
    tiny_tokenizer.chat_template = chats.LAST_RESULTS
    assert chunks(tiny_tokenizer, CALLED[:3])[-1].startswith("Sunny.")
    with pytest.raises(PromptError, match=r"leaves out message 2 \(tool\)"):
        layout(tiny_tokenizer, CALLED)


def test_a_template_that_writes_no_text_beside_calls(listing):
    turns = [*CALLED]
    turns[1] = ChatMessage("assistant", "Let me see.", CALLED[1].tool_calls)
    with pytest.raises(
        PromptError, match=r"message 1 \(assistant\).*beside tool calls"
    ):
        layout(listing, turns)


def test_a_template_without_calls_says_what_to_do_instead():
    with pytest.raises(PromptError, match=r"writes no tool calls \(message 1\); put"):
        layout(FakeTokenizer(chatml), CALLED)


# ------------------------------------------------------------------------------ forgery

SNIPPETS = st.sampled_from(
    [
        *("a", " ", '"', "\\", "\n", "é", "QdaricaZ", "QdaricZ"),
        *("<|im_end|>", "<|im_start|>", "<|eot|>", "<", "|>", "<|", "im_end|>", "</s>"),
    ]
)
FORGED = st.lists(SNIPPETS, min_size=1, max_size=5).map("".join)


@pytest.mark.parametrize("name", ["TOOL_LINES", "TOOL_LIST", "TOOL_JSON"])
@settings(max_examples=50)
@given(forged=st.tuples(*[FORGED] * 6))
def test_no_tool_call_or_result_forges_a_role_marker(tiny_tokenizer, name, forged):
    tiny_tokenizer.chat_template = getattr(chats, name)

    def markers(title, text, key, value, call_id, result):
        parameters = {"type": "object", "properties": {key: {"enum": [value]}}}
        tools = [tool(title, description=text, parameters=parameters)]
        tools = tools if name != "TOOL_JSON" else ()
        made = [{"id": call_id, "function": {"name": title, "arguments": {key: value}}}]
        turns = [
            ChatMessage("user", "Q"),
            ChatMessage("assistant", tool_calls=made),
            ChatMessage("tool", result, tool_call_id=call_id, name=title),
        ]
        ids = layout(tiny_tokenizer, turns, tools).token_ids
        return ids, [i for i in ids if i in tiny_tokenizer.added_tokens_decoder]

    ids, made = markers(*forged)
    assert made == markers(*"abcdef")[1]
    # Not a character is lost.
    shown = [json.dumps(text, ensure_ascii=False) for text in forged]
    result = shown[5] if name == "TOOL_JSON" else forged[5]
    assert shown[0] in tiny_tokenizer.decode(ids)
    assert result in tiny_tokenizer.decode(ids)


def test_markers_of_results_alone_are_safe_too():
    def render(messages):
        return "".join(
            f"<|Bot|>{m['content']}" if m["role"] == "tool" else m["content"]
            for m in messages
        )

    tokenizer = FakeTokenizer(render)
    ids = layout(tokenizer, told("a<|Bot|>b")).token_ids
    assert tokenizer.vocab["<|Bot|>"] not in ids
    assert tokenizer.decode(ids) == "a<|Bot|>b"


def test_a_call_cannot_complete_a_marker_with_the_templates_text():
    def render(messages, tools=None):
        text = "".join(
            m["content"]
            + "".join(c["function"]["name"] for c in m.get("tool_calls", ()))
            for m in messages
        )
        return f"<|start|>{text}|end|>"

    tokenizer = FakeTokenizer(render)
    made = call("x<", {})
    turns = [ChatMessage("user", "Q"), ChatMessage("assistant", tool_calls=[made])]
    ids = layout(tokenizer, [*turns, ChatMessage("tool", "")]).token_ids
    assert tokenizer.decode(ids) == "<|start|>Qx<|end|>"
    assert tokenizer.vocab["<|end|>"] not in ids
