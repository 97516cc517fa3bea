"""DaricConfig: every bad value is refused where it enters, with the mend."""

import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.config import DaricConfig
from daric_rag.errors import ConfigError

configs = st.builds(
    DaricConfig,
    policy=st.sampled_from(["daric", "equal"]),
    avg_chunk_budget=st.integers(1, 4096),
    initial_ratio=st.floats(0, 1, exclude_min=True, exclude_max=True),
    mtaf=st.sampled_from(["linear", "log", "exp"]),
    alignment=st.sampled_from(["exact", "block"]),
    namespace=st.text(min_size=1),
    max_segment_len=st.integers(1, 1024),
    delimiter=st.none() | st.text(min_size=1),
    host_bytes=st.integers(1, 2**40),
    disk_bytes=st.integers(1, 2**40),
)


def test_defaults_are_the_papers():
    config = DaricConfig()
    assert config.policy == "daric"
    assert (config.avg_chunk_budget, config.initial_ratio) == (32, 0.1)
    assert (config.mtaf, config.alignment) == ("linear", "exact")
    assert (config.host_bytes, config.disk_bytes) == (4 * 2**30, 32 * 2**30)


@given(configs)
def test_survives_json_and_pickle(config):
    assert DaricConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "epic"),
        ("policy", None),
        ("policy", ["daric"]),
        ("mtaf", "quadratic"),
        ("alignment", "page"),
        ("avg_chunk_budget", 0),
        ("avg_chunk_budget", -1),
        ("avg_chunk_budget", True),
        ("avg_chunk_budget", 32.0),
        ("avg_chunk_budget", "32"),
        ("initial_ratio", 0.0),
        ("initial_ratio", 1.0),
        ("initial_ratio", 1),
        ("initial_ratio", True),
        ("initial_ratio", float("nan")),
        ("initial_ratio", float("inf")),
        ("initial_ratio", "0.1"),
        ("namespace", ""),
        ("namespace", None),
        ("eviction", "random"),
        ("kv_storage", "int4"),
        ("encryption_key_file", ""),
        ("max_segment_len", 0),
        ("max_segment_len", True),
        ("delimiter", ""),
        ("delimiter", b"##"),
        ("host_bytes", 0),
        ("disk_bytes", 1.5),
        ("require_disk", "yes"),
    ],
)
def test_refuses_a_bad_value_and_names_it(field, value):
    with pytest.raises(ConfigError) as caught:
        DaricConfig(**{field: value})
    text = str(caught.value)
    assert field in text
    assert repr(value) in text
    assert "must be" in text


def test_a_namespace_is_an_id_and_no_text():
    assert DaricConfig(namespace="x" * 256)
    with pytest.raises(ConfigError, match="at most 256"):
        DaricConfig(namespace="x" * 257)


def test_budget_of_zero_points_to_full_reuse():
    with pytest.raises(ConfigError, match="full_reuse"):
        DaricConfig(avg_chunk_budget=0)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("avg_chunk_buget", "avg_chunk_budget"), ("Namespace", "namespace")],
)
def test_unknown_key_suggests_the_nearest(key, nearest):
    with pytest.raises(ConfigError, match=f"did you mean '{nearest}'"):
        DaricConfig.from_dict({key: 1})


def test_unknown_key_without_a_neighbour_lists_all():
    with pytest.raises(ConfigError, match=r"Known fields: policy, avg_chunk_budget"):
        DaricConfig.from_dict({"zzz": 1})


@pytest.mark.parametrize("value", [None, [], "policy"])
def test_from_dict_refuses_what_is_no_mapping(value):
    with pytest.raises(ConfigError, match="mapping"):
        DaricConfig.from_dict(value)


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DaricConfig().policy = "equal"


def test_policy_fields_hold_what_changes_kv_and_nothing_else():
    base = DaricConfig().policy_fields()
    assert DaricConfig(host_bytes=1, max_segment_len=1).policy_fields() == base
    changes = {
        "policy": "equal",
        "avg_chunk_budget": 16,
        "initial_ratio": 0.2,
        "mtaf": "log",
        "alignment": "block",
    }
    assert set(base) == set(changes)
    for field, value in changes.items():
        assert DaricConfig(**{field: value}).policy_fields() == base | {field: value}
