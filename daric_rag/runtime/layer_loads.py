"""Loads that run beside a pass, layer by layer (section 4, "Worker").

Everything placed before a pass is submitted in one go, to a stream of its own::

    load stream    wait for the engine's stream; then for every layer l:
                     copy l's K and V of all segments side by side
                     decode them, turn the keys, write both to their slots
                     event l
    engine         wait for event 0
                     layer 0's K and V of new tokens into the blocks
                   wait for event 1, attention of layer 0
                     layer 1's K and V of new tokens into the blocks
                   wait for event 2, attention of layer 1
                   ...

The engine waits one layer ahead. Before a layer's attention, where vLLM tells us of it,
it has written that layer's recomputed tokens, in place; a load that came later would
undo that.

The first wait is for earlier passes, which may still read what is now overwritten.
Per layer there are one write, three kernels that turn keys, and two copies per segment
and part of a record, whatever the number of tokens up to `_ROUND_LEN`. From memory that
is not page-locked a copy keeps the host waiting, and all else is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from daric_rag.runtime.kv_layout import slots_of
from daric_rag.runtime.placement import Piece, Placement, Round, rounds_of
from daric_rag.runtime.streams import Event, Streams
from daric_rag.runtime.transfers import KvAccess

__all__ = ["LayerLoads"]

# Tokens staged at a time, which bounds the memory: at 8 heads of 128 in bfloat16 each
# takes 12 KB while its layer is turned.
_ROUND_LEN = 4096


@dataclass(frozen=True, slots=True)
class _Staged:
    """A round, ready to be repeated for every layer.

    Attributes:
        copies: Per copy its sources by layer, in host memory, and its target.
        parts: All targets: the round's tokens side by side, ``[2, num_tokens, ...]``.
        still_len: Leading tokens whose keys do not turn.
        rows: int64 ``[num_tokens]``, where each token's rotation is.
        slots: int64 ``[num_tokens]``.
    """

    copies: list[tuple[tuple[Tensor, ...], Tensor]]
    parts: list[Tensor]
    still_len: int
    rows: Tensor
    slots: Tensor


class LayerLoads:
    """Worker process, the engine's thread. Places segments layer by layer.

    Args:
        access: To the blocks.
        streams: Of the device.
        round_len: Tokens that are staged at a time.
    """

    def __init__(
        self, access: KvAccess, streams: Streams, *, round_len: int = _ROUND_LEN
    ) -> None:
        self._access, self._streams, self._round_len = access, streams, round_len
        self._placed: list[Placement] = []
        # What is being read from, until the event that says that it was.
        self._under_way: list[tuple[Event, list[Placement]]] = []
        # Of the last submission, by layer; what came before it comes before them. None
        # once the engine's stream has waited for all of it.
        self._loaded: list[Event] | None = None

    def place(self, placement: Placement) -> None:
        """See `Transfers.place`."""
        first, end = placement.written
        if first < end:
            self._placed.append(placement)

    def submit(self) -> None:
        """Start everything that was placed."""
        placed, self._placed = self._placed, []
        self._under_way = [
            (done, read) for done, read in self._under_way if not done.query()
        ]
        if not placed:
            return
        computed = self._streams.event()
        computed.record()
        try:
            with self._streams.loading():
                computed.wait()
                self._loaded = self._enqueue(placed)
        except BaseException:
            # Some of the copies may be under way.
            self.settle()
            raise
        self._under_way.append((self._loaded[-1], placed))

    def wait_layer(self, layer: int) -> None:
        """Let what the engine does next come after a layer's loads."""
        if self._loaded is None:
            return
        last = len(self._loaded) - 1
        self._loaded[min(layer, last)].wait()
        if layer >= last:
            self._loaded = None

    def wait_all(self) -> None:
        """Let what the engine does next come after all loads that were submitted."""
        self.wait_layer(self._access.shape.num_layers)

    def settle(self) -> None:
        """Return when nothing is under way; every record is let go."""
        done = self._streams.event()
        with self._streams.loading():
            done.record()
        done.synchronize()
        self._under_way.clear()

    def forget(self) -> None:
        """Drop what was placed and not submitted."""
        self._placed.clear()

    def _enqueue(self, placed: Sequence[Placement]) -> list[Event]:
        """Submit to the current stream; returns the layers' events."""
        rounds = rounds_of(placed, self._round_len)
        distances = sorted({placement.chunk_start for placement in placed})
        rotations = self._access.reencoder.rotations(distances)
        rotations = self._streams.upload(rotations)
        row_of = {distance: row for row, distance in enumerate(distances)}
        staged = self._stage(rounds, row_of)
        events: list[Event] = []
        for layer in range(self._access.shape.num_layers):
            for one in staged:
                self._load(layer, one, rotations)
            event = self._streams.event()
            event.record()
            events.append(event)
        return events

    def _stage(self, rounds: Sequence[Round], row_of: dict[int, int]) -> list[_Staged]:
        buffers = self._buffers(rounds[0])
        staged: list[_Staged] = []
        for one in rounds:
            parts = [
                buffer[: 2 * one.num_tokens].view(2, one.num_tokens, *buffer.shape[1:])
                for buffer in buffers
            ]
            rows, slots = self._streams.upload(self._indices(one, row_of))
            copies = self._copies(one, parts)
            staged.append(_Staged(copies, parts, one.still_len, rows, slots))
        return staged

    def _buffers(self, longest: Round) -> list[Tensor]:
        """Return memory for a round of each of a record's parts.

        Rounds and layers take turns in it, in the order of the stream, and later
        submissions find it again in that stream's pool.
        """
        # [2, num_layers, num_tokens, ...]
        parts = self._parts_of(longest.pieces[0])
        device, num_tokens = self._access.device, longest.num_tokens
        return [
            torch.empty((2 * num_tokens, *p.shape[3:]), dtype=p.dtype, device=device)
            for p in parts
        ]

    def _indices(self, one: Round, row_of: dict[int, int]) -> Tensor:
        """Return rows and slots of a round's tokens, int64 ``[2, num_tokens]``."""
        rows: list[int] = []
        slots: list[int] = []
        for piece in one.pieces:
            placement = piece.placement
            rows += [row_of[placement.chunk_start]] * piece.num_tokens
            slots += slots_of(
                placement.block_ids,
                placement.start + piece.first,
                placement.start + piece.end,
                self._access.layout.block_size,
            )
        return torch.tensor([rows, slots])

    def _copies(
        self, one: Round, targets: Sequence[Tensor]
    ) -> list[tuple[tuple[Tensor, ...], Tensor]]:
        copies: list[tuple[tuple[Tensor, ...], Tensor]] = []
        offset = 0
        for piece in one.pieces:
            end = offset + piece.num_tokens
            for source, target in zip(self._parts_of(piece), targets, strict=True):
                for kind in (0, 1):  # keys, values; contiguous on both sides
                    layers = source[kind, :, piece.first : piece.end].unbind(0)
                    copies.append((layers, target[kind, offset:end]))
            offset = end
        return copies

    def _load(self, layer: int, staged: _Staged, rotations: Tensor) -> None:
        for layers, target in staged.copies:
            target.copy_(layers[layer], non_blocking=True)
        # [num_tokens, num_kv_heads, head_dim] each.
        keys, values = self._access.codec.decode(staged.parts)
        turning, rows = keys[staged.still_len :], staged.rows[staged.still_len :]
        if len(turning):
            self._access.reencoder.turn(turning, rows, rotations)
        self._access.write_slots(layer, keys, values, staged.slots)

    def _parts_of(self, piece: Piece) -> tuple[Tensor, ...]:
        record = piece.placement.record
        payload, num_tokens = record.payload, record.header.num_tokens
        return self._access.codec.parts_of(payload, num_tokens)
