"""The client's vocabulary refuses bad input before any work."""

import math
from dataclasses import FrozenInstanceError, dataclass, fields
from types import SimpleNamespace

import pytest

from daric_rag.engine import (
    ChunkedPrompt,
    Completion,
    Delta,
    Engine,
    GenerationOptions,
    ReuseStats,
    TokenPrompt,
)
from daric_rag.errors import ConfigError, DaricError, PromptError


def test_documents_may_be_texts_or_carry_them():
    documents = ["a", SimpleNamespace(page_content="b"), SimpleNamespace(text="c")]
    assert ChunkedPrompt(documents=documents).texts() == ["a", "b", "c"]


def test_empty_documents_are_dropped_and_the_others_kept_to_the_letter():
    documents = ["", " a\n", "  \n", SimpleNamespace(text="")]
    assert ChunkedPrompt(documents=documents).texts() == [" a\n"]


@pytest.mark.parametrize(
    ("metadata", "title"),
    [
        ({"title": "The Mill"}, "The Mill"),
        ({"source": "a/mill.txt"}, "a/mill.txt"),
        ({"file_name": "mill.txt", "source": ""}, "mill.txt"),
        ({"title": 7}, "It was built"),
        (None, "It was built"),
        ({"title": " two\nlines "}, "two lines"),
        ({"title": "\x1b[31mred\ud800"}, "?[31mred?"),
        ({"title": "x" * 200}, "x" * 80),
    ],
)
def test_a_title_is_one_printable_line(metadata, title):
    document = SimpleNamespace(page_content="It was\n built", metadata=metadata)
    titled = ChunkedPrompt(documents=["", document]).titled_texts()
    assert titled == [("It was\n built", title)]


def test_texts_may_be_read_twice():
    prompt = ChunkedPrompt(documents=("a", "b"))
    assert prompt.texts() == prompt.texts() == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "empty"),
        ({"system": "s"}, "empty"),
        ({"documents": ["", " "], "question": "\n"}, "empty"),
        ({"documents": "text"}, "documents is a str"),
        ({"documents": None, "question": "q"}, "documents is a NoneType"),
        ({"documents": iter(["a"])}, "documents is a list_iterator"),
        ({"documents": {"a": 1}}, "documents is a dict"),
        ({"documents": ["a", 5]}, "document 1 is a int"),
        ({"documents": [SimpleNamespace(text=5)]}, "document 0"),
        ({"question": None}, "question is a NoneType"),
        ({"question": b"q"}, "question is a bytes"),
        ({"question": "q", "system": 5}, "system is a int"),
    ],
)
def test_what_no_prompt_can_be_made_of_is_refused(fields, named):
    with pytest.raises(PromptError, match=named):
        ChunkedPrompt(**fields)


def test_a_question_alone_or_documents_alone_are_a_prompt():
    assert ChunkedPrompt(question="q").texts() == []
    assert ChunkedPrompt(documents=["d"]).question == ""


def test_prompts_and_options_are_immutable():
    for value in (ChunkedPrompt(question="q"), TokenPrompt([[1]]), GenerationOptions()):
        name = fields(value)[0].name
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)


BAD_OPTIONS = {
    "max_tokens": [0, -1, 1.0, True, None, "8"],
    "temperature": [-0.1, math.nan, math.inf, -math.inf, "0", None, True],
    "top_p": [0, 0.0, -0.5, 1.1, math.nan, "1", None, True],
    "logprobs": [-1, 1.5, True, "5"],
    "seed": [-1, 1.5, True, "5", 2**63],
    "reuse": ["on", "", None, True, ["daric"]],
    "stop": ["", ["a", ""], ["a", 5], 5, b"a", [None], {"a": 1}, iter("a")],
    "ignore_eos": [1, None, "yes"],
    "trace": [0, None, "yes"],
    "conversation": ["", 5, b"id"],
    "namespace": ["", 5, b"id"],
    "n": [0, -1, 1.0, True, None, "2", 2**63],
    "priority": [0.5, True, None, "1", 2**63, -(2**63) - 1],
    "top_k": [-1, 1.0, True, None, "1"],
    "min_p": [-0.1, 1.1, math.nan, True, None, "0"],
    "presence_penalty": [-2.1, 2.1, math.nan, True, None, "0"],
    "frequency_penalty": [-2.1, 2.1, math.nan, True, None, "0"],
    "repetition_penalty": [0, -1, math.nan, math.inf, True, None, "1"],
    "json_object": [1, None, "yes"],
    "json_schema": ["{}", 5, [{}], True],
    "structural_tag": ["{}", 5, [{}]],
    "regex": [5, b"a", ["a"]],
    "choice": ["yes", [], [""], [5], 5, {"yes": 1}],
    "skip_special_tokens": [0, None, "no"],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD_OPTIONS.items() for value in values],
)
def test_bad_options_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"^{name} is .*must be"):
        GenerationOptions(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"temperature": 0, "top_p": 1},
        {"temperature": 2.5, "top_p": 0.01},
        {"logprobs": 0, "seed": 0},
        {"logprobs": None, "seed": None, "namespace": None, "stop": None},
        {"conversation": None, "namespace": "tenant"},
        {"stop": []},
        {"stop": ("a", "b")},
        {"reuse": "off"},
        {"reuse": "full_reuse", "conversation": "c", "ignore_eos": True},
        {"n": 3, "temperature": 0.7},
        {"n": 1, "temperature": 0.0},
        {"priority": -(2**63)},
        {"priority": 7},
        {"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.3},
        {"presence_penalty": -2, "frequency_penalty": 2.0},
    ],
)
def test_good_options_are_kept(options):
    made = GenerationOptions(**options)
    assert {name: getattr(made, name) for name in options} == options


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("options", "guide"),
    [
        ({}, None),
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
        ({"json_schema": {}}, {"json": {}}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "[0-9]+"}, {"regex": "[0-9]+"}),
        ({"choice": ("yes", "no")}, {"choice": ["yes", "no"]}),
        ({"structural_tag": {"type": "a"}}, {"structural_tag": '{"type": "a"}'}),
    ],
)
def test_what_guides_decoding_has_vllms_names(options, guide):
    assert GenerationOptions(**options).structured_outputs == guide


@pytest.mark.parametrize(
    "options",
    [
        {"json_schema": SCHEMA, "json_object": True},
        {"regex": "a", "choice": ["a"]},
        {"structural_tag": {}, "json_schema": {}},
    ],
)
def test_only_one_thing_guides_decoding(options):
    with pytest.raises(ConfigError, match=r"cannot be combined; pass one"):
        GenerationOptions(**options)


@pytest.mark.parametrize("schema", [{"a": object()}, {"a": math.nan}, {1: {2, 3}}])
def test_a_schema_is_plain_json(schema):
    with pytest.raises(ConfigError, match="json_schema must be plain JSON"):
        GenerationOptions(json_schema=schema)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_several_greedy_answers_are_refused(temperature):
    with pytest.raises(ConfigError, match=r"greedy.*temperature above 0.*or n=1"):
        GenerationOptions(n=2, temperature=temperature)


@pytest.mark.parametrize(
    ("stop", "as_list"),
    [(None, []), ("a", ["a"]), (["a", "b"], ["a", "b"]), (("a",), ["a"])],
)
def test_stop_strings_as_a_list(stop, as_list):
    assert GenerationOptions(stop=stop).stop_list == as_list


def test_every_option_is_checked_or_needs_no_check():
    assert {field.name for field in fields(GenerationOptions)} == set(BAD_OPTIONS)


def test_reuse_stats_add_up():
    stats = ReuseStats(
        gpu_prefix_tokens=1, contiguous_hit_tokens=10, disjoint_hit_tokens=100
    )
    assert (stats.hit_tokens, stats.reused_tokens) == (110, 111)


def test_all_answers_begin_with_the_completion_itself():
    second = Completion("b", (2,), "stop", None, 0.2)
    first = Completion("a", (1,), "stop", None, 0.1, alternatives=(second,))
    assert first.answers == (first, second)
    assert second.answers == (second,)


def test_the_protocol_is_met_by_a_fake_of_a_few_lines():
    @dataclass
    class Fake:
        def generate(self, prompt, **options):
            GenerationOptions(**options)
            return Completion("ok", (1,), "stop", None, 0.0)

        def stream(self, prompt, **options):
            yield Delta("ok", (1,), completion=self.generate(prompt, **options))

    engine: Engine = Fake()
    (delta,) = engine.stream(ChunkedPrompt(question="q"))
    assert delta.completion.reuse == ReuseStats()
    with pytest.raises(DaricError):
        engine.generate(ChunkedPrompt(question="q"), max_tokens=0)
