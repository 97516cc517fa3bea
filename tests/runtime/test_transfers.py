"""Layer-wise transfers: the same bits as at once, in an order that nothing breaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from daric_rag.runtime.kv_codec import KvCodec, KvShape, codec_of
from daric_rag.runtime.kv_layout import slots_of
from daric_rag.runtime.layer_loads import LayerLoads
from daric_rag.runtime.placement import Placement, rounds_of
from daric_rag.runtime.rope import Reencoder, RopeParameters
from daric_rag.runtime.stream_transfers import StreamTransfers, transfers_for
from daric_rag.runtime.transfers import ImmediateTransfers, KvAccess, LayerSave
from daric_rag.storage.arena import Arena
from daric_rag.storage.base import Record
from daric_rag.storage.format import RecordHeader, SegmentIdentity
from tests.runtime.watched_streams import Race, WatchedBlocks, WatchedStreams

NUM_LAYERS, NUM_HEADS, HEAD_DIM, BLOCK = 3, 2, 8, 4
TABLE = list(range(1, 20))
OTHER_TABLE = [39, 21, 38, 22, 37, 23]
NAMES = {
    "bfloat16": ("model", torch.bfloat16),
    "float32": ("model", torch.float32),
    "int8": ("int8", torch.bfloat16),
    "fp8": ("fp8", torch.float32),
}
CPU = torch.device("cpu")


def rotate(
    positions: Tensor, rows: Tensor, head_dim: int, cos_sin: Tensor, is_neox: bool
) -> None:
    """`RotateFn` for halves, written out."""
    assert is_neox
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = rows.view(len(rows), -1, head_dim).chunk(2, dim=-1)
    turned = first * cos - second * sin, first * sin + second * cos
    first.copy_(turned[0])
    second.copy_(turned[1])


class Setting:
    """An engine's blocks, its records, and both ways to move between them."""

    def __init__(self, name: str = "bfloat16", *, is_locked: bool = True) -> None:
        storage, dtype = NAMES[name]
        self.shape = KvShape(NUM_LAYERS, NUM_HEADS, HEAD_DIM, dtype)
        self.codec = codec_of(storage, self.shape)
        self.streams = WatchedStreams(lambda _: is_locked)
        self.blocks = self.blocks_of(self.streams)
        self.transfers = StreamTransfers(self.access(self.blocks), self.streams)
        self.arena = Arena(1 << 20)
        self._seed = 0

    def blocks_of(self, streams: WatchedStreams) -> WatchedBlocks:
        return WatchedBlocks(streams, self.shape, block_size=BLOCK)

    def access(self, blocks: WatchedBlocks) -> KvAccess:
        inv_freq = tuple(0.1**pair for pair in range(HEAD_DIM // 2))
        reencoder = Reencoder(RopeParameters(inv_freq, HEAD_DIM, True), rotate)
        return KvAccess(
            blocks, blocks.write_slots, reencoder, self.codec, self.shape, CPU
        )

    def kv(self, num_tokens: int) -> Tensor:
        """K and V, `[2, layers, tokens, heads, head_dim]`, with zeros of both signs."""
        self._seed += 1
        generator = torch.Generator().manual_seed(self._seed)
        kv = torch.randn((2, *self.shape.of(num_tokens)), generator=generator)
        return (kv * (kv.abs() > 0.1)).to(self.shape.dtype)

    def record(self, num_tokens: int) -> Record:
        header = header_of(self.codec, self.shape, num_tokens)
        payload = self.payload(num_tokens)
        keys, values = self.kv(num_tokens)
        self.codec.payload_of(keys, values, payload)
        return Record(header, payload)

    def payload(self, num_tokens: int) -> memoryview:
        header = header_of(self.codec, self.shape, num_tokens)
        payload = self.arena.allocate(header.payload_len)
        assert payload is not None
        return payload

    def engine_pass(
        self,
        slots: Sequence[int],
        reads: Sequence[int],
        *,
        layerwise: bool = True,
        fails_at: int = NUM_LAYERS,
    ) -> list[Tensor]:
        """What vLLM does of a pass; returns what each layer's attention read.

        Args:
            slots: Of new tokens, whose K and V are written before the hooks.
            reads: Slots that are attended to.
            layerwise: Whether hooks run.
            fails_at: Layer at which it ends.
        """
        new = self.kv(len(slots))
        self.transfers.begin_pass(layerwise=layerwise)
        seen: list[Tensor] = []
        for layer in range(fails_at):
            self.blocks.write_slots(layer, *new[:, layer], torch.tensor(slots))
            if layerwise:
                self.transfers.wait_layer(layer)
            seen.append(self.blocks.read_slots(layer, torch.tensor(reads)))
            if layerwise:
                self.transfers.save_layer(layer)
        return seen


def header_of(codec: KvCodec, shape: KvShape, num_tokens: int) -> RecordHeader:
    identity = SegmentIdentity(bytes(32), bytes(32), bytes(32), 0, b"")
    return RecordHeader.for_shape(identity, shape.of(num_tokens), codec.dtype_name)


def prompt(setting: Setting) -> list[Placement]:
    """Chunks of 17, 13 and 9 tokens, two prompts, and places that cut segments."""
    first, second = setting.record(10), setting.record(7)
    third, fourth, fifth = setting.record(10), setting.record(3), setting.record(9)
    return [
        Placement(first, TABLE, 0, 0, place_from=2, place_until=36),
        Placement(second, TABLE, 0, 10, place_from=0, place_until=36),
        Placement(third, TABLE, 17, 0, place_from=20, place_until=36),
        Placement(fourth, TABLE, 17, 10, place_from=0, place_until=36),
        Placement(fifth, TABLE, 30, 0, place_from=0, place_until=36),
        Placement(fifth, TABLE, 60, 0, place_from=0, place_until=60),  # nothing of it
        Placement(third, OTHER_TABLE, 5, 0, place_from=0, place_until=99),
        Placement(second, OTHER_TABLE, 0, 15, place_from=16, place_until=20),
    ]


PROMPT_SLOTS = slots_of(TABLE, 2, 17, BLOCK) + slots_of(TABLE, 20, 36, BLOCK)


def placed_at_once(setting: Setting, placements: Sequence[Placement]) -> list[Tensor]:
    """The blocks' layers after `ImmediateTransfers`, starting from zeros."""
    blocks = setting.blocks_of(WatchedStreams())
    transfers = ImmediateTransfers(setting.access(blocks))
    for placement in placements:
        transfers.place(placement)
    return blocks.layers


def bits(layers: Sequence[Tensor]) -> Tensor:
    """Layers' bits, in which zeros of both signs differ."""
    stacked = torch.stack(list(layers))
    return stacked.view(torch.int16 if stacked.element_size() == 2 else torch.int32)


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


def payload_of_whole(setting: Setting, save: LayerSave) -> bytes:
    payload = setting.payload(save.num_tokens)
    keys, values = setting.codec.staging(payload, save.num_tokens)
    setting.transfers.gather(keys, values, save.block_ids, save.start)
    setting.codec.payload_of(keys, values, payload)
    return bytes(payload)


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
    setting = Setting(is_locked=is_locked)
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
