"""Guided decoding beside reuse: every answer fits, whatever the weights say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from daric_rag import ChunkedPrompt, ConfigError
from tests.runtime.conftest import HarnessPool

pytestmark = pytest.mark.engine

PROMPT = ChunkedPrompt(
    documents=["The mill was built by hand. " * 6, "It rains on the ferry. " * 6],
    question="Whose is it?",
)
SCHEMA = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}, "day": {"enum": ["Mon", "Tue"]}},
    "required": ["open", "day"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "regex", "pattern": "[0-9]{3}"},
        "end": "</a>",
    },
}


@pytest.fixture
def engine(harness_of: HarnessPool) -> Any:
    # Random weights would fill any answer with white space between the signs of JSON.
    compact = {"backend": "xgrammar", "disable_any_whitespace": True}
    return harness_of("llama-gqa-tied", structured_outputs_config=compact).engine


def is_valid(text: str) -> bool:
    answer = json.loads(text)
    return isinstance(answer["open"], bool) and answer["day"] in ("Mon", "Tue")


def test_answers_fit_with_and_without_reuse(engine: Any) -> None:
    engine.generate(PROMPT, max_tokens=1)
    for reuse in ("daric", "full_reuse", "off"):
        asked: dict[str, Any] = {"reuse": reuse, "max_tokens": 200}
        engine.clear_prefix_cache()
        done = engine.generate(PROMPT, choice=["yes", "no, never"], **asked)
        assert done.text in ("yes", "no, never")
        assert (done.reuse.hit_tokens > 0) == (reuse != "off")
        year = engine.generate(PROMPT, regex="1[0-9]{3}", **asked).text
        assert re.fullmatch("1[0-9]{3}", year)
        assert is_valid(engine.generate(PROMPT, json_schema=SCHEMA, **asked).text)
        tagged = engine.generate(PROMPT, structural_tag=TAG, **asked).text
        assert re.fullmatch("<a>[0-9]{3}</a>", tagged)


def test_guided_and_ordinary_requests_share_a_batch(engine: Any) -> None:
    plain = engine.generate(PROMPT, max_tokens=20, ignore_eos=True)
    guided = engine.stream(PROMPT, json_schema=SCHEMA, max_tokens=200)
    beside = engine.stream(PROMPT, max_tokens=20, ignore_eos=True)
    assert list(beside)[-1].completion.token_ids == plain.token_ids
    assert is_valid("".join(delta.text for delta in guided))


@pytest.mark.parametrize(
    "guide",
    [
        {"regex": "(unclosed"},
        {"json_schema": {"type": "no type"}},
        {"structural_tag": {"type": "no tag"}},
    ],
)
def test_what_cannot_guide_is_refused(engine: Any, guide: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="vLLM refused the request"):
        engine.generate(PROMPT, **guide)
    assert engine.generate(PROMPT, max_tokens=1).token_ids
