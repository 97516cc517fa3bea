"""Tools as text, schemas of calls, and calls read from an answer cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag import ChatMessage, ConfigError, DocumentPart
from daric_rag.integrations._tool_calls import (
    CallReader,
    ToolCall,
    call_schema,
    call_tags,
    chosen_tools,
    with_tools_as_text,
)


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    function = {"name": name, "description": f"Does {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


ADD = tool("add", type="object", properties={"a": {"type": "integer"}}, required=["a"])
WEATHER = tool("weather")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD_1 = ToolCall("add", '{"a": 1}')


def read(pieces: list[str], *, is_call: bool = False) -> list[str | ToolCall]:
    """Texts in a row are joined: where they are cut says nothing."""
    reader = CallReader(is_call=is_call, names=["add", "weather"])
    found = [part for piece in pieces for part in reader.feed(piece)]
    joined: list[str | ToolCall] = []
    for part in [*found, *reader.finish()]:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


ANSWERS: dict[str, list[str | ToolCall]] = {
    "Four.": ["Four."],
    f"I add.{CALL}": ["I add.", ADD_1],
    CALL + CALL: [ADD_1, ADD_1],
    f"{CALL} and <tool_cal": [ADD_1, " and <tool_cal"],
    # The end-of-turn token took the closing tag's place.
    CALL.removesuffix("\n</tool_call>"): [ADD_1],
    CALL.replace("add", "subtract"): [CALL.replace("add", "subtract")],
    CALL[:40]: [CALL[:40]],
    "<tool_call>[1]</tool_call>": ["<tool_call>[1]</tool_call>"],
    CALL.replace('{"a": 1}', '"a"'): [CALL.replace('{"a": 1}', '"a"')],
    "a < b <tool>": ["a < b <tool>"],
}


@given(st.sampled_from(sorted(ANSWERS)), st.data())
def test_reading_does_not_depend_on_where_the_answer_is_cut(
    answer: str, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=5).map(sorted))
    ends = zip([0, *cuts], [*cuts, len(answer)], strict=True)
    assert read([answer[start:end] for start, end in ends]) == ANSWERS[answer]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ('{"name": "add", "arguments": {"a": 1}}', [ADD_1]),
        ('{"name": "add", "argum', ['{"name": "add", "argum']),
        ('{"name": "other", "arguments": {}}', ['{"name": "other", "arguments": {}}']),
    ],
)
def test_an_answer_that_is_a_call(answer: str, found: list[Any]) -> None:
    assert read([answer[:5], answer[5:]], is_call=True) == found


def test_text_is_streamed_as_soon_as_it_is_sure() -> None:
    reader = CallReader(is_call=False, names=["add"])
    assert list(reader.feed("Yes <")) == ["Yes "]
    assert list(reader.feed("b")) == ["<b"]
    assert list(reader.feed("<tool_call>")) == []
    without_tools = CallReader(is_call=False, names=[])
    assert list(without_tools.feed("<tool_call>")) == ["<tool_call>"]


def test_which_tools_must_be_called() -> None:
    tools = [ADD, WEATHER]
    assert chosen_tools(tools, "auto") == chosen_tools(tools, "none") == []
    assert chosen_tools(tools, "any") == chosen_tools(tools, "required") == tools
    assert chosen_tools(tools, "weather") == [WEATHER]
    with pytest.raises(ConfigError, match=r"'rain'.*\(add, weather\)"):
        chosen_tools(tools, "rain")


def test_the_schema_of_a_call() -> None:
    schema = call_schema([ADD])
    assert schema["properties"]["name"] == {"const": "add"}
    assert schema["properties"]["arguments"] == ADD["function"]["parameters"]
    several = call_schema([ADD, WEATHER])["anyOf"]
    assert [one["properties"]["name"]["const"] for one in several] == ["add", "weather"]
    assert several[1]["properties"]["arguments"]["type"] == "object"


def test_definitions_move_to_the_schema_s_root() -> None:
    place = {"type": "object", "properties": {"near": {"$ref": "#/$defs/Place"}}}
    arguments = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/Place"}},
        "$defs": {"Place": place},
    }
    schema = call_schema([tool("go", **arguments), tool("come", **arguments)])
    first, second = (one["properties"]["arguments"] for one in schema["anyOf"])
    assert first["properties"]["to"]["$ref"] == "#/$defs/tool0_Place"
    assert second["properties"]["to"]["$ref"] == "#/$defs/tool1_Place"
    moved = schema["$defs"]["tool1_Place"]
    assert moved["properties"]["near"]["$ref"] == "#/$defs/tool1_Place"
    assert "$defs" not in first


def test_a_schema_that_is_part_of_itself_needs_a_name() -> None:
    nested = tool("go", type="object", properties={"then": {"$ref": "#"}})
    with pytest.raises(ConfigError, match="under"):
        call_schema([nested])


def test_tags_hold_what_is_read_as_a_call() -> None:
    (tag,) = call_tags([ADD])["format"]["tags"]
    assert tag["content"]["json_schema"]["required"] == ["a"]
    assert read([tag["begin"] + '{"a": 1}' + tag["end"]]) == [ADD_1]


def test_tools_and_calls_as_text() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Add."),
        ChatMessage("assistant", "I do.", tool_calls=[call, call]),
        ChatMessage("tool", "2", tool_call_id="1"),
        ChatMessage("tool", "3", tool_call_id="1"),
    ]
    system, _, assistant, results = with_tools_as_text(messages, [ADD, WEATHER])
    brief, _, first, second = system.parts()
    assert brief == "Be brief."
    assert isinstance(first, DocumentPart)
    assert isinstance(second, DocumentPart)
    assert json.loads(first.text) == ADD["function"]
    assert second.title == "tool weather"
    assert assistant.parts() == ("I do.", CALL, CALL)
    assert not assistant.tool_calls
    assert results.role == "user"
    assert [part for part in results.parts() if part in ("2", "3")] == ["2", "3"]
    without = with_tools_as_text(messages[1:2], [])
    assert without == messages[1:2]
    assert with_tools_as_text(messages[1:2], [ADD])[0].role == "system"


@pytest.mark.parametrize(
    "call",
    [
        '{"name": ["add"], "arguments": {}}',
        '{"name": {"add": 1}, "arguments": {}}',
        '{"name": null, "arguments": {}}',
        '{"name": "add", "arguments": ["a"]}',
        '["add"]',
    ],
)
def test_what_is_no_call_stays_text(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    assert read([text]) == [text]
