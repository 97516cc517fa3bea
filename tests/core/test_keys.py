"""Keys: pinned test vectors, canonical encodings, and no collisions by design."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.config import DaricConfig
from daric_rag.errors import ConfigError, PromptError
from daric_rag.keys import (
    KEY_BYTES,
    cache_salt,
    chunking_id,
    document_hash,
    model_fingerprint,
    pack_token_ids,
    segment_keys,
)
from daric_rag.layout import Chunk, cut_segments

ROOT = model_fingerprint({"model": "m", "dtype": "float32"})

VECTORS = {
    "document": "09733d22ce1e14c3170062c38cba1dbf8df3c245dc74d4a962c4dff875c24b07",
    "model": "726b82c50376b55817fec454d53d587f0a0d3aae22fc747232f3ab4bc62d7b99",
    "segment_0": "4a3183a5916d69a4",
    "segment_1": "5955a646f06e0648",
    "chunking": "fb0b561e6cf10bca4ae2ae980ed4257180d5dce0223d1c15d3a99c1278b41bf5",
}

ids = st.lists(st.integers(0, 2**32 - 1), max_size=30)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)


def test_vectors_stay_what_stores_on_disk_were_written_with():
    # A change here orphans every stored record: raise the scheme's version with it.
    assert document_hash([1, 2, 3]).hex() == VECTORS["document"]
    assert ROOT.hex() == VECTORS["model"]
    assert [key.hex()[:16] for key in segment_keys(ROOT, [1, 2, 3], 2)] == [
        VECTORS["segment_0"],
        VECTORS["segment_1"],
    ]
    assert chunking_id([(0, 3), (3, 5)]) == VECTORS["chunking"]


@given(ids)
def test_pack_is_little_endian_uint32(token_ids):
    assert pack_token_ids(token_ids) == struct.pack(f"<{len(token_ids)}I", *token_ids)


def test_pack_takes_a_buffer_for_numbers_not_for_machine_words():
    assert pack_token_ids(b"\x01\x02\x03") == pack_token_ids([1, 2, 3])


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["1"], [None]])
def test_pack_refuses_what_is_no_token_id(bad):
    with pytest.raises(PromptError, match="token ids must be ints"):
        pack_token_ids(bad)


def test_every_digest_has_its_own_domain():
    empty = {document_hash([]), ROOT, *segment_keys(ROOT, [1], 4), document_hash([1])}
    assert len(empty) == 4
    assert all(len(digest) == KEY_BYTES for digest in empty)


def test_fingerprint_ignores_order_and_tells_types_apart():
    assert model_fingerprint({"a": 1, "b": "x"}) == model_fingerprint(
        {"b": "x", "a": 1}
    )
    values = [1, 1.0, True, "1", None, "null", 0, False, ""]
    assert len({model_fingerprint({"a": value}) for value in values}) == len(values)


@given(st.dictionaries(st.text(), scalars | st.text(), min_size=1))
def test_fingerprint_takes_any_scalars(fields):
    try:
        digest = model_fingerprint(fields)
    except ConfigError:
        assert any(value in (float("inf"), float("-inf")) for value in fields.values())
    else:
        assert digest == model_fingerprint(dict(reversed(fields.items())))


@pytest.mark.parametrize(
    "fields",
    [{}, {"a": [1]}, {"a": b"x"}, {1: "a"}, {"a": float("nan")}, {"a": float("inf")}],
)
def test_fingerprint_refuses_what_has_no_canonical_form(fields):
    with pytest.raises(ConfigError):
        model_fingerprint(fields)


def test_segment_keys_chain():
    whole = segment_keys(ROOT, [1, 2, 3, 4, 5], 2)
    assert len(whole) == 3
    # The same prefix has the same keys; anything after a change differs.
    assert segment_keys(ROOT, [1, 2, 3, 4, 9], 2)[:2] == whole[:2]
    changed = segment_keys(ROOT, [9, 2, 3, 4, 5], 2)
    assert not set(changed) & set(whole)
    # Equal tokens at different depths differ, and so do other roots.
    assert len(set(segment_keys(ROOT, [7] * 8, 2))) == 4
    other = model_fingerprint({"model": "n"})
    assert not set(segment_keys(other, [1, 2, 3, 4, 5], 2)) & set(whole)
    assert segment_keys(ROOT, [], 2) == ()


def test_segment_keys_refuse_a_bad_length():
    with pytest.raises(ConfigError, match="max_segment_len is 0"):
        segment_keys(ROOT, [1], 0)


@given(st.integers(1, 600), st.integers(1, 300))
def test_one_key_per_segment_of_the_layout(length, max_segment_len):
    segments = cut_segments(Chunk(17, 17 + length, True), max_segment_len)
    token_ids = list(range(length))
    keys = segment_keys(ROOT, token_ids, max_segment_len)
    assert len(keys) == len(segments)
    # A shorter chunk that ends with a segment has the leading keys of the longer one.
    end = segments[0].end - 17
    assert segment_keys(ROOT, token_ids[:end], max_segment_len) == keys[:1]


def test_cutting_differently_gives_different_keys():
    assert segment_keys(ROOT, [1, 2], 1)[-1] != segment_keys(ROOT, [1, 2], 2)[-1]


def test_chunking_id_sees_boundaries():
    cuts = [[(0, 5)], [(0, 2), (2, 5)], [(0, 3), (3, 5)], [(0, 1), (1, 25)]]
    assert len({chunking_id(cut) for cut in cuts}) == len(cuts)
    assert chunking_id([[0, 5]]) == chunking_id([(0, 5)])


def test_cache_salt_depends_on_each_part():
    fields = DaricConfig().policy_fields()
    chunks = chunking_id([(0, 5)])
    base = cache_salt("tenant", fields, chunks)
    assert base == cache_salt("tenant", dict(reversed(fields.items())), chunks)
    assert len(base) == 64
    others = {
        cache_salt("other", fields, chunks),
        cache_salt("tenant", fields | {"mode": "full_reuse"}, chunks),
        cache_salt("tenant", fields | {"mtaf": "log"}, chunks),
        cache_salt("tenant", fields, chunking_id([(0, 4)])),
        # A policy field cannot pose as another part.
        cache_salt("tenant", fields | {"namespace": "tenant"}, chunks),
    }
    assert base not in others
    assert len(others) == 5
