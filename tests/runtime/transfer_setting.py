"""Small blocks, records and prompts for tests of transfers, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from daric_rag.runtime.kv_codec import KvCodec, KvShape, codec_of
from daric_rag.runtime.kv_layout import slots_of
from daric_rag.runtime.placement import Placement
from daric_rag.runtime.rope import Reencoder, RopeParameters
from daric_rag.runtime.stream_transfers import StreamTransfers
from daric_rag.runtime.transfers import ImmediateTransfers, KvAccess, LayerSave
from daric_rag.storage.arena import Arena
from daric_rag.storage.base import Record
from daric_rag.storage.format import RecordHeader, SegmentIdentity
from tests.runtime.watched_streams import WatchedBlocks, WatchedStreams

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
    """An engine's blocks, its records, and layer-wise transfers between them.

    Args:
        name: Of `NAMES`.
        streams: Of the device.
        device: Where the blocks are.
    """

    def __init__(
        self,
        name: str = "bfloat16",
        streams: Any = None,
        device: torch.device = CPU,
    ) -> None:
        storage, dtype = NAMES[name]
        self.shape = KvShape(NUM_LAYERS, NUM_HEADS, HEAD_DIM, dtype)
        self.codec = codec_of(storage, self.shape, device)
        self.streams = streams or WatchedStreams()
        self.device = device
        self.blocks = self.blocks_of(self.streams)
        self.transfers = StreamTransfers(self.access(self.blocks), self.streams)
        self.arena = Arena(1 << 20)
        self._seed = 0

    def blocks_of(self, streams: Any) -> Any:
        return WatchedBlocks(streams, self.shape, block_size=BLOCK)

    def access(self, blocks: Any) -> KvAccess:
        inv_freq = tuple(0.1**pair for pair in range(HEAD_DIM // 2))
        reencoder = Reencoder(RopeParameters(inv_freq, HEAD_DIM, True), rotate)
        return KvAccess(
            blocks, blocks.write_slots, reencoder, self.codec, self.shape, self.device
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
        keys, values = self.kv(num_tokens).to(self.device)
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
        new = self.kv(len(slots)).to(self.device)
        written, read = (torch.tensor(s, device=self.device) for s in (slots, reads))
        self.transfers.begin_pass(layerwise=layerwise)
        seen: list[Tensor] = []
        for layer in range(fails_at):
            self.blocks.write_slots(layer, *new[:, layer], written)
            if layerwise:
                self.transfers.wait_layer(layer)
            seen.append(self.blocks.read_slots(layer, read))
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


def payload_of_whole(setting: Setting, save: LayerSave) -> bytes:
    payload = setting.payload(save.num_tokens)
    keys, values = setting.codec.staging(payload, save.num_tokens)
    setting.transfers.gather(keys, values, save.block_ids, save.start)
    setting.codec.payload_of(keys, values, payload)
    return bytes(payload)
