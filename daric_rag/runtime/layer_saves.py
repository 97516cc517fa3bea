"""Saves that run beside the pass that completes them (section 4, "Worker").

::

    engine         attention of layer l, event l
    save stream    wait for event l; read l's K and V of all segments from their slots,
                   encode them, copy them into the payloads
    host           once the pass is submitted: wait for the last copy

Until the host has waited, the blocks must keep what the pass left in them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from daric_rag.runtime.kv_layout import slots_of
from daric_rag.runtime.streams import Event, Streams
from daric_rag.runtime.transfers import KvAccess, LayerSave

__all__ = ["LayerSaves"]


@dataclass(slots=True)
class _Batch:
    """What one pass saves.

    Attributes:
        saves: The segments.
        targets: Of each its payload's parts, ``[2, num_layers, num_tokens, ...]``.
        slots: int64, those of all segments' tokens, one after the other.
        layers: Layers submitted so far.
        saved: After the last copy; None until the pass is complete.
    """

    saves: list[LayerSave]
    targets: list[tuple[Tensor, ...]]
    slots: Tensor
    layers: set[int] = field(default_factory=set)
    saved: Event | None = None


class LayerSaves:
    """Worker process, the engine's thread. Saves segments layer by layer.

    Args:
        access: To the blocks.
        streams: Of the device.
    """

    def __init__(self, access: KvAccess, streams: Streams) -> None:
        self._access, self._streams = access, streams
        self._expected: list[LayerSave] = []
        self._batch: _Batch | None = None

    def expect(self, save: LayerSave) -> None:
        """See `Transfers.expect_save`."""
        self._expected.append(save)

    def begin_pass(self) -> None:
        """The pass that is submitted next completes what is expected.

        Nothing is under way.
        """
        expected, self._expected = self._expected, []
        saves: list[LayerSave] = []
        targets: list[tuple[Tensor, ...]] = []
        for save in expected:
            parts = self._access.codec.parts_of(save.payload, save.num_tokens)
            # Copies to other memory would keep the host waiting, layer after layer.
            if all(map(self._streams.is_locked, parts)):
                saves.append(save)
                targets.append(parts)
        if saves:
            with self._streams.saving():
                slots = self._streams.upload(self._slots_of(saves))
            self._batch = _Batch(saves, targets, slots)

    def save_layer(self, layer: int) -> None:
        """See `Transfers.save_layer`."""
        batch = self._batch
        if batch is None:
            return
        computed = self._streams.event()
        computed.record()
        with self._streams.saving():
            computed.wait()
            self._copy(layer, batch)
            batch.layers.add(layer)
            if len(batch.layers) == self._access.shape.num_layers:
                batch.saved = self._streams.event()
                batch.saved.record()

    def finish(self, save: LayerSave) -> bool:
        """See `Transfers.finish_save`."""
        batch = self._batch
        if batch is None or save not in batch.saves:
            return False
        if batch.saved is None:
            self.settle()
            return False
        batch.saved.synchronize()
        return True

    def forget(self) -> None:
        """Drop what was expected and has not begun."""
        self._expected.clear()

    def settle(self) -> None:
        """Return when nothing is under way; every payload is let go."""
        if self._batch is None:
            return
        done = self._streams.event()
        with self._streams.saving():
            done.record()
        done.synchronize()
        self._batch = None

    def _copy(self, layer: int, batch: _Batch) -> None:
        both = self._access.layout.read_slots(layer, batch.slots)
        parts = self._access.codec.encode(both)
        offset = 0
        for save, targets in zip(batch.saves, batch.targets, strict=True):
            end = offset + save.num_tokens
            for part, target in zip(parts, targets, strict=True):
                for kind in (0, 1):  # keys, values; contiguous on both sides
                    target[kind, layer].copy_(part[kind, offset:end], non_blocking=True)
            offset = end

    def _slots_of(self, saves: list[LayerSave]) -> Tensor:
        block_size = self._access.layout.block_size
        slots: list[int] = []
        for save in saves:
            end = save.start + save.num_tokens
            slots += slots_of(save.block_ids, save.start, end, block_size)
        return torch.tensor(slots)
