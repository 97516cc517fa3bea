"""Algorithm 1 against a transcription of the paper's pseudocode over index sets."""

import math
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daric_rag.config import DaricConfig
from daric_rag.errors import ConfigError, PromptError
from daric_rag.selection import (
    DaricPolicy,
    EqualPolicy,
    merge,
    policy_for,
    recompute_set,
    subtract,
    total_len,
)
from tests.core.test_allocation import equation_4

configs = st.builds(
    DaricConfig,
    policy=st.sampled_from(["daric", "equal"]),
    avg_chunk_budget=st.integers(1, 40),
    initial_ratio=st.integers(1, 99).map(lambda k: k / 100),
    mtaf=st.sampled_from(["linear", "log", "exp"]),
)
chunk_lens = st.lists(st.integers(1, 60), min_size=1, max_size=14)
windows_lists = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).filter(lambda w: w[0] <= w[1]),
    max_size=12,
)


def spans_of(lens):
    edges = [0, *accumulate(lens)]
    return list(pairwise(edges))


def indices(windows):
    return {i for start, end in windows for i in range(start, end)}


def assert_canonical(windows):
    assert all(start < end for start, end in windows)
    assert all(left[1] < right[0] for left, right in pairwise(windows))


def algorithm_1(lens, config, *, clamp):
    """Lines 1-17 over a set of 0-based indices, for M >= 3.

    The paper mixes 1-based (line 4) and 0-based (line 6) indices; both are read as
    what the text says: the first n_i tokens of chunk i, the last n_l of the prompt.
    With `clamp` a head ends with its chunk, and the first chunk is never entered.
    """
    m, n_avg = len(lens), config.avg_chunk_budget
    starts = [0, *accumulate(lens)]
    heads, n_l = equation_4(m, n_avg, config.initial_ratio, config.mtaf)
    chosen = set()
    for i in range(2, m + 1):
        n_i = math.floor(heads[i - 2])
        head = {starts[i - 1] + j - 1 for j in range(1, n_i + 1)}
        if clamp:
            head = {index for index in head if index < starts[i]}
        chosen |= head
    latest = {sum(lens) - j for j in range(1, math.floor(n_l) + 1)}
    allowed = set(range(lens[0], sum(lens))) if clamp else set(range(sum(lens)))
    chosen |= latest & allowed
    iteration = 0
    while len(chosen) < m * n_avg and iteration < 3:
        missing = m * n_avg - len(chosen)
        s_avg = max(chosen)
        while s_avg - 1 in chosen:
            s_avg -= 1
        chosen |= {s_avg - k for k in range(1, missing + 1)} & allowed
        iteration += 1
    return chosen


def test_example_by_hand():
    # M * n = 16; n_2 = 2, then + 1.6 each: heads 2, 3, 5 and the latest 5 of 27.
    #   heads [4,6) [14,17) [24,27), the last one clamped; latest [22,27): 10 tokens
    #   6 short: [16,27) meets [14,17), now [14,27): 15 tokens
    #   1 short: [13,27): 16 tokens
    config = DaricConfig(avg_chunk_budget=4, initial_ratio=0.5)
    spans = [(0, 4), (4, 14), (14, 24), (24, 27)]
    assert DaricPolicy().select(spans, config) == ((4, 6), (13, 27))


def test_floors_are_given_back_to_the_latest_window():
    # 12 chunks of 100: heads sum to 323 and the latest window is 56 long, 5 short of
    # 384. The last head [1100,1156) and the latest window [1144,1200) share 12.
    config = DaricConfig()
    windows = DaricPolicy().select(spans_of([100] * 12), config)
    assert windows[:2] == ((100, 103), (200, 208))
    assert windows[-1] == (1100 - 17, 1200)
    assert total_len(windows) == 384


def test_compensation_stops_after_three_rounds():
    # M * n = 30; n_2 = 4.5, then + 3/14 each: heads 4, 4, 4, 5, 5, latest 5 of 32.
    #   heads [1,5) [7,11) [12,16) [19,24) [28,32), latest [27,32): 22 tokens
    #   8 short: [19,32), 25 tokens; 5 short: [14,32) meets [12,16), 28 tokens;
    #   2 short: [10,32) meets [7,11), 29 tokens; the last one stays unspent
    config = DaricConfig(avg_chunk_budget=5, initial_ratio=0.9)
    windows = DaricPolicy().select(spans_of([1, 6, 5, 7, 9, 4]), config)
    assert windows == ((1, 5), (7, 32))


def test_compensation_never_enters_the_first_chunk():
    # M * n = 30, and only 10 tokens follow the first chunk.
    config = DaricConfig(avg_chunk_budget=10)
    assert DaricPolicy().select([(0, 50), (50, 55), (55, 60)], config) == ((50, 60),)


def test_equal_policy_by_hand():
    config = DaricConfig(policy="equal", avg_chunk_budget=4)
    spans = [(0, 4), (4, 14), (14, 24), (24, 27)]
    assert EqualPolicy().select(spans, config) == ((4, 8), (14, 18), (23, 27))


def test_two_chunks_get_the_average_budget_each():
    config = DaricConfig(avg_chunk_budget=3)
    assert DaricPolicy().select([(0, 10), (10, 30)], config) == ((10, 13), (27, 30))


@pytest.mark.parametrize("policy", [DaricPolicy(), EqualPolicy()])
def test_one_chunk_has_no_policy_windows(policy):
    assert policy.select([(0, 100)], DaricConfig()) == ()


@given(st.lists(st.integers(1, 60), min_size=3, max_size=14), configs)
@settings(deadline=None)
def test_equals_the_papers_algorithm_with_clamps(lens, config):
    windows = DaricPolicy().select(spans_of(lens), config)
    assert_canonical(windows)
    assert indices(windows) == algorithm_1(lens, config, clamp=True)


@given(st.integers(3, 8), st.integers(1, 12), configs)
@settings(deadline=None)
def test_equals_the_papers_algorithm_verbatim_on_long_chunks(m, n_avg, config):
    config = DaricConfig(
        avg_chunk_budget=n_avg, initial_ratio=config.initial_ratio, mtaf=config.mtaf
    )
    lens = [m * n_avg] * m  # nothing can be clamped
    windows = DaricPolicy().select(spans_of(lens), config)
    assert indices(windows) == algorithm_1(lens, config, clamp=False)
    assert total_len(windows) == m * n_avg


@given(chunk_lens, configs)
@settings(deadline=None)
def test_policy_keeps_budget_and_leaves_the_first_chunk_alone(lens, config):
    spans = spans_of(lens)
    windows = policy_for(config).select(spans, config)
    assert_canonical(windows)
    assert total_len(windows) <= len(lens) * config.avg_chunk_budget
    assert all(lens[0] <= start and end <= sum(lens) for start, end in windows)


@given(chunk_lens, configs)
@settings(deadline=None)
def test_daric_spends_all_that_the_prompt_has_room_for_when_one_window(lens, config):
    spans = spans_of(lens)
    windows = DaricPolicy().select(spans, config)
    room = sum(lens) - lens[0]
    if len(lens) > 1 and len(windows) == 1:
        assert total_len(windows) == min(room, len(lens) * config.avg_chunk_budget)


@given(chunk_lens, configs, st.data())
@settings(deadline=None)
def test_recompute_set_is_a_union(lens, config, data):
    spans = spans_of(lens)
    flags = data.draw(st.lists(st.booleans(), min_size=len(lens), max_size=len(lens)))
    mode = data.draw(st.sampled_from(["daric", "full_reuse"]))
    windows = recompute_set(spans, flags, config, mode=mode)
    expected = {sum(lens) - 1}
    for span, keep in zip(spans, flags, strict=True):
        expected |= set() if keep else indices([span])
    if mode == "daric":
        expected |= indices(policy_for(config).select(spans, config))
    assert_canonical(windows)
    assert indices(windows) == expected


def test_full_reuse_computes_the_question_only():
    spans = spans_of([5, 50, 50, 7])
    flags = [True, True, True, False]
    config = DaricConfig()
    assert recompute_set(spans, flags, config, mode="full_reuse") == ((105, 112),)


def test_a_lone_reusable_chunk_computes_its_last_token_only():
    assert recompute_set([(0, 9)], [True], DaricConfig()) == ((8, 9),)


def test_side_data_reaches_the_policy(monkeypatch):
    class Profiled:
        name = "daric"

        def select(self, spans, config, side_data=None):
            return tuple(side_data)

    monkeypatch.setattr("daric_rag.selection._POLICIES", {"daric": Profiled()})
    runs = [(i, i + 1) for i in range(10, 210, 2)]
    flags = [True, True]
    windows = recompute_set([(0, 5), (5, 300)], flags, DaricConfig(), side_data=runs)
    assert windows == (*runs, (299, 300))


@pytest.mark.parametrize(
    ("arguments", "mode", "error"),
    [
        (([], []), "daric", PromptError),
        (([(0, 0)], [True]), "daric", PromptError),
        (([(0, 4)], []), "daric", PromptError),
        (([(0, 4)], [True]), "full", ConfigError),
    ],
)
def test_recompute_set_refuses_misuse(arguments, mode, error):
    with pytest.raises(error):
        recompute_set(*arguments, DaricConfig(), mode=mode)


@pytest.mark.parametrize("name", ["daric", "equal"])
def test_policy_for_finds_the_configured_policy(name):
    assert policy_for(DaricConfig(policy=name)).name == name


def test_merge_by_hand():
    assert merge([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]) == ((0, 3), (5, 9))


@given(windows_lists)
def test_merge_is_the_set_union(windows):
    merged = merge(windows)
    assert_canonical(merged)
    assert indices(merged) == indices(windows)
    assert total_len(merged) == len(indices(windows))
    assert merge(merged) == merged


@given(windows_lists, st.integers(0, 45))
def test_subtract_drops_the_prefix(windows, prefix_len):
    refined = subtract(merge(windows), prefix_len)
    assert_canonical(refined)
    assert indices(refined) == {i for i in indices(windows) if i >= prefix_len}
