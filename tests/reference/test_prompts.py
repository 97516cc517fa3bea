"""Tests of the prompt helpers, by hand-checked numbers."""

from itertools import pairwise

import pytest

from tests.reference.prompts import (
    LONG_LENS,
    MIXED_LENS,
    Prompt,
    as_windows,
    head_windows,
    random_chunks,
    random_prompt,
    scattered_windows,
    scenarios,
)

SMALL = Prompt(((1, 2, 3), (4,), (5, 6, 7, 8, 9), (10, 11)))


def test_spans_partition_the_prompt() -> None:
    assert SMALL.spans == ((0, 3), (3, 4), (4, 9), (9, 11))
    assert SMALL.token_ids == tuple(range(1, 12))
    assert SMALL.prompt_len == 11
    assert SMALL.reordered([0, 2, 1, 3]).spans == ((0, 3), (3, 8), (8, 9), (9, 11))
    assert SMALL.replaced(1, [7, 7]).token_ids[3:5] == (7, 7)


def test_head_windows() -> None:
    assert head_windows(SMALL, 0) == ((9, 11),)
    assert head_windows(SMALL, 2) == ((3, 6), (9, 11))
    assert head_windows(SMALL, 1, latest_len=4) == ((3, 5), (7, 11))
    assert head_windows(SMALL, 99, latest_len=99) == ((0, 11),)
    assert as_windows([5, 3, 4, 9, 9]) == ((3, 6), (9, 10))


def test_scattered_windows_are_many_and_end_at_the_last_token() -> None:
    prompt = random_prompt(0, LONG_LENS)
    windows = scattered_windows(0, prompt, 150)
    assert len(windows) > 100
    assert windows[-1][1] == prompt.prompt_len
    assert all(left[1] < right[0] for left, right in pairwise(windows))


def test_random_chunks_are_seeded() -> None:
    chunks = random_chunks(1, MIXED_LENS, 512)
    assert chunks == random_chunks(1, MIXED_LENS, 512)
    assert chunks != random_chunks(2, MIXED_LENS, 512)
    assert tuple(map(len, chunks)) == MIXED_LENS
    assert all(16 <= token < 512 for chunk in chunks for token in chunk)
    with pytest.raises(ValueError, match="cannot draw"):
        random_chunks(1, (3, 0), 512)


def test_scenarios() -> None:
    by_name = {s.name: s for s in scenarios(0, lens=(3, 4, 5, 6, 2))}
    hits = {name: "".join("-h"[hit] for hit in s.hits) for name, s in by_name.items()}
    assert hits == {
        "all_hit": "hhhh-",
        "all_miss": "-----",
        "hole": "h-h--",
        "contiguous": "hh---",
        "disjoint": "--hh-",
        "reordered": "hhhh-",
        "repeated": "-----",
        "monolithic": "-",
    }
    assert [len(c) for c in by_name["reordered"].prompt.chunks] == [3, 6, 5, 4, 2]
    assert [len(c) for c in by_name["repeated"].prompt.chunks] == [3, 5, 4, 5, 2]
    with pytest.raises(ValueError, match="four"):
        scenarios(0, lens=(1, 2, 3))
