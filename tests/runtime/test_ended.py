"""Who is told of requests that ended, by which name, and for how long."""

from __future__ import annotations

import pickle

import pytest

from daric_rag import ReuseStats
from daric_rag.runtime.ended import EndedRequests, KeptAnswers
from daric_rag.runtime.metadata import DaricMetadata
from daric_rag.runtime.metrics import DaricStats
from daric_rag.runtime.request_ids import answer_request_id, served_request_id
from daric_rag.runtime.tracking import TrackedRequest
from daric_rag.wire import decode_reuse

OWN = f"{served_request_id('abc')}-0123abcd"


@pytest.mark.parametrize("asked", [OWN, "cmpl-abc-0"])
def test_an_answer_is_told_once_by_either_name(asked: str) -> None:
    kept = KeptAnswers()
    kept.add(OWN, {"a": 1})
    kept.add("cmpl-abcd-0-0123abcd", {"b": 2})
    for other in ("cmpl-abc", "abc", "cmpl-abc-0-", "cmpl-abc-0-0123"):
        assert kept.take(other) is None
    assert kept.take(asked) == {"a": 1}
    assert kept.take(asked) is None


def test_several_answers_have_a_name_each() -> None:
    kept = KeptAnswers()
    for index in range(3):
        kept.add(answer_request_id(OWN, index, 3), {"index": index})
    for index in (2, 0, 1):
        asked = answer_request_id("cmpl-abc-0", index, 3)
        assert kept.take(asked) == {"index": index}


def test_the_oldest_answers_are_given_up() -> None:
    kept = KeptAnswers()
    for number in range(2000):
        kept.add(f"request-{number}-0123abcd", {"number": number})
    held = [number for number in range(2000) if kept.take(f"request-{number}")]
    assert held == list(range(2000 - len(held), 2000))
    assert 500 < len(held) < 2000


def test_the_step_behind_the_last_one_tells_of_a_request() -> None:
    ended = EndedRequests(DaricStats())
    ended.add(OWN, TrackedRequest(None, "", False, 9, "damaged"))
    told = ended.begin_step()
    assert ended.begin_step() == {}
    message = pickle.loads(pickle.dumps(DaricMetadata(is_step=True, answers=told)))
    reuse = decode_reuse(message.answers[OWN], ReuseStats)
    assert reuse == ReuseStats(prompt_tokens=9, reason="damaged")
    # Whoever shares the scheduler's process need not wait for that step.
    assert ended.take_answer("cmpl-abc-0") == told[OWN]
