"""Messages survive a trip over HTTP, and every damaged field is refused."""

import json
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.config import DaricConfig
from daric_rag.engine import ReuseStats
from daric_rag.errors import WireError
from daric_rag.keys import chunking_id
from daric_rag.wire import (
    WIRE_KEY,
    WIRE_VERSION,
    RequestWire,
    decode_request,
    decode_reuse,
    encode_request,
    encode_reuse,
    salt_of,
)

WIRE = RequestWire(
    ends=(3, 7, 9),
    reusable=(True, True, False),
    mode="daric",
    config=DaricConfig(namespace="tenant", avg_chunk_budget=5),
)


@st.composite
def wires(draw):
    lengths = draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
    config = DaricConfig(
        policy=draw(st.sampled_from(["daric", "equal"])),
        avg_chunk_budget=draw(st.integers(1, 10**6)),
        initial_ratio=draw(st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)),
        mtaf=draw(st.sampled_from(["linear", "log", "exp"])),
        alignment=draw(st.sampled_from(["exact", "block"])),
        namespace=draw(st.text(min_size=1, max_size=256)),
    )
    return RequestWire(
        ends=tuple(sum(lengths[: i + 1]) for i in range(len(lengths))),
        # Of several chunks the last one is the question.
        reusable=(
            *(draw(st.booleans()) for _ in lengths[1:]),
            len(lengths) == 1 and draw(st.booleans()),
        ),
        mode=draw(st.sampled_from(["daric", "full_reuse"])),
        config=config,
        save_tail=draw(st.booleans()),
        conversation=draw(st.none() | st.text()),
        titles=tuple(draw(st.text(max_size=80)) for _ in lengths)
        if draw(st.booleans())
        else (),
        trace=draw(st.booleans()),
    )


def over_http(params):
    return json.loads(json.dumps(params, allow_nan=False))


@given(wires())
def test_a_request_survives_the_trip(wire):
    assert decode_request(over_http(encode_request(wire))) == wire


def test_the_scheduler_side_keeps_its_own_capacities():
    config = DaricConfig(max_segment_len=8, host_bytes=1, disk_bytes=1, delimiter="##")
    decoded = decode_request(encode_request(replace(WIRE, config=config)))
    assert decoded.config == DaricConfig()


def test_spans_partition_the_prompt():
    assert WIRE.spans == ((0, 3), (3, 7), (7, 9))
    assert WIRE.prompt_len == 9


@pytest.mark.parametrize("params", [None, {}, {"other_connector": 1}])
def test_an_ordinary_request_has_no_entry(params):
    assert decode_request(params) is None


def test_other_entries_are_left_alone():
    assert decode_request({"other": 1, **encode_request(WIRE)}) == WIRE


BAD_FIELDS = {
    "version": [0, 2, "1", 1.0, True, None, [1]],
    "ends": [
        *([], None, 9, "379", {"3": 7}, [3, 7], [3, 7, 9, 11]),
        *([3, 3, 9], [7, 3, 9], [0, 7, 9], [-1, 7, 9]),
        list(range(1, 4098)),
        *([3, 7.0, 9], [True, 7, 9], [3, "7", 9], [3, None, 9], [[3], 7, 9]),
    ],
    "reusable": [
        *([], None, 1, "110", [1, 1], [1, 1, 0, 0]),
        *([1, 2, 0], [1, -1, 0], [1, 1.0, 0], [1, "1", 0], [True, True, False]),
        [1, 1, 1],
    ],
    "mode": ["off", "", None, 1, True, ["daric"], {"daric": 1}],
    "conversation": [1, True, [], {}, 1.5, ["talk"]],
    "titles": [None, 1, "abc", {}, ["a"], ["a"] * 4, ["a", "b", 3], ["x" * 81] * 3],
    "save_tail": [2, -1, None, "0", 1.0, [], True],
    "trace": [2, -1, None, "0", 1.0, [], True],
    "namespace": ["", None, 5, ["tenant"], "x" * 257],
    "policy": ["best", "", None, 1, ["daric"], {}],
    "avg_chunk_budget": [10**400, 0, -1, 1.5, "32", None, True, [32]],
    "initial_ratio": [0, 0.0, 1.0, 1, -0.1, "0.1", None, True, [0.1], float("nan")],
    "mtaf": ["square", "", None, 1, ["linear"]],
    "alignment": ["", "page", None, 1, ["exact"]],
}


def test_every_field_is_damaged_below():
    assert set(encode_request(WIRE)[WIRE_KEY]) == set(BAD_FIELDS)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD_FIELDS.items() for value in values],
)
def test_a_damaged_field_is_refused(name, value):
    params = encode_request(WIRE)
    params[WIRE_KEY][name] = value
    with pytest.raises(WireError):
        decode_request(params)


@pytest.mark.parametrize("name", [name for name in BAD_FIELDS if name != "trace"])
def test_a_missing_field_is_refused(name):
    params = encode_request(WIRE)
    del params[WIRE_KEY][name]
    with pytest.raises(WireError):
        decode_request(params)


@pytest.mark.parametrize("entry", [None, 1, "daric", [], [["version", 1]], True])
def test_an_entry_that_is_no_mapping_is_refused(entry):
    with pytest.raises(WireError):
        decode_request({WIRE_KEY: entry})


def test_an_unknown_version_says_what_to_do():
    params = encode_request(WIRE)
    params[WIRE_KEY]["version"] = WIRE_VERSION + 1
    with pytest.raises(WireError, match="same daric_rag on client and server"):
        decode_request(params)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(BAD_FIELDS)), json_values)
def test_whatever_arrives_is_read_or_refused(name, value):
    params = encode_request(WIRE)
    params[WIRE_KEY][name] = value
    try:
        decoded = decode_request(params)
    except WireError:
        return
    assert encode_request(decoded) == params


# ----------------------------------------------------------------------------- reuse


def test_reuse_counts_survive_the_trip():
    stats = ReuseStats(prompt_tokens=9, load_s=0.5, reason="cold")
    assert decode_reuse(over_http(encode_reuse(stats)), ReuseStats) == stats


@pytest.mark.parametrize(
    "params",
    [
        *(None, {}, [], {"other": 1}, {WIRE_KEY: None}, {WIRE_KEY: []}),
        *({WIRE_KEY: {}}, {WIRE_KEY: {"reuse": []}}, {WIRE_KEY: {"reuse": None}}),
    ],
)
def test_no_counts_are_none(params):
    assert decode_reuse(params, ReuseStats) is None


def test_a_request_entry_holds_no_counts():
    assert decode_reuse(encode_request(WIRE), ReuseStats) is None


def test_a_newer_servers_counts_never_fail_an_answered_request():
    counts = {"prompt_tokens": 9, "load_s": 1, "brand_new": 5}
    damaged = {"num_chunks": "three", "recomputed_tokens": None, "saved_tokens": True}
    params = {WIRE_KEY: {"version": 99, "reuse": counts | damaged}}
    assert decode_reuse(params, ReuseStats) == ReuseStats(prompt_tokens=9, load_s=1)


def test_flags_are_no_numbers_and_numbers_no_flags():
    @dataclass
    class Counts:
        flag: bool = False
        number: int = 0

    params = {WIRE_KEY: {"reuse": {"flag": 1, "number": True}}}
    assert decode_reuse(params, Counts) == Counts()
    params = {WIRE_KEY: {"reuse": {"flag": True, "number": 1}}}
    assert decode_reuse(params, Counts) == Counts(True, 1)


# ------------------------------------------------------------------------------ salt


@pytest.mark.parametrize(
    "change",
    [
        {"ends": (2, 7, 9)},
        {"mode": "full_reuse"},
        {"config": DaricConfig(namespace="other", avg_chunk_budget=5)},
        {"config": DaricConfig(namespace="tenant", avg_chunk_budget=6)},
        {"config": DaricConfig(namespace="tenant", avg_chunk_budget=5, mtaf="exp")},
    ],
)
def test_what_changes_the_kv_changes_the_salt(change):
    assert salt_of(replace(WIRE, **change)) != salt_of(WIRE)


def test_a_conversation_shares_its_salt_as_it_grows():
    longer = replace(WIRE, ends=(3, 7, 12, 14), reusable=(True, True, True, False))
    talk = replace(WIRE, conversation="talk")
    assert salt_of(replace(longer, conversation="talk")) == salt_of(talk)
    assert salt_of(talk) != salt_of(replace(WIRE, conversation="other talk"))
    assert salt_of(longer) != salt_of(WIRE)
    assert salt_of(replace(talk, mode="full_reuse")) != salt_of(talk)


def test_no_conversation_can_take_a_layouts_salt():
    """Whoever names a conversation like a layout's digest still stays apart."""
    flags = "".join(str(int(flag)) for flag in WIRE.reusable)
    for name in (f"{chunking_id(WIRE.spans)}.{flags}", "", "layout:"):
        assert salt_of(replace(WIRE, conversation=name)) != salt_of(WIRE)


def test_messages_about_hostile_values_stay_short():
    for name, value in (("mode", "x" * 10**6), ("ends", [1] * 4000)):
        params = encode_request(WIRE)
        params[WIRE_KEY][name] = value
        params[WIRE_KEY]["reusable"] = [0] * len(params[WIRE_KEY]["ends"])
        with pytest.raises(WireError) as caught:
            decode_request(params)
        assert len(str(caught.value)) < 300
