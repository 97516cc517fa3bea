"""Layer-wise transfers on a GPU, where each stream in turn is the slowest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from daric_rag.runtime.kv_layout import SplitKv, slots_of
from daric_rag.runtime.pinned_memory import pin_arena
from daric_rag.runtime.placement import Placement
from daric_rag.runtime.stream_transfers import StreamTransfers, transfers_for
from daric_rag.runtime.streams import CudaStreams
from daric_rag.runtime.transfers import LayerSave
from tests.runtime.transfer_setting import (
    BLOCK,
    NAMES,
    NUM_LAYERS,
    PROMPT_SLOTS,
    TABLE,
    Setting,
    bits,
    payload_of_whole,
    placed_at_once,
    prompt,
)

pytestmark = pytest.mark.gpu

_LONG = 50_000_000  # cycles: tens of milliseconds
_NUM_BLOCKS = 40


class GpuBlocks(SplitKv):
    """Blocks on a GPU, and an operator like the kernel's."""

    def __init__(self, setting: Setting) -> None:
        shape = setting.shape
        size = (shape.num_layers, _NUM_BLOCKS, shape.num_kv_heads, BLOCK)
        stacked = torch.zeros(
            (*size, 2 * shape.head_dim), dtype=shape.dtype, device=setting.device
        )
        self.layers = list(stacked)
        super().__init__(self.layers, shape.head_dim)

    def write_slots(
        self, layer: int, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        both = torch.cat((keys, values), dim=-1)
        self.layers[layer][slots // BLOCK, :, slots % BLOCK] = both


class GpuSetting(Setting):
    def __init__(self, name: str = "bfloat16") -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(name, CudaStreams(device), device)
        self.unpin = pin_arena(self.arena, device)

    def blocks_of(self, streams: Any) -> Any:
        return GpuBlocks(self)


@pytest.fixture(params=NAMES)
def setting(request: pytest.FixtureRequest) -> Iterator[GpuSetting]:
    setting = GpuSetting(request.param)
    yield setting
    setting.transfers.settle()
    torch.cuda.synchronize()
    setting.unpin()


def expected_of(setting: Setting, placements: Sequence[Placement]) -> list[Tensor]:
    slots = torch.tensor(PROMPT_SLOTS, device=setting.device)
    layers = placed_at_once(setting, placements)
    return [layer[slots // BLOCK, :, slots % BLOCK] for layer in layers]


def is_seen(seen: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    found = [torch.cat(tuple(both), dim=-1) for both in seen]
    return torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_pass_waits_for_slow_loads(setting: GpuSetting, layerwise: bool) -> None:
    placements = prompt(setting)[:5]
    expected = expected_of(setting, placements)
    for placement in placements:
        setting.transfers.place(placement)
    with setting.streams.loading():
        torch.cuda._sleep(_LONG)
    seen = setting.engine_pass([0], PROMPT_SLOTS, layerwise=layerwise)
    assert is_seen(seen, expected)


def test_loads_wait_for_a_slow_pass(setting: GpuSetting) -> None:
    """It still reads what they write over."""
    slots = torch.tensor(PROMPT_SLOTS, device=setting.device)
    placements = prompt(setting)[:5]
    for placement in placements:
        setting.transfers.place(placement)
    torch.cuda._sleep(_LONG)
    before = setting.blocks.read_slots(NUM_LAYERS - 1, slots)
    setting.engine_pass([0], PROMPT_SLOTS)
    assert not before.any()


def test_records_lie_where_the_gpu_copies_by_itself(setting: GpuSetting) -> None:
    record = setting.record(10)
    parts = setting.codec.parts_of(record.payload, record.header.num_tokens)
    assert all(map(setting.streams.is_locked, parts))


def test_the_host_waits_for_nothing(setting: GpuSetting) -> None:
    """Neither where it submits loads nor in the hooks; records are held meanwhile."""
    for _ in range(2):  # the first time memory is allocated, which may wait
        setting.transfers.settle()
        for placement in prompt(setting)[:5]:
            setting.transfers.place(placement)
        del placement
        torch.cuda._sleep(_LONG)
        slept = torch.cuda.Event()
        slept.record()
        setting.transfers.begin_pass(layerwise=True)
        for layer in range(NUM_LAYERS):
            setting.transfers.wait_layer(layer)
            setting.transfers.save_layer(layer)
        waited = slept.query()
    assert not waited
    assert setting.arena.used_bytes > 0
    setting.transfers.settle()
    assert setting.arena.used_bytes == 0


@pytest.mark.parametrize("slow", ["engine", "save"])
def test_a_save_is_complete_when_it_says_so(setting: GpuSetting, slow: str) -> None:
    save = LayerSave(setting.payload(9), TABLE, 3, 9)
    new = slots_of(TABLE, 2, 12, BLOCK)
    setting.transfers.expect_save(save)
    if slow == "engine":
        torch.cuda._sleep(_LONG)
    else:
        with setting.streams.saving():
            torch.cuda._sleep(_LONG)
    setting.engine_pass(new, new)
    assert setting.transfers.finish_save(save)
    assert bytes(save.payload) == payload_of_whole(setting, save)


def test_a_gpu_transfers_layer_by_layer(setting: GpuSetting) -> None:
    access = setting.access(setting.blocks)
    assert isinstance(transfers_for(access, setting.blocks.layers), StreamTransfers)
    shared = [setting.blocks.layers[0]] * NUM_LAYERS
    assert not isinstance(transfers_for(access, shared), StreamTransfers)
