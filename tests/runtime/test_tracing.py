"""A trace tells of every chunk what the plan decided."""

import pytest

from daric_rag.config import DaricConfig
from daric_rag.keys import model_fingerprint
from daric_rag.plan import plan_request
from daric_rag.runtime.metadata import RequestReport
from daric_rag.runtime.tracing import trace_of
from daric_rag.trace import RequestTrace, TraceEvent
from daric_rag.wire import RequestWire

ENDS = (8, 24, 40, 56, 60)  # of segments of 8 tokens: 1, 2, 2, 2 and the question
TITLES = ("a", "b", "c", "d", "")


def plan_of(hit_segments, *, gpu_prefix_len=0, max_generated_len=None):
    """Answers of the index, one per chunk but the question."""
    wire = RequestWire(
        ENDS,
        (True, True, True, True, False),
        "daric",
        DaricConfig(avg_chunk_budget=2),
        titles=TITLES,
    )
    answers = iter(hit_segments)
    plan = plan_request(
        wire,
        range(60),
        gpu_prefix_len=gpu_prefix_len,
        root=model_fingerprint({"model": "tiny"}),
        max_segment_len=8,
        match=lambda keys: next(answers),
        max_generated_len=max_generated_len,
    )
    return wire, plan


def kinds_of(hit_segments, **options):
    trace = trace_of(*plan_of(hit_segments, **options), RequestReport())
    return [chunk.kind for chunk in trace.chunks]


def test_nothing_stored_is_generated_but_the_exact_prefix():
    assert kinds_of([0, 0, 0, 0]) == [
        "recomputed",
        "generated",
        "generated",
        "generated",
        "recomputed",
    ]


def test_hits_behind_a_miss_are_disjoint():
    assert kinds_of([1, 2, 0, 2]) == [
        "contiguous_hit",
        "contiguous_hit",
        "generated",
        "disjoint_hit",
        "recomputed",
    ]


def test_a_partial_hit_is_mixed_and_says_how_much():
    trace = trace_of(*plan_of([1, 1, 0, 2]), RequestReport())
    assert trace.chunks[1].kind == "mixed"
    assert [chunk.hit_len for chunk in trace.chunks] == [8, 8, 0, 16, 0]


def test_the_prefix_cache_comes_first_and_may_end_within_a_chunk():
    assert kinds_of([1, 2, 2, 2], gpu_prefix_len=16)[:3] == [
        "gpu_prefix",
        "mixed",
        "contiguous_hit",
    ]


def test_a_chunk_that_cannot_be_generated_alone_is_recomputed():
    assert kinds_of([1, 0, 2, 2], max_generated_len=15)[1] == "recomputed"


def test_records_that_could_not_be_read_are_no_hits():
    wire, plan = plan_of([1, 2, 2, 2])
    trace = trace_of(wire, plan, RequestReport(), unread={24})
    assert [chunk.hit_len for chunk in trace.chunks] == [8, 16, 0, 16, 0]
    assert trace.chunks[2].kind == "generated"


@pytest.mark.parametrize("gpu_prefix_len", [0, 16, 32, 59])
def test_titles_windows_and_positions_are_the_plans(gpu_prefix_len):
    wire, plan = plan_of([1, 0, 1, 2], gpu_prefix_len=gpu_prefix_len)
    trace = trace_of(wire, plan, RequestReport())
    assert tuple((chunk.start, chunk.end) for chunk in trace.chunks) == wire.spans
    assert tuple(chunk.title for chunk in trace.chunks) == TITLES
    assert trace.windows == plan.windows
    assert RequestTrace.from_dict(trace.to_dict()) == trace


def test_phases_follow_one_another_and_those_without_time_are_left_out():
    report = RequestReport(load_s=0.25, recompute_s=0.5)
    trace = trace_of(*plan_of([1, 2, 2, 2]), report, wait_s=1.0, first_token_s=2.0)
    assert trace.events == (
        TraceEvent("wait", 0.0, 1.0),
        TraceEvent("load", 1.0, 1.25),
        TraceEvent("recompute", 1.25, 1.75),
        TraceEvent("first_token", 2.0, 2.0),
    )
    assert trace.last_s == 2.0
