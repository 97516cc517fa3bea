"""vLLM's own parsers of tool calls, piece by piece and whole."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest

from daric_rag.errors import ConfigError, VllmVersionError
from daric_rag.runtime.tool_reading import ToolReader, tool_reader
from tests.reference.tiny_tokenizer import build_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                },
            },
        },
    }
]
ARGUMENTS = '{"query": "mills", "limit": 3}'
CALL = f'{{"name": "search", "arguments": {ARGUMENTS}}}'
ANSWERS = {
    "hermes": f"I look.\n<tool_call>\n{CALL}\n</tool_call>",
    "pythonic": '[search(query="mills", limit=3)]',
    "granite": f"<|tool_call|>[{CALL}]",
    "xlam": f"[{CALL}]",
    "phi4_mini_json": f"functools[{CALL}]",
}


def fed(reader: ToolReader, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Feed an answer letter by letter; return its text and calls."""
    told = "".join(reader.feed(letter, [ord(letter) % 100]) for letter in text)
    rest, calls = reader.finish()
    return told + rest, calls


@pytest.mark.parametrize("name", ANSWERS)
def test_each_parser_reads_its_own_form(name: str) -> None:
    tokenizer, answer = build_tokenizer(), ANSWERS[name]
    text, calls = tool_reader(name, TOOLS, tokenizer).read(answer)
    assert calls == [("search", ARGUMENTS)]
    assert text.strip() == ("I look." if name == "hermes" else "")
    told, streamed = fed(tool_reader(name, TOOLS, tokenizer), answer)
    assert (told.strip(), streamed) == (text.strip(), calls)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("text", ["Just words.", " x [1] {", ""])
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    tokenizer = build_tokenizer()
    assert tool_reader(name, TOOLS, tokenizer).read(text) == (text, [])
    told, calls = fed(tool_reader(name, TOOLS, tokenizer), text)
    assert (told.strip(), calls) == (text.strip(), [])


def test_text_is_told_as_it_comes() -> None:
    reader = tool_reader("hermes", TOOLS, build_tokenizer())
    assert reader.feed("I look", [1]) == "I look"
    assert not reader.skip_special_tokens


def test_thoughts_are_text_streamed_and_whole() -> None:
    text = "<think>2+2=4, easy</think>4"
    tokenizer = build_tokenizer()
    assert tool_reader("glm47", TOOLS, tokenizer).read(text) == (text, [])
    told, calls = fed(tool_reader("glm47", TOOLS, tokenizer), text)
    assert (told, calls) == (text, [])


class Stumbling:
    """A parser with a fault, once with pieces and once with all."""

    def __init__(self, **faults: Exception) -> None:
        self.faults = faults

    def adjust_request(self, request: Any) -> Any:
        return request

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            raise self.faults.get(name, AssertionError(name))

        return call


class Request:
    skip_special_tokens = True


def test_a_parser_that_fails_loses_no_text() -> None:
    faults = {
        "extract_tool_calls_streaming": IndexError(),
        "extract_tool_calls": KeyError(),
    }
    reader = ToolReader(lambda: Stumbling(**faults), Request())
    assert fed(reader, "some words") == ("some words", [])


def test_an_unknown_parser_is_told_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"tool_parser is 'hermse'.*hermes"):
        tool_reader("hermse", TOOLS, build_tokenizer())


def test_a_parser_that_is_not_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="reads elsewhere"):
        tool_reader("openai", TOOLS, build_tokenizer())


def test_a_parser_of_other_models_is_refused() -> None:
    # Its marker is none of this model's tokens.
    with pytest.raises(ConfigError, match="cannot read this model's answers"):
        tool_reader("llama3_json", TOOLS, build_tokenizer())


def test_where_vllm_is_missing_the_mend_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "daric_rag.runtime.vllm_api":
            raise VllmVersionError("vLLM is not installed")
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "daric_rag.runtime.vllm_api", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(VllmVersionError, match="leave tool_parser out"):
        tool_reader("hermes", TOOLS, None)
