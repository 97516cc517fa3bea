"""Layouts: spans partition the prompt, padding stays inside, ids stay untouched."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.config import DaricConfig
from daric_rag.errors import ConfigError, PromptError
from daric_rag.layout import (
    Chunk,
    PromptLayout,
    Segment,
    build_layout,
    cut_segments,
    split_delimited,
)
from daric_rag.selection import recompute_set

EXACT = DaricConfig()
BLOCK = DaricConfig(alignment="block")
PAD = 99

token_lists = st.lists(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20),
    min_size=1,
    max_size=8,
)
configs = st.builds(
    DaricConfig,
    policy=st.sampled_from(["daric", "equal"]),
    alignment=st.sampled_from(["exact", "block"]),
    avg_chunk_budget=st.integers(1, 8),
)


def build(pieces, config=EXACT, block_size=4, reusable=None):
    return build_layout(
        pieces,
        config=config,
        block_size=block_size,
        pad_token_id=PAD,
        reusable=reusable,
    )


def test_exact_by_hand():
    layout = build([[1, 2, 3], [4, 5], [6]])
    assert layout.token_ids == (1, 2, 3, 4, 5, 6)
    assert layout.spans == ((0, 3), (3, 5), (5, 6))
    assert [chunk.reusable for chunk in layout.chunks] == [True, True, False]
    assert (layout.num_chunks, layout.prompt_len) == (3, 6)
    assert (layout.padding_len, layout.block_size) == (0, None)


def test_block_by_hand():
    # p_2 = (4 - 3 mod 4) mod 4 = 1, p_3 = (4 - 6 mod 4) mod 4 = 2, no tail padding.
    layout = build([[1, 2, 3], [4, 5], [6]], BLOCK)
    assert layout.token_ids == (1, 2, 3, PAD, 4, 5, PAD, PAD, 6)
    assert layout.chunks == (
        Chunk(0, 4, True, 1),
        Chunk(4, 8, True, 2),
        Chunk(8, 9, False, 0),
    )
    assert (layout.padding_len, layout.block_size) == (3, 4)


def test_block_adds_nothing_to_aligned_chunks():
    layout = build([[1] * 4, [2] * 8, [3]], BLOCK)
    assert layout.padding_len == 0
    assert layout.token_ids == build([[1] * 4, [2] * 8, [3]]).token_ids


@given(token_lists, configs, st.integers(1, 9))
def test_every_layout_is_a_padded_concatenation(pieces, config, block_size):
    layout = build(pieces, config, block_size)
    assert len(layout.chunks) == len(pieces)
    for chunk, piece in zip(layout.chunks, pieces, strict=True):
        assert list(layout.token_ids[chunk.start : chunk.end - chunk.pad_len]) == piece
        padding = layout.token_ids[chunk.end - chunk.pad_len : chunk.end]
        assert padding == (PAD,) * chunk.pad_len
        if config.alignment == "block":
            assert chunk.start % block_size == 0
            assert chunk.pad_len < block_size
        else:
            assert chunk.pad_len == 0
    assert layout.chunks[-1].end == layout.prompt_len == len(layout.token_ids)
    assert layout.prompt_len == sum(map(len, pieces)) + layout.padding_len
    assert layout.chunks[-1].pad_len == 0


@given(token_lists, configs)
def test_windows_are_the_recompute_set(pieces, config):
    layout = build(pieces, config)
    flags = [chunk.reusable for chunk in layout.chunks]
    assert layout.windows == recompute_set(layout.spans, flags, config)
    assert layout.recompute_len == sum(end - start for start, end in layout.windows)
    question = layout.spans[-1]
    assert any(s <= question[0] and question[1] <= e for s, e in layout.windows)


def test_the_question_is_never_reusable():
    layout = build([[1], [2], [3]], reusable=[True, False, True])
    assert [chunk.reusable for chunk in layout.chunks] == [True, False, False]


def test_a_lone_chunk_may_be_made_reusable():
    assert build([[1, 2, 3]]).windows == ((0, 3),)
    assert build([[1, 2, 3]], reusable=[True]).windows == ((2, 3),)


def test_numpy_ids_become_ints():
    layout = build([np.array([1, 2], dtype=np.int64), [3]])
    assert layout.token_ids == (1, 2, 3)
    assert all(type(token_id) is int for token_id in layout.token_ids)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([], "no chunk"),
        ([[1], [], [2]], "chunk 1 is empty"),
        ([[1], []], "chunk 1 is empty"),
        ([[1], [-1]], "chunk 1 has a token id outside"),
        ([[2**32], [1]], "chunk 0 has a token id outside"),
        ([["a"], [1]], "chunk 0 holds something other"),
        (["text", [1]], "chunk 0 holds something other"),
        ([[1.0], [1]], "chunk 0 holds something other"),
        ([None, [1]], "chunk 0 holds something other"),
    ],
)
def test_refuses_unusable_chunks(pieces, text):
    with pytest.raises(PromptError, match=text):
        build(pieces)


def test_refuses_a_bad_pad_token_only_where_it_is_used():
    with pytest.raises(PromptError, match="padding"):
        build_layout([[1], [2]], config=BLOCK, block_size=4, pad_token_id=-1)
    build_layout([[1], [2]], config=EXACT, block_size=4, pad_token_id=-1)


def test_refuses_other_misuse():
    with pytest.raises(PromptError, match="reusable has 1 values for 2 chunks"):
        build([[1], [2]], reusable=[True])
    with pytest.raises(ConfigError, match="block_size is 0"):
        build([[1]], block_size=0)


@pytest.mark.parametrize(
    ("chunks", "windows"),
    [
        ((), ()),
        ((Chunk(0, 3, True),), ()),
        ((Chunk(1, 4, True),), ()),
        ((Chunk(0, 2, True), Chunk(3, 4, False)), ()),
        ((Chunk(0, 0, True), Chunk(0, 4, False)), ()),
        ((Chunk(0, 2, True, 2), Chunk(2, 4, False)), ()),
        ((Chunk(0, 2, True, -1), Chunk(2, 4, False)), ()),
        ((Chunk(0, 4, True),), ((-1, 2),)),
        ((Chunk(0, 4, True),), ((3, 5),)),
        ((Chunk(0, 4, True),), ((2, 2),)),
        ((Chunk(0, 4, True),), ((2, 3), (0, 1))),
        ((Chunk(0, 4, True),), ((0, 2), (2, 4))),
    ],
)
def test_a_layout_checks_itself(chunks, windows):
    with pytest.raises(PromptError):
        PromptLayout((7, 7, 7, 7), chunks, windows, None)


def test_cut_segments_by_hand():
    segments = cut_segments(Chunk(10, 21, True, pad_len=2), 4)
    assert segments == (Segment(10, 14), Segment(14, 18), Segment(18, 21))
    with pytest.raises(ConfigError):
        cut_segments(Chunk(0, 4, True), 0)


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 300))
def test_segments_partition_their_chunk(start, length, max_segment_len):
    segments = cut_segments(Chunk(start, start + length, True), max_segment_len)
    assert segments[0].start == start
    assert segments[-1].end == start + length
    for left, right in pairwise(segments):
        assert left.end == right.start
        assert left.end - left.start == max_segment_len
    assert 0 < segments[-1].end - segments[-1].start <= max_segment_len


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("plain", ["plain"]),
        ("a##b##c", ["a", "b", "c"]),
        ("##a####b##", ["a", "b"]),
        ("a## ##b\n", ["a", " ", "b\n"]),
        ("a#b", ["a#b"]),
    ],
)
def test_split_delimited(text, pieces):
    assert split_delimited(text, "##") == pieces


def test_split_delimited_refuses_an_empty_delimiter():
    with pytest.raises(ConfigError, match="delimiter is empty"):
        split_delimited("text", "")


@given(st.lists(st.text("ab ", min_size=1), max_size=6))
def test_split_inverts_join(pieces):
    assert split_delimited("##".join(pieces), "##") == pieces
