"""Segments between host memory and blocks: at once, or layer by layer beside a pass.

A pass is a forward pass of the engine. What is placed before it is in the blocks by the
time the pass reads them; what it is said to complete can be saved while it runs
(section 4, "Worker"). Which of it happens when depends on the device::

    place ... place      collected            (at once)
    begin_pass           copies submitted, layer after layer
      wait_layer(l)      before layer l's attention
      save_layer(l)      after it
    finish_save          once the pass is submitted

A CPU places at once. Its copies would share the cores with the pass that they were to
run beside, and layer by layer they take longer: 5,120 tokens of a model with 30 layers
of 3 heads of 64 in bfloat16 took 51 to 57 ms rather than 37 to 41 (2 cores in use by
others, minima of 25).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from daric_rag.runtime.kv_codec import KvCodec
from daric_rag.runtime.kv_layout import KvLayout, WriteSlots
from daric_rag.runtime.kv_tensors import KvShape
from daric_rag.runtime.placement import Placement
from daric_rag.runtime.rope import Reencoder

__all__ = ["ImmediateTransfers", "KvAccess", "LayerSave", "Transfers"]


@dataclass(frozen=True, slots=True)
class KvAccess:
    """How one engine's KV is read and written.

    Attributes:
        layout: Of its blocks.
        write_slots: The attention kernel's own operator.
        reencoder: Turns keys.
        codec: Of records.
        shape: Of one token's KV.
        device: Where the blocks are.
    """

    layout: KvLayout
    write_slots: WriteSlots
    reencoder: Reencoder
    codec: KvCodec
    shape: KvShape
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class LayerSave:
    """A segment that the next pass completes.

    Attributes:
        payload: Writable, of a record's length; filled while the pass runs.
        block_ids: The sequence's blocks from position 0 on.
        start: Its first position in that sequence.
        num_tokens: Its length.
    """

    payload: memoryview
    block_ids: Sequence[int]
    start: int
    num_tokens: int


class Transfers(Protocol):
    """Worker process, the engine's thread. Moves tokens into blocks and out of them.

    Attributes:
        is_layerwise: Whether `expect_save` is of any use.
    """

    is_layerwise: bool

    def place(self, placement: Placement) -> None:
        """Write a segment to its place, before the next pass reads it.

        Until it is written, nobody else may write there but that pass. The record is
        held for as long as it is read from.
        """
        ...

    def submit(self) -> None:
        """Start what was placed; a step that is over leaves nothing to be started."""
        ...

    def begin_pass(self, *, layerwise: bool) -> None:
        """Start what was placed; the pass is submitted next.

        Args:
            layerwise: Whether the pass calls `wait_layer` and `save_layer`.
        """
        ...

    def wait_layer(self, layer: int) -> None:
        """Let the engine's attention to a layer come after that layer's loads.

        Layers are computed in ascending order. May be called again.
        """
        ...

    def save_layer(self, layer: int) -> None:
        """A layer is computed: start to save it, where that was expected."""
        ...

    def expect_save(self, save: LayerSave) -> None:
        """Say what the next pass completes; that pass fills its payload."""
        ...

    def finish_save(self, save: LayerSave) -> bool:
        """Return whether an expected payload is complete; waits for it.

        False if the pass did not call `save_layer`, or the payload is in memory that
        the device does not reach by itself: then it is to be filled from `gather`.
        """
        ...

    def gather(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """Read positions into `keys` and `values`, which are mutated, now.

        Args:
            keys: ``[num_layers, num_tokens, num_kv_heads, head_dim]``.
            values: Like `keys`.
            block_ids: The sequence's blocks from position 0 on.
            start: First position.
        """
        ...

    def settle(self) -> None:
        """Return when nothing is under way; every record is let go."""
        ...

    def forget(self) -> None:
        """Drop what was placed or expected, and not started."""
        ...


class ImmediateTransfers:
    """Places at once, on the engine's own stream. See `Transfers`.

    For CPUs. Elsewhere it is correct, and slower than it could be.
    """

    is_layerwise = False

    def __init__(self, access: KvAccess) -> None:
        """Keep what is needed to reach the blocks."""
        self._access = access

    def place(self, placement: Placement) -> None:
        """See `Transfers.place`."""
        first, end = placement.written
        if first == end:
            return
        record, access = placement.record, self._access
        keys, values = access.codec.tensors_of(record.payload, record.header.num_tokens)
        keys, values = keys.to(access.device), values.to(access.device)
        turned = access.reencoder.reencode_keys(keys, placement.chunk_start)
        access.layout.scatter(
            turned[:, first:end],
            values[:, first:end],
            placement.block_ids,
            placement.start + first,
        )
        if access.device.type != "cpu":
            # Copies may be asynchronous, and nobody else holds the record.
            torch.accelerator.synchronize()

    def submit(self) -> None:
        """Nothing waits to be started."""

    def begin_pass(self, *, layerwise: bool) -> None:
        """Nothing waits to be started."""

    def wait_layer(self, layer: int) -> None:
        """Nothing to wait for."""

    def save_layer(self, layer: int) -> None:
        """Nothing is expected."""

    def expect_save(self, save: LayerSave) -> None:
        """Nothing is saved before its pass is over."""

    def finish_save(self, save: LayerSave) -> bool:
        """See `Transfers.finish_save`."""
        return False

    def gather(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """See `Transfers.gather`."""
        gather(self._access, keys, values, block_ids, start)

    def settle(self) -> None:
        """Nothing is under way."""

    def forget(self) -> None:
        """Nothing waits to be started."""


def gather(
    access: KvAccess,
    keys: Tensor,
    values: Tensor,
    block_ids: Sequence[int],
    start: int,
) -> None:
    """Read all layers of some positions; see `Transfers.gather`."""
    if access.device == keys.device:
        access.layout.gather(keys, values, block_ids, start)
        return
    device_k = torch.empty_like(keys, device=access.device)
    device_v = torch.empty_like(values, device=access.device)
    access.layout.gather(device_k, device_v, block_ids, start)
    keys.copy_(device_k)
    values.copy_(device_v)
