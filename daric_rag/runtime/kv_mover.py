"""Records and blocks: reading, placing and saving segments."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from daric_rag.document_info import DocumentInfo, encode_document
from daric_rag.errors import StoreError
from daric_rag.keys import SegmentKey
from daric_rag.runtime.kv_codec import KvCodec, KvShape
from daric_rag.runtime.placement import Placement
from daric_rag.runtime.ranks import Agree, RankKeys
from daric_rag.runtime.transfers import LayerSave, Transfers
from daric_rag.storage import TieredStore
from daric_rag.storage.base import Record
from daric_rag.storage.format import RecordHeader, SegmentIdentity

__all__ = ["KvMover"]

logger = logging.getLogger(__name__)


class KvMover:
    """Worker process. Moves segments between the store and the engine's blocks.

    A store that fails is a store without records: it costs time, and must not end an
    engine that can compute everything anew. Nothing here raises for it.

    Callers speak of segments by the keys that all ranks share; the store knows this
    rank's records.

    Attributes:
        exact_records: Whether records hold exactly what was computed.
    """

    def __init__(
        self,
        store: TieredStore,
        transfers: Transfers,
        *,
        shape: KvShape,
        codec: KvCodec,
        fingerprint: bytes,
        ranks: RankKeys | None = None,
        agree: Agree = list,
    ) -> None:
        """Bind store, blocks and model together."""
        self._ranks = ranks if ranks is not None else RankKeys()
        self._agree = agree
        self._store, self._transfers = store, transfers
        self._shape, self._codec = shape, codec
        self._fingerprint = fingerprint
        self.exact_records = codec.dtype_name == shape.dtype_name
        self._protected: Sequence[bytes] = ()  # records' keys
        self._expected: dict[SegmentKey, LayerSave] = {}
        self._warned: set[str] = set()

    @property
    def is_layerwise(self) -> bool:
        """Whether `expect_save` is of any use."""
        return self._transfers.is_layerwise

    def is_near(self, key: SegmentKey) -> bool:
        """Whether this rank's record of a segment is in memory."""
        return self._store.in_memory(self._ranks.to_record(key))

    def read(
        self, keys: Sequence[SegmentKey], lens: Sequence[int]
    ) -> list[Record | None]:
        """Read this rank's records; None where the store has nothing that fits.

        May be called from any thread. What one rank cannot read all must generate
        anew: see `agree`.

        Args:
            keys: The segments' keys, [n].
            lens: Tokens per segment, [n].
        """
        record_keys = [self._ranks.to_record(key) for key in keys]
        try:
            records = self._store.read_many(record_keys, self._fingerprint)
        except Exception as error:
            self._warn("read", error)
            return [None] * len(keys)
        return [
            record if record is not None and self._fits(record, num_tokens) else None
            for record, num_tokens in zip(records, lens, strict=True)
        ]

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are set on every rank; collective."""
        return self._agree(flags)

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
        """Write a segment to its place in a prompt, re-encoded, before the next pass.

        Args:
            record: The segment, with keys as they are at the chunk's own positions.
            block_ids: The sequence's blocks from position 0 on.
            chunk_start: Where the chunk starts in the prompt.
            segment_start: Where the segment starts in the chunk.
            place_from: First position that may be written.
            place_until: Position after the last one.
        """
        self._transfers.place(
            Placement(
                record, block_ids, chunk_start, segment_start, place_from, place_until
            )
        )

    def protect(self, keys: Sequence[SegmentKey]) -> None:
        """Keep records from being evicted by what the same step saves."""
        self.release()  # of a step that failed
        record_keys = [self._ranks.to_record(key) for key in keys]
        try:
            self._store.protect(record_keys)
        except Exception as error:
            self._warn("protected", error)
        else:
            self._protected = record_keys

    def release(self) -> None:
        """Undo `protect`."""
        keys, self._protected = self._protected, ()
        try:
            self._store.release(keys)
        except Exception as error:
            self._warn("protected", error)

    def take_moved(self) -> tuple[set[SegmentKey], set[SegmentKey]]:
        """Return what the store has given up, and what has left its memory, since then.

        And maybe no segments, see `RankKeys.candidates`.
        """
        try:
            evicted = self._ranks.candidates(self._store.take_evicted())
            demoted = self._ranks.candidates(self._store.take_demoted())
        except Exception as error:
            self._warn("evicted", error)
            return set(), set()
        return evicted, demoted

    def forget(self) -> None:
        """Drop what a step that failed had placed or expected, and not started.

        Its blocks may be another request's by now.
        """
        self._expected.clear()
        self._transfers.forget()

    def identity(
        self,
        key: SegmentKey,
        parent: bytes,
        index: int,
        document: DocumentInfo | None,
    ) -> SegmentIdentity:
        """Return a segment's identity, the same on all ranks but for the model."""
        side_data = b"" if document is None else encode_document(document)
        return SegmentIdentity(key, parent, self._fingerprint, index, side_data)

    def expect_save(
        self,
        identity: SegmentIdentity,
        block_ids: Sequence[int],
        start: int,
        num_tokens: int,
    ) -> None:
        """Say that the next pass completes a segment, and that `save` follows it.

        So that it is saved while the pass runs. Saving what nobody expected takes
        longer, and is no different otherwise.

        Args:
            identity: As for `save`.
            block_ids: As for `save`.
            start: As for `save`.
            num_tokens: As for `save`.
        """
        if not self._transfers.is_layerwise:
            return
        if SegmentKey(identity.key) in self._expected:
            return  # of another request, with the same bytes
        header = self._header(identity, num_tokens)
        payload = self._allocate(header.payload_len, header.parent_key)
        save = LayerSave(payload, tuple(block_ids), start, num_tokens)
        self._expected[SegmentKey(identity.key)] = save
        self._transfers.expect_save(save)

    def save(
        self,
        identity: SegmentIdentity,
        block_ids: Sequence[int],
        start: int,
        num_tokens: int,
    ) -> tuple[Record, bool]:
        """Save a segment from blocks, as it lies there.

        Args:
            identity: From `identity`.
            block_ids: The sequence's blocks from position 0 on.
            start: Its first position in that sequence, at which its keys are right.
            num_tokens: Its length.

        Returns:
            The record, in memory whatever the store did, and whether it took it.
        """
        header = self._header(identity, num_tokens)
        expected = self._expected.pop(SegmentKey(identity.key), None)
        if expected is None:
            buffer = self._allocate(header.payload_len, header.parent_key)
        else:
            buffer = expected.payload
        if expected is None or not self._transfers.finish_save(expected):
            keys, values = self._codec.staging(buffer, num_tokens)
            self._transfers.gather(keys, values, block_ids, start)
            self._codec.payload_of(keys, values, buffer)
        record = Record(header, buffer, identity.side_data)
        try:
            self._store.write(header, buffer, identity.side_data)
        except Exception as error:
            self._warn("saved", error)
            return record, False
        return record, True

    def key_of(self, record: Record) -> SegmentKey:
        """Return the key of the segment that a record of this rank holds."""
        return self._ranks.from_record(record.key)

    def _fits(self, record: Record, num_tokens: int) -> bool:
        header = record.header
        return (
            header.shape == self._shape.of(num_tokens)
            and header.dtype == self._codec.dtype_name
        )

    def _allocate(self, nbytes: int, parent: bytes) -> memoryview:
        try:
            return self._store.allocate(nbytes, parent=parent)
        except StoreError as error:
            self._warn("saved", error)
            return memoryview(bytearray(nbytes))

    def _header(self, identity: SegmentIdentity, num_tokens: int) -> RecordHeader:
        own = replace(
            identity,
            key=self._ranks.to_record(identity.key),
            parent=self._ranks.to_record(identity.parent),
        )
        shape = self._shape.of(num_tokens)
        return RecordHeader.for_shape(own, shape, self._codec.dtype_name)

    def _warn(self, what: str, error: Exception) -> None:
        if what in self._warned:
            return
        self._warned.add(what)
        # What the store says on purpose names the mend; anything else is a fault.
        trace = None if isinstance(error, StoreError) else error
        logger.warning(
            "documents cannot be %s for reuse: %s", what, error, exc_info=trace
        )
