"""Layer-wise transfers: the same bits as at once, in an order that nothing breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from daric_rag.keys import SegmentKey
from daric_rag.runtime.kv_layout import slots_of
from daric_rag.runtime.kv_mover import KvMover
from daric_rag.runtime.layer_loads import LayerLoads
from daric_rag.runtime.placement import Placement, rounds_of
from daric_rag.runtime.stream_transfers import StreamTransfers, transfers_for
from daric_rag.runtime.transfers import ImmediateTransfers, LayerSave
from daric_rag.storage import MEMORY, TieredStore, open_store
from tests.runtime.transfer_setting import (
    BLOCK,
    NAMES,
    NUM_LAYERS,
    OTHER_TABLE,
    PROMPT_SLOTS,
    TABLE,
    Setting,
    bits,
    payload_of_whole,
    placed_at_once,
    prompt,
)
from tests.runtime.watched_streams import Race, WatchedStreams

# -------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("round_len", [1, 7, 16, 4096])
@pytest.mark.parametrize("name", NAMES)
def test_layerwise_loads_are_the_immediate_ones(name: str, round_len: int) -> None:
    setting = Setting(name)
    placements = prompt(setting)
    access = setting.access(setting.blocks)
    loads = LayerLoads(access, setting.streams, round_len=round_len)
    for placement in placements:
        loads.place(placement)
    assert not bits(setting.blocks.layers).any()
    loads.submit()
    expected = placed_at_once(setting, placements)
    assert torch.equal(bits(setting.blocks.layers), bits(expected))
    assert bits(expected).any()


def test_rounds_hold_each_written_token_once_and_those_that_stay_first() -> None:
    placements = prompt(Setting())
    rounds = rounds_of(placements, 16)
    assert [r.num_tokens for r in rounds] == [16, 16, 13]
    assert [r.still_len for r in rounds] == [16, 3, 0]
    pieces = [piece for part in rounds for piece in part.pieces]
    tokens = [
        (placements.index(piece.placement), token)
        for piece in pieces
        for token in range(piece.first, piece.end)
    ]
    expected = [
        (index, token)
        for index, placement in enumerate(placements)
        for token in range(*placement.written)
    ]
    assert sorted(tokens) == expected
    assert rounds_of([], 16) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_layerwise_save_is_the_payload_of_the_whole(name: str) -> None:
    setting = Setting(name)
    saves = [
        LayerSave(setting.payload(9), TABLE, 3, 9),
        LayerSave(setting.payload(4), OTHER_TABLE, 0, 4),
    ]
    for save in saves:
        setting.transfers.expect_save(save)
    new = slots_of(TABLE, 2, 12, BLOCK) + slots_of(OTHER_TABLE, 0, 4, BLOCK)
    setting.engine_pass(new, new)
    for save in saves:
        assert setting.transfers.finish_save(save)
        assert bytes(save.payload) == payload_of_whole(setting, save)


# ------------------------------------------------------------------------- the order


@pytest.mark.parametrize("layerwise", [True, False])
def test_attention_sees_what_was_placed_and_what_the_pass_computed(
    layerwise: bool,
) -> None:
    """Recomputed tokens lie where a load writes too, and win."""
    setting = Setting()
    placements = prompt(setting)
    for placement in placements:
        setting.transfers.place(placement)
    recomputed = slots_of(TABLE, 20, 24, BLOCK)
    seen = setting.engine_pass(recomputed, PROMPT_SLOTS, layerwise=layerwise)

    expected = placed_at_once(setting, placements)
    places = [i for i, slot in enumerate(PROMPT_SLOTS) if slot not in recomputed]
    new = [i for i, slot in enumerate(PROMPT_SLOTS) if slot in recomputed]
    for layer in range(NUM_LAYERS):
        kept = torch.tensor(PROMPT_SLOTS)[places]
        read = expected[layer][kept // BLOCK, :, kept % BLOCK]
        assert torch.equal(torch.cat(tuple(seen[layer]), -1)[places], read)
    other = torch.tensor(PROMPT_SLOTS)[new]
    assert not torch.equal(
        torch.cat(tuple(seen[0]), -1)[new],
        expected[0][other // BLOCK, :, other % BLOCK],
    )


def test_many_passes_in_a_row_race_nowhere() -> None:
    """Blocks change hands: what is loaded was read, saved and computed before."""
    setting = Setting()
    scratch = slots_of(OTHER_TABLE, 0, 10, BLOCK)
    for _ in range(3):
        # A chunk is seeded and generated, saved, and placed in a prompt.
        setting.transfers.place(
            Placement(setting.record(5), OTHER_TABLE, 0, 0, 0, place_until=10)
        )
        save = LayerSave(setting.payload(10), OTHER_TABLE, 0, 10)
        setting.transfers.expect_save(save)
        setting.engine_pass(scratch[5:], scratch)
        assert setting.transfers.finish_save(save)
        for placement in prompt(setting)[:5]:
            setting.transfers.place(placement)
        # Two passes over the prompt; the second one has nothing new to wait for.
        setting.engine_pass(PROMPT_SLOTS[4:8], PROMPT_SLOTS)
        setting.engine_pass(PROMPT_SLOTS[8:9], PROMPT_SLOTS)
        # What is placed at the end of a step is there in the next one.
        setting.transfers.place(
            Placement(setting.record(7), TABLE, 2, 0, 0, place_until=9)
        )
        setting.transfers.submit()
        setting.engine_pass(PROMPT_SLOTS[-1:], PROMPT_SLOTS, layerwise=False)


def test_two_submissions_before_a_pass_are_both_waited_for() -> None:
    setting = Setting()
    placements = prompt(setting)
    for placement in placements[:5]:
        setting.transfers.place(placement)
        setting.transfers.submit()
    seen = setting.engine_pass([0], PROMPT_SLOTS)
    expected = placed_at_once(setting, placements[:5])
    slots = torch.tensor(PROMPT_SLOTS)
    for layer, both in enumerate(seen):
        read = expected[layer][slots // BLOCK, :, slots % BLOCK]
        assert torch.equal(torch.cat(tuple(both), -1), read)


def test_a_payload_is_read_when_the_host_has_waited_for_it() -> None:
    setting = Setting()
    save = LayerSave(setting.payload(4), TABLE, 0, 4)
    setting.transfers.expect_save(save)
    setting.engine_pass(slots_of(TABLE, 0, 4, BLOCK), [0])
    assert not setting.streams.has_happened("save")
    assert setting.transfers.finish_save(save)
    assert setting.streams.has_happened("save")


def test_what_is_gathered_whole_was_loaded_before() -> None:
    """Between passes, where no hook waits."""
    setting = Setting()
    placements = prompt(setting)
    for placement in placements[:5]:
        setting.transfers.place(placement)
    setting.transfers.submit()
    keys, values = setting.kv(16)
    setting.transfers.gather(keys, values, TABLE, 20)  # no race


def test_nothing_to_write_is_nothing_to_load() -> None:
    setting = Setting()
    setting.transfers.place(
        Placement(setting.record(10), TABLE, 7, 0, place_from=0, place_until=7)
    )
    setting.engine_pass([0], [0])
    assert not bits(setting.blocks.layers)[:, 1:].any()


def test_the_detector_sees_a_pass_that_does_not_wait() -> None:
    """Or none of the above would mean anything."""
    setting = Setting()
    for placement in prompt(setting):
        setting.transfers.place(placement)
    setting.transfers.submit()
    with pytest.raises(Race, match="engine may overtake load"):
        setting.blocks.read_slots(0, torch.tensor(PROMPT_SLOTS))


# ------------------------------------------------------------ records, and what fails


def test_records_are_held_until_they_were_read() -> None:
    setting = Setting()
    setting.transfers.place(
        Placement(setting.record(10), TABLE, 0, 0, 0, place_until=10)
    )
    assert setting.arena.used_bytes > 0
    setting.engine_pass([0], PROMPT_SLOTS)
    setting.transfers.submit()  # the host does not know of the copies' end
    assert setting.arena.used_bytes > 0
    setting.transfers.settle()
    assert setting.arena.used_bytes == 0


def test_records_are_let_go_once_the_host_has_seen_the_pass_end() -> None:
    """As it does when it samples, without being asked to wait."""
    setting = Setting()
    setting.transfers.place(
        Placement(setting.record(10), TABLE, 0, 0, 0, place_until=10)
    )
    setting.engine_pass([0], PROMPT_SLOTS)
    sampled = setting.streams.event()
    sampled.record()
    sampled.synchronize()
    setting.engine_pass([0], PROMPT_SLOTS)
    assert setting.arena.used_bytes == 0


def test_a_failed_pass_leaves_nothing() -> None:
    setting = Setting()
    for placement in prompt(setting):
        setting.transfers.place(placement)
    save = LayerSave(setting.payload(4), TABLE, 0, 4)
    setting.transfers.expect_save(save)
    setting.engine_pass(PROMPT_SLOTS[:4], PROMPT_SLOTS, fails_at=1)
    assert not setting.transfers.finish_save(save)
    assert setting.streams.has_happened("save")  # the payload may be used again
    setting.transfers.forget()
    setting.transfers.settle()
    del placement, save
    assert setting.arena.used_bytes == 0
    assert setting.streams.has_happened("load")
    setting.engine_pass(PROMPT_SLOTS, PROMPT_SLOTS)


def test_what_a_failed_step_had_placed_is_never_written() -> None:
    setting = Setting()
    for placement in prompt(setting):
        setting.transfers.place(placement)
    setting.transfers.expect_save(LayerSave(setting.payload(4), TABLE, 0, 4))
    setting.transfers.forget()
    del placement
    assert setting.arena.used_bytes == 0
    setting.engine_pass([0], [0])
    assert not bits(setting.blocks.layers)[:, 1:].any()


def test_a_load_that_fails_half_way_is_over_when_it_says_so() -> None:
    setting = Setting()

    def write(layer: int, *rest: Any) -> None:
        if layer == 1:
            raise RuntimeError("out of memory")
        setting.blocks.write_slots(layer, *rest)

    access = replace(setting.access(setting.blocks), write_slots=write)
    transfers = StreamTransfers(access, setting.streams)
    for placement in prompt(setting):
        transfers.place(placement)
    del placement
    with pytest.raises(RuntimeError, match="out of memory"):
        transfers.begin_pass(layerwise=True)
    assert setting.streams.has_happened("load")
    assert setting.arena.used_bytes == 0


@pytest.mark.parametrize(("is_locked", "layerwise"), [(False, True), (True, False)])
def test_saves_that_no_hook_can_make_are_made_whole(
    is_locked: bool, layerwise: bool
) -> None:
    setting = Setting(streams=WatchedStreams(lambda _: is_locked))
    save = LayerSave(setting.payload(4), TABLE, 0, 4)
    setting.transfers.expect_save(save)
    new = slots_of(TABLE, 0, 4, BLOCK)
    setting.engine_pass(new, new, layerwise=layerwise)
    assert not setting.transfers.finish_save(save)
    # Nor does a later pass make it.
    setting.engine_pass([0], [0])
    assert not setting.transfers.finish_save(save)


def test_the_cpu_places_at_once() -> None:
    setting = Setting()
    transfers = transfers_for(setting.access(setting.blocks), setting.blocks.layers)
    assert isinstance(transfers, ImmediateTransfers)
    for placement in prompt(setting):
        transfers.place(placement)
    expected = placed_at_once(setting, prompt(Setting()))
    assert torch.equal(bits(setting.blocks.layers), bits(expected))


# ------------------------------------------------------------------------- the mover


def mover_of(setting: Setting, store: TieredStore) -> KvMover:
    return KvMover(
        store,
        setting.transfers,
        shape=setting.shape,
        codec=setting.codec,
        fingerprint=bytes(32),
    )


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_what_was_expected_is_saved_like_anything_else(
    name: str, layerwise: bool
) -> None:
    setting, store = Setting(name), open_store(MEMORY, host_bytes=1 << 16, disk_bytes=0)
    mover = mover_of(setting, store)
    expected, other = (
        mover.identity(SegmentKey(bytes([i]) * 32), bytes(32), 0, None) for i in (1, 2)
    )
    mover.expect_save(expected, TABLE, 3, 9)
    slots = slots_of(TABLE, 3, 12, BLOCK)
    setting.engine_pass(slots, slots, layerwise=layerwise)
    record, stored = mover.save(expected, TABLE, 3, 9)
    whole, _ = mover.save(other, TABLE, 3, 9)
    assert stored
    assert bytes(record.payload) == bytes(whole.payload)
    held = store.host.read(record.key, bytes(32))
    assert held is not None
    assert held.payload == record.payload
    # Its memory is the only one that was taken for it.
    region = -(-record.payload.nbytes // 64) * 64
    assert store.host.arena.used_bytes == 2 * region
    store.close()


def test_a_step_that_failed_is_forgotten() -> None:
    setting, store = Setting(), open_store(MEMORY, host_bytes=1 << 16, disk_bytes=0)
    mover = mover_of(setting, store)
    identity = mover.identity(SegmentKey(bytes(32)), bytes(32), 0, None)
    mover.expect_save(identity, TABLE, 0, 4)
    mover.place(
        setting.record(10),
        TABLE,
        chunk_start=0,
        segment_start=0,
        place_from=0,
        place_until=10,
    )
    mover.forget()
    assert store.host.arena.used_bytes == setting.arena.used_bytes == 0
    # Then it is saved as it lies there, whoever expected what before.
    slots = slots_of(TABLE, 0, 4, BLOCK)
    setting.engine_pass(slots, slots)
    record, _ = mover.save(identity, TABLE, 0, 4)
    keys, values = setting.kv(4)
    setting.transfers.gather(keys, values, TABLE, 0)
    assert torch.equal(setting.codec.tensors_of(record.payload, 4)[0], keys)
    store.close()
