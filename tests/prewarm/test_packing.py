"""Batches and shards: every document once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.errors import ConfigError
from daric_rag.prewarm import Shard, text_hash
from daric_rag.prewarm.packing import Packer


@given(
    lens=st.lists(st.integers(0, 5000), max_size=60),
    batch_tokens=st.integers(1, 2000),
    max_documents=st.integers(1, 9),
    chars_per_token=st.integers(1, 9),
)
def test_every_document_is_in_one_batch_in_order(
    lens: list[int], batch_tokens: int, max_documents: int, chars_per_token: int
) -> None:
    packer: Packer[int] = Packer(batch_tokens, max_documents)
    packer.learn(chars_per_token * 1000, 1000)
    batches = [
        batch for i, num_chars in enumerate(lens) for batch in packer.add(i, num_chars)
    ]
    batches.append(packer.take())
    assert [i for batch in batches for i in batch] == list(range(len(lens)))
    assert packer.take() == []
    for batch in filter(None, batches):
        total = packer.tokens_of(sum(lens[i] for i in batch))
        assert len(batch) == 1 or total <= batch_tokens
        assert len(batch) <= max_documents


def test_the_first_document_is_a_batch_and_the_rest_is_packed_full() -> None:
    packer: Packer[str] = Packer(100, 50)
    assert packer.add("a", 40) == [["a"]]
    packer.learn(40, 20)  # 2 characters a token
    assert packer.add("b", 120) == []
    assert packer.add("c", 80) == []
    assert packer.add("d", 2) == [["b", "c"]]
    assert packer.add("e", 1000) == [["d"]]
    assert packer.take() == ["e"]


@given(st.lists(st.text(max_size=20), unique=True), st.integers(1, 9))
def test_shards_are_disjoint_and_complete(texts: list[str], count: int) -> None:
    for text in texts:
        shards = [Shard(i, count) for i in range(1, count + 1)]
        assert sum(shard.holds(text_hash(text)) for shard in shards) == 1


def test_shards_are_of_about_equal_size() -> None:
    held = [
        sum(Shard(i, 8).holds(text_hash(f"document {n}")) for n in range(8000))
        for i in range(1, 9)
    ]
    assert all(900 < number < 1100 for number in held)


def test_shards_are_written_as_they_are_read() -> None:
    assert Shard.parse(" 3/8 ") == Shard(3, 8)
    assert str(Shard(3, 8)) == "3/8"


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "3/", "a/b", "-1/8", "1/0"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="3/8"):
        Shard.parse(text)
