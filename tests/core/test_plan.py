"""Every position of an admitted request has exactly the owner the plan promises."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daric_rag.chunk_plan import SegmentSave
from daric_rag.config import DaricConfig
from daric_rag.keys import model_fingerprint, segment_keys
from daric_rag.plan import RequestPlan, plan_request
from daric_rag.selection import recompute_set
from daric_rag.wire import RequestWire

ROOT = model_fingerprint({"model": "tiny"})


@dataclass
class Case:
    """A request, what the index answers to it, and the plan."""

    wire: RequestWire
    gpu_prefix_len: int
    max_segment_len: int
    hit_segments: tuple[int, ...]  # per cached chunk, capped at what it has
    max_generated_len: int | None = None
    plan: RequestPlan = field(init=False)

    def __post_init__(self):
        answers = iter(self.hit_segments)
        self.token_ids = [p % 7 for p in range(self.wire.prompt_len)]
        self.plan = plan_request(
            self.wire,
            self.token_ids,
            gpu_prefix_len=self.gpu_prefix_len,
            root=ROOT,
            max_segment_len=self.max_segment_len,
            match=lambda keys: min(next(answers), len(keys)),
            max_generated_len=self.max_generated_len,
        )

    def cached(self):
        """The rules again, naively: (start, end, tokens hit) of every cached chunk."""
        spans = [
            span
            for span, keep in zip(self.wire.spans, self.wire.reusable, strict=True)
            if keep
        ]
        if len(self.wire.spans) == 1 and not self.wire.save_tail:
            end = self.wire.prompt_len
            whole = end - end % self.max_segment_len
            spans = [(0, whole)] if spans and whole else []
        return [
            (start, end, min(answer * self.max_segment_len, end - start))
            for (start, end), answer in zip(spans, self.hit_segments, strict=False)
        ]

    def is_too_long(self, num_tokens):
        limit = self.max_generated_len
        return limit is not None and num_tokens > limit

    def window_positions(self):
        return positions(self.plan.windows)

    def expected_window_positions(self):
        wire = self.wire
        expected = positions(
            recompute_set(wire.spans, wire.reusable, wire.config, mode=wire.mode)
        )
        everything = set(range(wire.prompt_len))
        expected |= everything - positions((a, b) for a, b, _ in self.cached())
        for start, end, hit_len in self.cached():
            if start == 0:
                expected |= set(range(hit_len, end))
            elif hit_len < end - start and self.is_too_long(end - start):
                expected |= set(range(start, end))
        return expected - set(range(self.gpu_prefix_len))


def positions(spans):
    return {p for start, end in spans for p in range(start, end)}


@st.composite
def cases(draw, max_prefix_over=0):
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    ends = tuple(sum(lengths[: i + 1]) for i in range(len(lengths)))
    # The question is never cached; a lone chunk may be.
    flags = [draw(st.booleans()) for _ in lengths]
    flags[-1] = flags[-1] and len(lengths) == 1
    config = DaricConfig(
        policy=draw(st.sampled_from(["daric", "equal"])),
        avg_chunk_budget=draw(st.integers(1, 8)),
        mtaf=draw(st.sampled_from(["linear", "log", "exp"])),
    )
    wire = RequestWire(
        ends=ends,
        reusable=tuple(flags),
        mode=draw(st.sampled_from(["daric", "full_reuse"])),
        config=config,
        save_tail=draw(st.booleans()),
    )
    return Case(
        wire=wire,
        gpu_prefix_len=draw(st.integers(0, ends[-1] - 1 + max_prefix_over)),
        max_segment_len=draw(st.integers(1, 8)),
        hit_segments=tuple(draw(st.sampled_from([0, 1, 2, 99])) for _ in lengths),
        max_generated_len=draw(st.none() | st.integers(0, 20)),
    )


@given(cases())
@settings(max_examples=300)
def test_every_position_has_an_owner(case):
    owned = case.window_positions() | positions(
        (chunk.place_from, chunk.end) for chunk in case.plan.chunks
    )
    assert owned == set(range(case.gpu_prefix_len, case.wire.prompt_len))


@given(cases(max_prefix_over=5))
@settings(max_examples=300)
def test_nothing_in_the_gpu_prefix_is_written(case):
    plan = case.plan
    assert all(start >= case.gpu_prefix_len for start, _ in plan.windows)
    assert all(chunk.place_from >= case.gpu_prefix_len for chunk in plan.chunks)
    assert all(chunk.start <= chunk.place_from < chunk.end for chunk in plan.chunks)


@given(cases())
@settings(max_examples=300)
def test_the_windows_are_the_refined_recompute_set(case):
    windows = case.plan.windows
    assert case.window_positions() == case.expected_window_positions()
    assert all(start < end for start, end in windows)
    assert all(left[1] < right[0] for left, right in pairwise(windows))
    assert case.plan.recompute_len == len(case.window_positions())


@given(cases())
@settings(max_examples=300)
def test_the_last_window_is_claimed_to_be_scheduled(case):
    plan = case.plan
    assert plan.hit_len == plan.windows[-1][0]
    assert case.gpu_prefix_len <= plan.hit_len < case.wire.prompt_len
    assert plan.windows[-1][1] == case.wire.prompt_len
    assert plan.early_windows == plan.windows[:-1]
    assert all(end < plan.hit_len for _, end in plan.early_windows)
    assert plan.num_external_tokens == plan.hit_len - case.gpu_prefix_len


@given(cases())
@settings(max_examples=300)
def test_a_chunk_is_placed_when_a_position_of_it_is_not_computed_anyway(case):
    windows = case.window_positions()
    needed = []
    for start, end, hit_len in case.cached():
        stop = hit_len if start == 0 else end
        wanted = set(range(max(start, case.gpu_prefix_len), stop))
        if wanted - windows:
            needed.append((start, stop))
    assert [(chunk.start, chunk.end) for chunk in case.plan.chunks] == needed


@given(cases())
@settings(max_examples=300)
def test_placed_chunks_know_their_segments(case):
    cached = {start: (end, hit_len) for start, end, hit_len in case.cached()}
    missing = 0
    for chunk in case.plan.chunks:
        _, hit_len = cached[chunk.start]
        ids = case.token_ids[chunk.start : chunk.end]
        assert chunk.keys == segment_keys(ROOT, ids, case.max_segment_len)
        assert chunk.hit_len == hit_len
        spans = [chunk.segment_span(i) for i in range(len(chunk.keys))]
        assert [p for a, b in spans for p in range(a, b)] == [*range(chunk.num_tokens)]
        missing += chunk.num_tokens - hit_len
        assert hit_len == chunk.num_tokens or not case.is_too_long(chunk.num_tokens)
        if chunk.start == 0:
            # An exact prefix: what is missing of it is computed in place.
            assert chunk.hit_len == chunk.num_tokens
    assert case.plan.missing_len == missing


@given(cases())
@settings(max_examples=300)
def test_hit_tokens_against_a_naive_count(case):
    placed = {chunk.start: chunk for chunk in case.plan.chunks}
    cached = {start: (end, hit_len) for start, end, hit_len in case.cached()}
    contiguous = disjoint = 0
    behind_a_miss = False
    for start, _ in case.wire.spans:
        if start not in cached:
            behind_a_miss = True
            continue
        end, hit_len = cached[start]
        if start in placed:
            assert placed[start].contiguous is not behind_a_miss
        for p in range(start, start + hit_len):
            if start in placed and p >= case.gpu_prefix_len:
                contiguous += not behind_a_miss
                disjoint += behind_a_miss
        behind_a_miss = behind_a_miss or hit_len < end - start
    assert case.plan.contiguous_hit_len == contiguous
    assert case.plan.disjoint_hit_len == disjoint


@given(cases())
@settings(max_examples=300)
def test_saves_tile_what_is_missing_of_the_first_chunk(case):
    first = [chunk for chunk in case.cached() if chunk[0] == 0]
    if not first:
        assert case.plan.saves == ()
        return
    (_, end, hit_len) = first[0]
    saves = case.plan.saves
    edges = [hit_len, *(save.end for save in saves)]
    assert [save.start for save in saves] == edges[:-1]
    assert edges[-1] == end
    keys = segment_keys(ROOT, case.token_ids[:end], case.max_segment_len)
    assert case.plan.first_keys == keys
    assert [save.index for save in saves] == [*range(len(keys))][
        len(keys) - len(saves) :
    ]
    # They lie in the request's blocks, exact: computed here or in the GPU prefix.
    done = case.window_positions() | set(range(case.gpu_prefix_len))
    assert positions((save.start, save.end) for save in saves) <= done


@given(cases(max_prefix_over=0), st.integers(0, 9))
def test_a_resumed_requests_prefix_may_reach_beyond_the_prompt(case, excess):
    length = case.wire.prompt_len + excess
    resumed = Case(case.wire, length, case.max_segment_len, case.hit_segments)
    plan = resumed.plan
    assert (plan.chunks, plan.windows, plan.hit_len) == ((), (), length)
    assert plan.num_external_tokens == plan.recompute_len == plan.missing_len == 0
    assert (plan.contiguous_hit_len, plan.disjoint_hit_len) == (0, 0)


# ------------------------------------------------------------------ checked by hand


def case_of(
    ends, hits, *, gpu_prefix_len=0, mode="full_reuse", reusable=None, **fields
):
    flags = reusable or [True] * (len(ends) - 1) + [len(ends) == 1]
    wire = RequestWire(
        ends, tuple(flags), mode, DaricConfig(**fields.pop("config", {}))
    )
    wire = RequestWire(wire.ends, wire.reusable, mode, wire.config, **fields)
    return Case(wire, gpu_prefix_len, 4, hits)


def test_a_hole_between_two_hits():
    # Chunks [0, 4) hit, [4, 10) miss, [10, 16) hit, question [16, 18).
    plan = case_of((4, 10, 16, 18), (9, 0, 9)).plan
    assert plan.windows == ((16, 18),)
    assert plan.hit_len == 16
    assert [(c.start, c.end, c.hit_len) for c in plan.chunks] == [
        (0, 4, 4),
        (4, 10, 0),
        (10, 16, 6),
    ]
    assert (plan.contiguous_hit_len, plan.disjoint_hit_len) == (4, 6)
    assert plan.missing_len == 6
    assert plan.saves == ()


def test_leading_segments_of_a_chunk_are_a_hit():
    plan = case_of((4, 14, 16), (9, 2)).plan
    assert [(c.num_hit_segments, c.hit_len) for c in plan.chunks] == [(1, 4), (2, 8)]
    assert (plan.contiguous_hit_len, plan.disjoint_hit_len) == (12, 0)
    assert plan.missing_len == 2


def test_a_missing_first_chunk_is_computed_in_place_and_saved():
    case = case_of((6, 10, 12), (1, 9))
    plan = case.plan
    keys = segment_keys(ROOT, case.token_ids[:6], 4)
    assert plan.windows == ((4, 6), (10, 12))
    assert [(c.start, c.end) for c in plan.chunks] == [(0, 4), (6, 10)]
    assert plan.saves == (SegmentSave(1, 4, 6, ends_document=True),)
    assert plan.first_keys == keys
    # What is loaded of it is not the document's end.
    assert [chunk.ends_document for chunk in plan.chunks] == [False, True]
    assert (plan.contiguous_hit_len, plan.disjoint_hit_len) == (4, 4)


def test_a_chunk_within_the_windows_is_neither_loaded_nor_generated():
    # Heads of 4 tokens cover the second chunk, hit or miss, but not the third.
    for hits in ((9, 9, 9), (9, 0, 9)):
        plan = case_of(
            (4, 7, 30, 32),
            hits,
            mode="daric",
            config={"avg_chunk_budget": 4, "policy": "equal"},
        ).plan
        assert plan.windows == ((4, 11), (28, 32))
        assert [chunk.start for chunk in plan.chunks] == [0, 7]
        assert plan.missing_len == 0


def test_the_gpu_prefix_cuts_a_window_and_a_chunk():
    plan = case_of(
        (4, 12, 20, 22),
        (9, 9, 9),
        gpu_prefix_len=6,
        mode="daric",
        config={"avg_chunk_budget": 3, "policy": "equal"},
    ).plan
    assert plan.windows == ((6, 7), (12, 15), (19, 22))
    assert [(c.start, c.place_from) for c in plan.chunks] == [(4, 6), (12, 12)]
    assert (plan.contiguous_hit_len, plan.num_external_tokens) == (6 + 8, 13)


@pytest.mark.parametrize(
    ("save_tail", "hits", "windows", "loaded", "saved"),
    [
        # Full segments only: the ragged tail [8, 10) is computed and never saved.
        (False, (0,), ((0, 10),), [], [(0, 4), (4, 8)]),
        (False, (1,), ((4, 10),), [(0, 4)], [(4, 8)]),
        (False, (9,), ((8, 10),), [(0, 8)], []),
        # Pre-warming: the tail is a segment too; one token is computed nevertheless.
        (True, (0,), ((0, 10),), [], [(0, 4), (4, 8), (8, 10)]),
        (True, (2,), ((8, 10),), [(0, 8)], [(8, 10)]),
        (True, (9,), ((9, 10),), [(0, 10)], []),
    ],
)
def test_a_lone_chunk_is_matched_like_a_prefix(save_tail, hits, windows, loaded, saved):
    plan = case_of((10,), hits, save_tail=save_tail).plan
    assert plan.windows == windows
    assert [(c.start, c.end) for c in plan.chunks] == loaded
    assert [(s.start, s.end) for s in plan.saves] == saved
    # A raw prompt's full segments are a prefix of it, and no document.
    assert any(s.ends_document for s in plan.saves) is (save_tail and bool(saved))
    assert plan.contiguous_hit_len == sum(end - start for start, end in loaded)


def test_a_lone_chunk_shorter_than_a_segment_is_an_ordinary_prompt():
    plan = case_of((3,), ()).plan
    assert (plan.windows, plan.chunks, plan.saves) == (((0, 3),), (), ())


def test_a_chunk_too_long_to_be_generated_is_computed_in_context():
    wire = RequestWire((4, 14, 16), (True, True, False), "full_reuse", DaricConfig())
    for hits, windows in ((1, ((4, 16),)), (9, ((14, 16),))):
        plan = Case(wire, 0, 4, (9, hits), max_generated_len=8).plan
        assert plan.windows == windows
    # The first chunk is never generated, so what is stored of it is loaded.
    alone = RequestWire((10,), (True,), "daric", DaricConfig())
    plan = Case(alone, 0, 4, (1,), max_generated_len=4).plan
    assert plan.windows == ((4, 10),)
    assert [(chunk.start, chunk.end) for chunk in plan.chunks] == [(0, 4)]


def test_without_reusable_chunks_everything_is_computed():
    plan = case_of((4, 10), (), reusable=[False, False]).plan
    assert (plan.windows, plan.chunks, plan.saves) == (((0, 10),), (), ())
    assert plan.hit_len == 0
