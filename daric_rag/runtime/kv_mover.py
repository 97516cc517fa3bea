"""Records and blocks: reading, re-encoding, placing and saving segments."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from daric_rag.errors import StoreError
from daric_rag.keys import SegmentKey
from daric_rag.runtime.kv_layout import KvLayout
from daric_rag.runtime.rope import Reencoder
from daric_rag.storage import TieredStore
from daric_rag.storage.base import Record
from daric_rag.storage.format import RecordHeader

__all__ = ["KvMover", "KvShape"]

logger = logging.getLogger(__name__)


class KvShape:
    """Shape of one token's KV: what every record of this engine must have.

    Attributes:
        num_layers: Layers.
        num_kv_heads: Key-value heads per layer.
        head_dim: Elements per head.
        dtype: Of the elements.
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        """Keep the shape."""
        self.num_layers, self.num_kv_heads = num_layers, num_kv_heads
        self.head_dim, self.dtype = head_dim, dtype

    @property
    def dtype_name(self) -> str:
        """The record format's name of the dtype."""
        return str(self.dtype).removeprefix("torch.")

    def of(self, num_tokens: int) -> tuple[int, int, int, int]:
        """``(num_layers, num_tokens, num_kv_heads, head_dim)``."""
        return (self.num_layers, num_tokens, self.num_kv_heads, self.head_dim)


class KvMover:
    """Worker process. Moves segments between the store and the engine's blocks."""

    def __init__(
        self,
        store: TieredStore,
        layout: KvLayout,
        reencoder: Reencoder,
        *,
        shape: KvShape,
        fingerprint: bytes,
        device: torch.device,
    ) -> None:
        """Bind store, blocks and model together."""
        self._store, self._layout, self._reencoder = store, layout, reencoder
        self._shape, self._fingerprint, self._device = shape, fingerprint, device
        self._warned: set[str] = set()

    def read(
        self, keys: Sequence[SegmentKey], lens: Sequence[int]
    ) -> list[Record | None]:
        """Read segments; None where the store has nothing that fits.

        A store that fails is a store without records: it costs time, and must not end
        an engine that can compute everything anew.

        Args:
            keys: Their keys, [n].
            lens: Tokens per segment, [n].
        """
        try:
            records = self._store.read_many(keys, self._fingerprint)
        except Exception as error:
            self._warn("read", error)
            return [None] * len(keys)
        return [
            record if record is not None and self._fits(record, num_tokens) else None
            for record, num_tokens in zip(records, lens, strict=True)
        ]

    def place(
        self,
        record: Record,
        block_ids: Sequence[int],
        *,
        chunk_start: int,
        segment_start: int,
        place_from: int,
        place_until: int,
    ) -> None:
        """Write a segment to its place in a prompt, re-encoded.

        Args:
            record: The segment, with keys as they are at the chunk's own positions.
            block_ids: The sequence's blocks from position 0 on.
            chunk_start: Where the chunk starts in the prompt.
            segment_start: Where the segment starts in the chunk.
            place_from: First position that may be written.
            place_until: Position after the last one.
        """
        start = chunk_start + segment_start
        num_tokens = record.header.num_tokens
        skip = max(0, place_from - start)
        stop = min(num_tokens, place_until - start)
        if skip >= stop:
            return
        keys, values = self._tensors(record.payload, num_tokens)
        turned = self._reencoder.reencode_keys(self._to_device(keys), chunk_start)
        self._layout.scatter(
            turned[:, skip:stop],
            self._to_device(values)[:, skip:stop],
            block_ids,
            start + skip,
        )

    def save(
        self, key: SegmentKey, block_ids: Sequence[int], start: int, num_tokens: int
    ) -> tuple[Record, bool]:
        """Save a segment from blocks, as it lies there.

        A store that cannot take it costs later requests time and nothing else.

        Args:
            key: Its key.
            block_ids: The sequence's blocks from position 0 on.
            start: Its first position in that sequence, at which its keys are right.
            num_tokens: Its length.

        Returns:
            The record, in memory whatever the store did, and whether it took it.
        """
        header = RecordHeader.for_shape(
            key, self._fingerprint, self._shape.of(num_tokens), self._shape.dtype_name
        )
        buffer = self._allocate(header.payload_len)
        keys, values = self._tensors(buffer, num_tokens)
        self._gather(keys, values, block_ids, start)
        record = Record(header, buffer)
        try:
            self._store.write(header, buffer)
        except Exception as error:
            self._warn("saved", error)
            return record, False
        return record, True

    def _fits(self, record: Record, num_tokens: int) -> bool:
        header = record.header
        return (
            header.shape == self._shape.of(num_tokens)
            and header.dtype == self._shape.dtype_name
        )

    def _allocate(self, nbytes: int) -> memoryview:
        try:
            return self._store.allocate(nbytes)
        except StoreError as error:
            self._warn("saved", error)
            return memoryview(bytearray(nbytes))

    def _tensors(self, payload: memoryview, num_tokens: int) -> tuple[Tensor, Tensor]:
        """View a payload as K and V ``[num_layers, num_tokens, heads, head_dim]``.

        The views keep the payload alive. torch has no read-only tensors, so nobody
        may write to what comes from a record.
        """
        raw = torch.from_dlpack(np.frombuffer(payload, dtype=np.uint8))
        both = raw.view(self._shape.dtype).view(2, *self._shape.of(num_tokens))
        return both[0], both[1]

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _gather(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        if self._device.type == "cpu":
            self._layout.gather(keys, values, block_ids, start)
            return
        device_k = torch.empty_like(keys, device=self._device)
        device_v = torch.empty_like(values, device=self._device)
        self._layout.gather(device_k, device_v, block_ids, start)
        keys.copy_(device_k)
        values.copy_(device_v)

    def _warn(self, what: str, error: Exception) -> None:
        if what in self._warned:
            return
        self._warned.add(what)
        # What the store says on purpose names the mend; anything else is a fault.
        trace = None if isinstance(error, StoreError) else error
        logger.warning(
            "documents cannot be %s for reuse: %s", what, error, exc_info=trace
        )
