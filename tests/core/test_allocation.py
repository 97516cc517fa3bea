"""Equation 4 against an exact 3x3 solver, and what the paper says of its solution."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daric_rag.allocation import Allocation, solve
from daric_rag.errors import ConfigError

MTAFS = ("linear", "log", "exp")

# f as the paper writes it, e^x divided by e^M alone (a scale that cancels).
PAPER_F = {
    "linear": lambda x, m: Fraction(x),
    "log": lambda x, m: Fraction(math.log(x)),
    "exp": lambda x, m: Fraction(math.exp(x - m)),
}

mtafs = st.sampled_from(MTAFS)
ratios = st.integers(1, 999).map(lambda k: k / 1000)
chunk_counts = st.integers(1, 120)
budgets = st.integers(1, 300)


def determinant(rows):
    (a, b, c), (d, e, f), (g, h, i) = rows
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)


def cramer(matrix, right):
    """Solve a 3x3 system exactly."""
    whole = determinant(matrix)
    return [
        determinant(
            [[right[i] if k == j else matrix[i][k] for k in range(3)] for i in range(3)]
        )
        / whole
        for j in range(3)
    ]


def equation_4(m, n_avg, r, mtaf):
    """The paper's A x = c, written down as printed; returns n_2..n_M and n_l."""
    r = Fraction(str(r))
    f = [PAPER_F[mtaf](i, m) for i in range(2, m + 1)]
    a, b, n_l = cramer(
        [
            [f[-1], Fraction(1), Fraction(-1)],
            [f[0], Fraction(1), Fraction(0)],
            [sum(f), Fraction(m - 1), Fraction(1)],
        ],
        [Fraction(0), r * n_avg, Fraction(m * n_avg)],
    )
    return [a * value + b for value in f], n_l


def test_worked_example():
    # f(i) = i: F = 2 + ... + 12 = 77, a = 384 * 0.9 / (77 - 24 + 12) = 5.3169...
    # n_2 = 3.2, then + 5.3169 each: 8.5, 13.8, 19.2, 24.5, 29.8, 35.1, ... 56.4
    allocation = solve(12, 32, 0.1, "linear")
    assert allocation.head_lens == (3, 8, 13, 19, 24, 29, 35, 40, 45, 51, 56)
    assert allocation.latest_len == 56
    assert sum(allocation.head_lens) + allocation.latest_len == 379  # of 384


def test_three_chunks_by_hand():
    # n_2 = r * n = 10 and n_3 = n_l = (300 - 10) / 2 = 145, whatever f is.
    for mtaf in MTAFS:
        assert solve(3, 100, 0.1, mtaf) == Allocation((10, 145), 145)


@pytest.mark.parametrize("mtaf", MTAFS)
def test_corners_that_equation_4_leaves_open(mtaf):
    assert solve(1, 32, 0.1, mtaf) == Allocation((), 1)
    assert solve(2, 32, 0.1, mtaf) == Allocation((32,), 32)


@pytest.mark.parametrize("mtaf", MTAFS)
def test_a_small_budget_leaves_the_second_chunk_empty(mtaf):
    assert solve(8, 4, 0.1, mtaf).head_lens[0] == 0


@pytest.mark.parametrize("mtaf", MTAFS)
def test_no_token_is_lost_to_rounding(mtaf):
    # In binary 0.7 * 10, 0.29 * 100 and 0.57 * 100 all fall just short of an integer.
    assert solve(5, 10, 0.7, mtaf).head_lens[0] == 7
    assert solve(5, 100, 0.29, mtaf).head_lens[0] == 29
    assert solve(5, 100, 0.57, mtaf).head_lens[0] == 57
    # n_3 = (3 * 10 - 7) / 2 = 11.5; n_3 = (3 * 20 - 14) / 2 = 23 exactly.
    assert solve(3, 10, 0.7, mtaf) == Allocation((7, 11), 11)
    assert solve(3, 20, 0.7, mtaf) == Allocation((14, 23), 23)


@given(st.integers(3, 60), budgets, ratios, mtafs)
@settings(deadline=None)
def test_equals_the_solved_linear_system(m, n_avg, r, mtaf):
    heads, n_l = equation_4(m, n_avg, r, mtaf)
    allocation = solve(m, n_avg, r, mtaf)
    assert allocation.head_lens == tuple(math.floor(n_i) for n_i in heads)
    assert allocation.latest_len == math.floor(n_l)


@given(chunk_counts, budgets, ratios, mtafs)
@settings(deadline=None)
def test_budget_is_never_exceeded_nor_far_from_spent(m, n_avg, r, mtaf):
    allocation = solve(m, n_avg, r, mtaf)
    total = sum(allocation.head_lens) + allocation.latest_len
    assert total <= m * n_avg
    assert len(allocation.head_lens) == m - 1
    if m >= 2:
        # Each of the M windows loses less than one token to its floor.
        assert total > m * n_avg - m


@given(chunk_counts, budgets, ratios, mtafs)
@settings(deadline=None)
def test_heads_grow_up_to_the_latest_window(m, n_avg, r, mtaf):
    allocation = solve(m, n_avg, r, mtaf)
    lens = [*allocation.head_lens, allocation.latest_len]
    assert lens == sorted(lens)
    assert lens[0] >= 0
    if m >= 2:
        assert allocation.latest_len == allocation.head_lens[-1] >= n_avg


@given(chunk_counts, st.integers(1, 40), budgets, ratios, mtafs)
@settings(deadline=None)
def test_proposition_1(m, extra, n_avg, r, mtaf):
    """More chunks never raise the allocation of an earlier one (section 3.3.2)."""
    fewer = solve(m, n_avg, r, mtaf).head_lens
    more = solve(m + extra, n_avg, r, mtaf).head_lens
    assert all(a >= b for a, b in zip(fewer, more, strict=False))


@pytest.mark.parametrize("mtaf", MTAFS)
def test_a_thousand_chunks_neither_overflow_nor_overspend(mtaf):
    allocation = solve(1000, 32, 0.1, mtaf)
    total = sum(allocation.head_lens) + allocation.latest_len
    assert 31_000 < total <= 32_000


@given(st.floats(0, 1, exclude_min=True, exclude_max=True), st.integers(1, 20), mtafs)
@settings(deadline=None)
def test_any_float_ratio_is_accepted(r, m, mtaf):
    allocation = solve(m, 32, r, mtaf)
    assert sum(allocation.head_lens) + allocation.latest_len <= m * 32


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 32, 0.1, "linear"),
        (3, 0, 0.1, "linear"),
        (3, 32, 0.0, "linear"),
        (3, 32, 1.0, "linear"),
        (3, 32, float("nan"), "linear"),
        (3, 32, 0.1, "cubic"),
    ],
)
def test_refuses_arguments_out_of_range(arguments):
    with pytest.raises(ConfigError):
        solve(*arguments)
