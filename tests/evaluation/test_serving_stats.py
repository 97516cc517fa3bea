from __future__ import annotations

import pytest

from daric_rag import ReuseStats
from daric_rag.evaluation.serving_stats import (
    Served,
    intervals_within,
    linear_fit,
    poisson_arrivals,
    quantile,
    queue_growth,
    serving_row,
)


def served(due_s: float, *token_times_s: float, **reuse: int) -> Served:
    return Served(due_s, token_times_s, ReuseStats(100, **reuse))


def test_arrivals_have_the_rate_and_one_pattern_per_seed() -> None:
    slow, fast = poisson_arrivals(4000, 1.0, 7), poisson_arrivals(4000, 4.0, 7)
    assert slow == sorted(slow)
    assert slow[-1] == pytest.approx(4000, rel=0.05)
    assert fast == pytest.approx([time / 4 for time in slow])
    assert slow != poisson_arrivals(4000, 1.0, 8)


def test_quantile_is_a_value_that_occurred() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert quantile(values, 0.5) == 3
    assert quantile(values, 0.99) == 5
    assert quantile(values, 0.0) == 1
    assert quantile(list(range(1, 101)), 0.95) == 95
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


def test_queue_grows_when_service_is_slower_than_arrivals() -> None:
    steady = [served(i, i + 0.5) for i in range(20)]
    late = [served(i, 2.0 * (i + 1)) for i in range(20)]
    assert queue_growth(steady) == 0
    # Arrival i meets the requests j < i with 2 (j + 1) > i: i - i // 2 of them.
    met = [i - i // 2 for i in range(20)]
    assert queue_growth(late) == pytest.approx((sum(met[10:]) - sum(met[:10])) / 10)
    assert serving_row(steady)["sustained"]
    assert not serving_row(late)["sustained"]
    assert queue_growth(steady[:1]) == 0


def test_row_counts_from_arrival_and_in_prompt_tokens() -> None:
    row = serving_row(
        [
            served(1.0, 1.5, 1.6, contiguous_hit_tokens=30, disjoint_hit_tokens=20),
            served(2.0, 2.1, 2.4, gpu_prefix_tokens=10, generated_tokens=40),
            served(3.0, 3.2, 5.0),
        ]
    )
    assert row["ttft_p50_ms"] == 200
    assert row["ttft_p95_ms"] == 500
    assert row["inter_token_p50_ms"] == 300
    assert row["inter_token_p99_ms"] == 1800
    assert row["input_tokens_per_s"] == 300 / (5 - 1)
    assert row["store_hit_share"] == round(50 / 300, 4)
    assert row["prefix_hit_share"] == round(10 / 300, 4)
    assert row["generated_share"] == round(40 / 300, 4)


def test_answers_of_one_token_have_no_intervals() -> None:
    assert serving_row([served(0.0, 1.0)])["inter_token_p99_ms"] is None


def test_intervals_that_touch_a_stretch_count_whole() -> None:
    times = [0.0, 1.0, 3.0, 4.0, 8.0, 9.0]
    assert intervals_within(times, 2.0, 5.0) == [2.0, 1.0, 4.0]
    # Both ends: one that ends at the start or begins at the end does not touch.
    assert intervals_within(times, 1.0, 3.0) == [2.0]


def test_line_through_points_on_a_line_and_beside_one() -> None:
    assert linear_fit([1, 2, 4], [5, 7, 11]) == pytest.approx((2, 3, 1))
    slope, intercept, r_squared = linear_fit([0, 1, 2, 3], [0, 2, 1, 3])
    assert (slope, intercept) == pytest.approx((0.8, 0.3))
    assert r_squared == pytest.approx(0.64)
