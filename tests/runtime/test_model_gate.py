"""The full gate: every kind of model passes, and no fault of any of its steps does.

The engine under it is the dense reference over paged blocks, so that faults can be made
at will.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from daric_rag.errors import ConfigError, UnsupportedModelError
from daric_rag.runtime.kv_layout import SplitKv
from daric_rag.runtime.model_gate import GateEngine, ModelGate
from daric_rag.runtime.rope import RopeParameters
from daric_rag.runtime.step_builder import SubRequest
from daric_rag.steps import Limits
from tests.reference.dense import DenseReference, load_reference
from tests.reference.tiny_models import KINDS
from tests.runtime.paged_reference import NULL_MARK, PagedReference

pytestmark = pytest.mark.engine  # the rotation operator is vLLM's

KIND = "llama-gqa-tied"
DTYPES = (torch.float32, torch.bfloat16)
ReferenceOf = Callable[[str], DenseReference]
RunFault = Callable[[PagedReference, Sequence[SubRequest]], None]


def check(
    engine: PagedReference, *, max_model_len: int = 512, **faults: object
) -> None:
    """Put an engine through the gate, with some of its parts replaced."""
    parts = {
        "run": engine.run,
        "layout": engine.layout,
        "reencode": engine.reencoder().reencode_keys,
        "layers": engine.layers,
        "limits": engine.limits,
        "max_model_len": max_model_len,
        "vocab_size": 512,
    }
    ModelGate(GateEngine(**parts | faults)).check()  # type: ignore[arg-type]


def clean(engine: PagedReference) -> bool:
    """Whether the null block was left alone and all others are zero."""
    return all(
        bool((layer[0] == NULL_MARK).all()) and not layer[1:].any()
        for layer in engine.layers
    )


@pytest.fixture(params=DTYPES, ids=str)
def engine(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]
) -> PagedReference:
    """An engine of one kind, in either dtype."""
    return PagedReference(load_reference(tiny_model(KIND), request.param))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes(reference_of: ReferenceOf, kind: str) -> None:
    engine = PagedReference(reference_of(kind))
    check(engine)
    assert clean(engine)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, torch.bfloat16) for kind in KINDS] + [(KIND, torch.float16)],
    ids=str,
)
def test_every_kind_passes_in_half_precision(
    tiny_model: Callable[[str], Path], kind: str, dtype: torch.dtype
) -> None:
    check(PagedReference(load_reference(tiny_model(kind), dtype)))


@pytest.mark.parametrize(
    ("options", "max_model_len"),
    [
        ({"limits": Limits(16, 1)}, 512),
        ({"limits": Limits(50, 8)}, 512),
        ({"limits": Limits(512, 1)}, 512),
        ({"num_blocks": 2}, 512),
        ({"num_blocks": 3}, 512),
        ({"block_size": 16}, 512),
        ({"block_size": 128}, 512),
        ({}, 12),
    ],
    ids=str,
)
def test_small_engines_pass(
    reference_of: ReferenceOf, options: dict[str, object], max_model_len: int
) -> None:
    """The prompt shrinks, or takes more passes; faults are found all the same."""
    engine = PagedReference(reference_of(KIND), **options)  # type: ignore[arg-type]
    check(engine, max_model_len=max_model_len)
    assert clean(engine)
    with pytest.raises(UnsupportedModelError):
        check(
            engine,
            max_model_len=max_model_len,
            reencode=lambda keys, _: keys,
        )
    assert clean(engine)


@pytest.mark.parametrize(
    ("options", "max_model_len"), [({"num_blocks": 1}, 512), ({}, 8)], ids=str
)
def test_an_engine_that_holds_nothing_is_told_so(
    reference_of: ReferenceOf, options: dict[str, int], max_model_len: int
) -> None:
    engine = PagedReference(reference_of(KIND), **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        check(engine, max_model_len=max_model_len)


# Re-encoding.


def wrong_sign(engine: PagedReference, keys: Tensor, distance: int) -> Tensor:
    return engine.reencoder().reencode_keys(keys, -distance)


def off_by_one(engine: PagedReference, keys: Tensor, distance: int) -> Tensor:
    return engine.reencoder().reencode_keys(keys, distance + (distance > 0))


def other_pairs(engine: PagedReference, keys: Tensor, distance: int) -> Tensor:
    rope = engine.rope
    other = RopeParameters(rope.inv_freq, rope.rotary_dim, not rope.is_neox)
    return engine.reencoder(other).reencode_keys(keys, distance)


def not_at_all(engine: PagedReference, keys: Tensor, distance: int) -> Tensor:
    return keys


def last_layer_forgotten(engine: PagedReference, keys: Tensor, distance: int) -> Tensor:
    moved = engine.reencoder().reencode_keys(keys, distance)
    return torch.cat((moved[:-1], keys[-1:]))


def nan(engine: PagedReference, keys: Tensor, distance: int) -> Tensor:
    return keys * torch.nan


@pytest.mark.parametrize(
    "fault",
    [
        wrong_sign,
        off_by_one,
        other_pairs,
        not_at_all,
        last_layer_forgotten,
        nan,
    ],
)
def test_wrong_reencoding_is_found(
    engine: PagedReference, fault: Callable[[PagedReference, Tensor, int], Tensor]
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"keys of .* with vLLM alone"):
        check(engine, reencode=lambda keys, distance: fault(engine, keys, distance))
    assert clean(engine)


class WithoutRope(DenseReference):
    """Layer 1 does not turn its keys."""

    def _project(
        self, layer: object, x: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if layer is self.decoder.layers[1]:
            positions = torch.zeros_like(positions)
        return super()._project(layer, x, positions)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_without_rope_is_found(
    tiny_model: Callable[[str], Path], dtype: torch.dtype
) -> None:
    model = load_reference(tiny_model(KIND), dtype).model
    with pytest.raises(UnsupportedModelError, match="layer 1 "):
        check(PagedReference(WithoutRope(model)))


# Placing.


class WrongPlaces(SplitKv):
    """Writes layers in another order than it reads them."""

    def scatter(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        super().scatter(keys.flip(0), values.flip(0), block_ids, start)


class ForgottenValues(SplitKv):
    """Writes keys only."""

    def scatter(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        super().scatter(keys, values * 0, block_ids, start)


@pytest.mark.parametrize("kind", [WrongPlaces, ForgottenValues])
def test_wrong_placing_is_found(engine: PagedReference, kind: type[SplitKv]) -> None:
    layout = kind(engine.layers, engine.reference.head_dim)
    with pytest.raises(UnsupportedModelError, match="layer 0 "):
        check(engine, layout=layout)


# Recomputing in place.


def windows_of(subs: Iterable[SubRequest]) -> bool:
    return any(sub.start for sub in subs)


def other_blocks(engine: PagedReference, subs: Sequence[SubRequest]) -> None:
    """Windows go to the sequence's blocks in another order."""
    engine.run(
        [
            SubRequest(sub.token_ids, sub.start, sub.end, [*sub.block_ids][::-1])
            for sub in subs
        ]
    )


def stale_windows(engine: PagedReference, subs: Sequence[SubRequest]) -> None:
    """Windows read what was there before, not what the others write."""
    before = [layer.clone() for layer in engine.layers]
    found = []
    for sub in subs:
        for layer, kept in zip(engine.layers, before, strict=True):
            layer.copy_(kept)
        engine.run([sub])
        cache = engine.read(sub.block_ids, sub.end)
        found.append((cache.keys[:, sub.start :], cache.values[:, sub.start :]))
    for sub, (keys, values) in zip(subs, found, strict=True):
        engine.layout.scatter(keys, values, sub.block_ids, sub.start)


def lost_window(engine: PagedReference, subs: Sequence[SubRequest]) -> None:
    """One window is not computed."""
    engine.run([subs[0], subs[2]])


def late_windows(engine: PagedReference, subs: Sequence[SubRequest]) -> None:
    """Windows begin one token late."""
    engine.run(
        [
            SubRequest(sub.token_ids, sub.start + 1, sub.end, sub.block_ids)
            for sub in subs
        ]
    )


@pytest.mark.parametrize("fault", [other_blocks, stale_windows, lost_window])
def test_wrong_windows_are_found(engine: PagedReference, fault: RunFault) -> None:
    _refused_for_windows(engine, fault)


def test_a_token_left_out_is_found_in_full_precision(reference_of: ReferenceOf) -> None:
    """In bfloat16 a token or two of 48 may be within what rounding is allowed."""
    _refused_for_windows(PagedReference(reference_of(KIND)), late_windows)


def _refused_for_windows(engine: PagedReference, fault: RunFault) -> None:
    def run(subs: Sequence[SubRequest]) -> None:
        (fault if windows_of(subs) else PagedReference.run)(engine, subs)

    with pytest.raises(UnsupportedModelError, match="recomputed in place"):
        check(engine, run=run)
    assert clean(engine)


@pytest.mark.parametrize("content", [torch.nan, 0.0, 1.0])
def test_an_engine_that_computes_nothing_is_found(
    engine: PagedReference, content: float
) -> None:
    """Both sides are alike then, which is no equality."""

    def run(subs: Sequence[SubRequest]) -> None:
        for layer in engine.layers:
            layer[1:] = content

    with pytest.raises(UnsupportedModelError):
        check(engine, run=run)
