"""Ranks' keys, their agreement, and what a mover does with both."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from daric_rag.errors import ConfigError
from daric_rag.runtime.ranks import RankKeys, agree, record_keys, total_stats
from daric_rag.storage import DiskTier, StoreProbe, StoreStats, TierStats
from tests.storage.records import key, record

KEY = bytes(range(32))
OTHER = bytes(range(100, 132))


def test_a_single_rank_keeps_records_under_the_segments_own_keys() -> None:
    assert RankKeys().to_record(KEY) == KEY
    assert RankKeys(0, 1).from_record(KEY) == KEY
    assert record_keys(KEY, 1) == [KEY]


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_keys_of_its_own_and_turns_them_back(size: int) -> None:
    keys = [
        RankKeys(rank, size).to_record(key)
        for key in (KEY, OTHER)
        for rank in range(size)
    ]
    assert len({*keys, KEY, OTHER}) == 2 * size + 2
    for rank in range(size):
        ranks = RankKeys(rank, size)
        assert ranks.from_record(ranks.to_record(KEY)) == KEY
    assert keys[:size] == record_keys(KEY, size)


def test_numbers_of_ranks_do_not_share_records() -> None:
    assert not {*record_keys(KEY, 2)} & {*record_keys(KEY, 4)}


def test_an_evicted_record_is_told_whichever_ranks_it_was() -> None:
    for owner in record_keys(KEY, 2):
        assert KEY in RankKeys(0, 2).candidates([owner])
    assert RankKeys().candidates([KEY]) == {KEY}


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_cannot_be_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match="rank"):
        RankKeys(rank, size)


def test_alone_a_rank_agrees_with_itself() -> None:
    assert agree([True, False]) == [True, False]
    assert agree([]) == []


def test_ranks_agree_on_what_all_of_them_have() -> None:
    store = dist.HashStore()

    def rank_says(rank: int, flags: list[bool]) -> list[bool]:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
        return agree(flags, group)

    with ThreadPoolExecutor(2) as pool:
        votes = [[True, True, False, False], [True, False, True, False]]
        answers = list(pool.map(rank_says, range(2), votes))
    assert answers == [[True, False, False, False]] * 2


def test_a_segment_is_on_disk_when_every_ranks_record_is(tmp_path: Path) -> None:
    disk, probe = DiskTier(tmp_path, 1 << 20), StoreProbe(tmp_path)
    try:
        disk.write(record(1))
        assert probe.contains_all([key(1)])
        assert not probe.contains_all([key(1), key(2)])
        assert not probe.contains_all([key(2), key(1)])
        disk.write(record(2))
        assert probe.contains_all([key(1), key(2)])
    finally:
        probe.close()
        disk.close()


def tier(hits: int, num_records: int) -> TierStats:
    return TierStats(hits, 0, 0, 0, 0, num_records, 10 * num_records, 1000)


def stats(disk: TierStats | None, *, read_only: bool = False) -> StoreStats:
    return StoreStats(tier(1, 2), disk, 3, 30, 0, 0, 0, read_only)


def test_ranks_stats_add_up_but_their_folder_is_one() -> None:
    total = total_stats([stats(tier(4, 6)), stats(tier(5, 6), read_only=True)])
    assert total.host == TierStats(2, 0, 0, 0, 0, 4, 40, 2000)
    assert total.disk == TierStats(9, 0, 0, 0, 0, 6, 60, 1000)
    assert (total.queued_records, total.queued_bytes) == (6, 60)
    assert total.read_only is True


@pytest.mark.parametrize("disk", [None, tier(4, 6)])
def test_stats_survive_their_way_from_another_process(disk: TierStats | None) -> None:
    assert total_stats([asdict(stats(disk))]) == stats(disk)
