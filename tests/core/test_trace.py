"""A trace survives a trip over HTTP, and damage never passes for one."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.config import DaricConfig
from daric_rag.engine import GenerationOptions, ReuseStats
from daric_rag.errors import WireError
from daric_rag.layout import build_layout
from daric_rag.trace import ChunkKind, ChunkTrace, RequestTrace, TraceEvent
from daric_rag.wire import (
    WIRE_KEY,
    RequestWire,
    decode_request,
    decode_reuse,
    decode_trace,
    encode_request,
    encode_reuse,
    salt_of,
)

WIRE = RequestWire((3, 7, 9), (True, True, False), "daric", DaricConfig(), trace=True)
TRACE = RequestTrace(
    9,
    (
        ChunkTrace(0, 3, "contiguous_hit", 3, "Räte"),
        ChunkTrace(3, 7, "generated"),
        ChunkTrace(7, 9, "recomputed"),
    ),
    ((3, 4), (7, 9)),
    (TraceEvent("load", 0.0, 0.5), TraceEvent("first_token", 1.0, 1.0)),
)


@st.composite
def traces(draw):
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    chunks, start = [], 0
    for length in lengths:
        chunks.append(
            ChunkTrace(
                start,
                start + length,
                draw(st.sampled_from(get_args(ChunkKind))),
                draw(st.integers(0, length)),
                draw(st.text(max_size=80)),
            )
        )
        start += length
    edges = sorted(draw(st.sets(st.integers(0, start), max_size=8)))
    seconds = st.floats(0, 1e6)
    events = [
        TraceEvent(name, *sorted((draw(seconds), draw(seconds))))
        for name in draw(st.lists(st.sampled_from(["wait", "load", "new phase"])))
    ]
    windows = tuple(zip(edges[::2], edges[1::2], strict=False))
    return RequestTrace(start, tuple(chunks), windows, tuple(events))


def over_http(params):
    return json.loads(json.dumps(params, allow_nan=False))


@given(traces())
def test_a_trace_survives_the_trip(trace):
    params = over_http(encode_reuse(ReuseStats(prompt_tokens=1), trace))
    assert decode_trace(params) == trace
    assert decode_reuse(params, ReuseStats) == ReuseStats(prompt_tokens=1)


DAMAGE = [
    (("version",), 2),
    (("version",), True),
    (("prompt_len",), 0),
    (("prompt_len",), 8),
    (("prompt_len",), "9"),
    (("chunks",), None),
    (("chunks", 0), 7),
    (("chunks", 0, "start"), -1),
    (("chunks", 0, "end"), 4),
    (("chunks", 0, "end"), 10**400),
    (("chunks", 0, "kind"), "lost"),
    (("chunks", 0, "kind"), []),
    (("chunks", 0, "hit_len"), 4),
    (("chunks", 0, "title"), "x" * 81),
    (("chunks", 0, "title"), None),
    (("windows",), {}),
    (("windows", 0), [3]),
    (("windows", 0), [3, 8]),
    (("windows", 0), [4, 4]),
    (("windows", 0, 0), 3.5),
    (("events", 0, "name"), ""),
    (("events", 0, "name"), 3),
    (("events", 0, "start_s"), -1.0),
    (("events", 0, "start_s"), 0.6),
    (("events", 0, "end_s"), float("nan")),
    (("events", 0, "end_s"), float("inf")),
    (("events", 0, "end_s"), 10**400),
    (("events", 0, "end_s"), True),
]


@pytest.mark.parametrize(("path", "value"), DAMAGE)
def test_damage_is_refused(path, value):
    data = over_http(TRACE.to_dict())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(WireError, match="trace") as caught:
        RequestTrace.from_dict(data)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("data", [None, 3, [], "trace"])
def test_what_is_no_object_is_no_trace(data):
    with pytest.raises(WireError, match="damaged"):
        RequestTrace.from_dict(data)


@pytest.mark.parametrize("path", [(), ("chunks", 1), ("events", 0)])
def test_a_missing_field_is_refused(path):
    data = over_http(TRACE.to_dict())
    place = data
    for key in path:
        place = place[key]
    for name in list(place):
        value = place.pop(name)
        with pytest.raises(WireError, match="trace"):
            RequestTrace.from_dict(data)
        place[name] = value
    assert RequestTrace.from_dict(data) == TRACE


def test_damage_never_fails_an_answered_request(caplog):
    params = encode_reuse(ReuseStats(), TRACE)
    params[WIRE_KEY]["trace"]["version"] = 99
    assert decode_trace(params) is None
    assert "99" in caplog.text


@pytest.mark.parametrize(
    "params", [None, {}, {WIRE_KEY: 3}, encode_reuse(ReuseStats())]
)
def test_no_trace_is_none_and_says_nothing(params, caplog):
    assert decode_trace(params) is None
    assert not caplog.text


def test_a_request_asks_for_its_trace():
    assert decode_request(over_http(encode_request(WIRE))).trace is True


def test_a_client_that_knows_no_traces_is_served():
    params = encode_request(WIRE)
    del params[WIRE_KEY]["trace"]
    assert decode_request(params) == replace(WIRE, trace=False)


def test_asking_for_a_trace_changes_no_salt():
    assert salt_of(WIRE) == salt_of(replace(WIRE, trace=False))


def finished(params):
    part = SimpleNamespace(
        index=0, text="a", token_ids=[1], logprobs=None, finish_reason="stop"
    )
    return SimpleNamespace(outputs=[part], finished=True, kv_transfer_params=params)


@pytest.mark.parametrize("asked", [True, False])
def test_a_completion_has_the_trace_that_was_asked_for(asked):
    stream_module = pytest.importorskip("daric_rag.runtime.request_stream")
    layout = build_layout(
        [[1, 2, 3], [4, 5, 6, 7], [8, 9]],
        config=DaricConfig(),
        block_size=16,
        pad_token_id=0,
    )
    wire = replace(WIRE, trace=asked)
    deltas = []
    stream = stream_module.RequestStream(
        stream_module.Submission(layout, wire, GenerationOptions(trace=asked)),
        deltas.append,
    )
    stream.feed(finished(encode_reuse(ReuseStats(prompt_tokens=9), TRACE)))
    assert deltas[-1].completion.trace == (TRACE if asked else None)
    assert deltas[-1].completion.reuse.prompt_tokens == 9
