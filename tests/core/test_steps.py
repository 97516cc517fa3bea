"""Waves: every token exactly once, in order, within the limits of a forward pass."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daric_rag.errors import EngineError
from daric_rag.steps import (
    GenerationItem,
    Limits,
    Piece,
    generation_batches,
    window_waves,
)

limits_of_a_pass = st.builds(Limits, st.integers(1, 20), st.integers(1, 5))


@st.composite
def window_lists(draw):
    """Sorted, disjoint, non-touching windows of a few requests."""
    requests = []
    for _ in range(draw(st.integers(0, 4))):
        edges = draw(st.lists(st.integers(0, 60), unique=True, max_size=12))
        edges = sorted(edges)[: len(edges) // 2 * 2]
        requests.append(list(zip(edges[::2], edges[1::2], strict=True)))
    return requests


@st.composite
def passes(draw):
    """Limits of a pass, and what vLLM has put into its own."""
    limits = draw(limits_of_a_pass)
    scheduled = Limits(
        draw(st.integers(0, limits.max_num_tokens)),
        draw(st.integers(0, limits.max_num_seqs)),
    )
    return limits, scheduled


def tokens_of(wave):
    return [(piece.index, p) for piece in wave for p in range(piece.start, piece.end)]


@given(window_lists(), passes())
@settings(max_examples=500)
def test_each_token_of_each_window_is_computed_once(windows, limits):
    waves = window_waves(windows, limits=limits[0], scheduled=limits[1])
    computed = [t for wave in (*waves.early, waves.final) for t in tokens_of(wave)]
    wanted = [
        (index, p)
        for index, spans in enumerate(windows)
        for start, end in spans
        for p in range(start, end)
    ]
    assert sorted(computed) == sorted(wanted)
    # Per request in order, because a token needs every earlier one.
    for index in range(len(windows)):
        order = [p for i, p in computed if i == index]
        assert order == sorted(order)


@given(window_lists(), passes())
@settings(max_examples=500)
def test_a_requests_positions_ascend_from_wave_to_wave(windows, limits):
    waves = window_waves(windows, limits=limits[0], scheduled=limits[1])
    for index in range(len(windows)):
        bounds = [
            (min(p.start for p in own), max(p.end for p in own))
            for wave in (*waves.early, waves.final)
            if (own := [piece for piece in wave if piece.index == index])
        ]
        assert all(left[1] <= right[0] for left, right in pairwise(bounds))
    for wave in (*waves.early, waves.final):
        for index in range(len(windows)):
            spans = [(p.start, p.end) for p in wave if p.index == index]
            assert all(a[1] <= b[0] for a, b in pairwise(spans))


@given(window_lists(), passes())
@settings(max_examples=500)
def test_no_pass_exceeds_the_limits(windows, limits):
    limit, scheduled = limits
    waves = window_waves(windows, limits=limit, scheduled=scheduled)
    for wave in waves.early:
        assert 0 < len(tokens_of(wave)) <= limit.max_num_tokens
        assert 0 < len(wave) <= limit.max_num_seqs
    assert all(p.start < p.end for wave in (*waves.early, waves.final) for p in wave)
    num_tokens = scheduled.max_num_tokens + len(tokens_of(waves.final))
    assert num_tokens <= limit.max_num_tokens
    assert scheduled.max_num_seqs + len(waves.final) <= limit.max_num_seqs


@given(window_lists(), passes())
def test_a_pass_of_its_own_is_made_only_when_vllms_is_full(windows, limits):
    limit, scheduled = limits
    waves = window_waves(windows, limits=limit, scheduled=scheduled)
    if waves.early:
        seats = limit.max_num_seqs - scheduled.max_num_seqs - len(waves.final)
        room = limit.max_num_tokens - scheduled.max_num_tokens
        assert seats == 0 or room == len(tokens_of(waves.final))
    for wave in waves.early[:-1]:
        full = len(tokens_of(wave)) == limit.max_num_tokens
        assert full or len(wave) == limit.max_num_seqs


def test_window_waves_by_hand():
    # Room for 5 tokens and 3 sequences beside vLLM's: the latest ones join it.
    waves = window_waves(
        [[(0, 4), (10, 14)], [(8, 11)]],
        limits=Limits(8, 4),
        scheduled=Limits(3, 1),
    )
    assert waves.final == (Piece(1, 10, 11), Piece(0, 10, 14))
    assert waves.early == ((Piece(0, 0, 4), Piece(1, 8, 10)),)


def test_without_windows_there_is_nothing_to_do():
    waves = window_waves([[], []], limits=Limits(8, 4), scheduled=Limits(8, 4))
    assert (waves.early, waves.final) == ((), ())


# ------------------------------------------------------------------------ generation

SCRATCH = tuple(range(100, 106))  # six blocks of 4 tokens
BLOCK_SIZE = 4


@st.composite
def item_lists(draw):
    items = []
    for _ in range(draw(st.integers(0, 8))):
        num_tokens = draw(st.integers(1, len(SCRATCH) * BLOCK_SIZE))
        loaded = draw(st.integers(0, num_tokens))
        items.append(GenerationItem(tuple(range(num_tokens)), loaded))
    return items


def batches_of(items, limits):
    return generation_batches(
        items, scratch_block_ids=SCRATCH, block_size=BLOCK_SIZE, limits=limits
    )


@given(item_lists(), limits_of_a_pass)
@settings(max_examples=300)
def test_scratch_blocks_are_disjoint_and_suffice(items, limits):
    batches = batches_of(items, limits)
    indices = [index for batch in batches for index in batch.block_ids]
    assert indices == list(range(len(items)))
    for batch in batches:
        blocks = [block for ids in batch.block_ids.values() for block in ids]
        assert len(blocks) == len(set(blocks))
        assert set(blocks) <= set(SCRATCH)
        for index, ids in batch.block_ids.items():
            assert len(ids) == -(-items[index].num_tokens // BLOCK_SIZE)


@given(item_lists(), limits_of_a_pass)
@settings(max_examples=300)
def test_each_missing_token_is_generated_once_and_in_order(items, limits):
    for batch in batches_of(items, limits):
        generated = [t for wave in batch.waves for t in tokens_of(wave)]
        assert {index for index, _ in generated} <= set(batch.block_ids)
        for index in batch.block_ids:
            item = items[index]
            order = [p for i, p in generated if i == index]
            assert order == list(range(item.num_loaded_tokens, item.num_tokens))


@given(item_lists(), limits_of_a_pass)
@settings(max_examples=300)
def test_no_generation_pass_exceeds_the_limits(items, limits):
    for batch in batches_of(items, limits):
        for wave in batch.waves:
            assert 0 < len(tokens_of(wave)) <= limits.max_num_tokens
            assert 0 < len(wave) <= limits.max_num_seqs
            sequences = [piece.index for piece in wave]
            assert len(sequences) == len(set(sequences))


def test_generation_by_hand():
    items = [
        GenerationItem((0,) * n, loaded) for n, loaded in ((9, 4), (12, 0), (4, 4))
    ]
    first, second = batches_of(items, Limits(8, 2))
    # Three blocks each; the third chunk finds none left.
    assert first.block_ids == {0: (100, 101, 102), 1: (103, 104, 105)}
    assert first.waves == (
        (Piece(0, 4, 9), Piece(1, 0, 3)),
        (Piece(1, 3, 11),),
        (Piece(1, 11, 12),),
    )
    # It is all loaded: blocks to be placed from, and nothing to compute.
    assert (second.block_ids, second.waves) == ({2: (100,)}, ())


def test_a_chunk_beyond_all_scratch_blocks_is_refused():
    item = GenerationItem((0,) * 25, 0)
    with pytest.raises(EngineError, match="25 tokens needs 7 scratch blocks of 4"):
        batches_of([item], Limits(8, 2))
