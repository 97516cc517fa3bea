"""What may be saved, until the worker side reports what it did save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from daric_rag.chunk_plan import SegmentSave
from daric_rag.document_info import DocumentInfo
from daric_rag.keys import SegmentKey
from daric_rag.plan import RequestPlan
from daric_rag.runtime.store_view import StoreView
from daric_rag.runtime.tracking import TrackedRequest
from daric_rag.segment_table import ParentKey
from daric_rag.steps import SaveStep

__all__ = ["PendingSaves"]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A segment's parent in the index, its length, and for whom it is saved in place.

    Chunks that are generated are counted by the worker side instead.
    """

    parent: ParentKey
    num_tokens: int
    owner: TrackedRequest | None = None


class PendingSaves:
    """Scheduler process. Segments that running requests may write to the store."""

    def __init__(self) -> None:
        self._segments: dict[SegmentKey, _Pending] = {}
        # Asynchronous requests may save in any step until they are filled.
        self._waiting: dict[str, dict[SegmentKey, _Pending]] = {}

    def expect_chunks(self, req_id: str, plan: RequestPlan, *, now: bool) -> None:
        """The chunks of an admitted request may be generated and saved.

        Args:
            req_id: The request.
            plan: Its plan.
            now: Whether in this step; else until `forget`.

        Hits too: one that turns out to be lost is generated and saved again.
        """
        segments = self._segments if now else self._waiting.setdefault(req_id, {})
        for chunk in plan.chunks:
            parent: ParentKey = plan.root
            for index, key in enumerate(chunk.keys):
                start, end = chunk.segment_span(index)
                segments[key] = _Pending(parent, end - start)
                parent = key

    def take_ready(
        self,
        tracked: TrackedRequest,
        num_computed: int,
        block_ids_of: Callable[[], Sequence[int]],
    ) -> list[SaveStep]:
        """Return the work of saving a first chunk's segments from where they lie.

        What another request saves in this step is left to it.

        Args:
            tracked: An admitted request; what is returned is not `unsaved` any more.
            num_computed: Its tokens that are computed at the end of the step.
            block_ids_of: Returns its blocks.
        """
        assert tracked.plan is not None
        # Early windows are complete after the admitting step, the last one grows.
        done = max(num_computed, tracked.plan.hit_len)
        ready = [save for save in tracked.unsaved if save.end <= done]
        if not ready:
            return []
        tracked.unsaved = [save for save in tracked.unsaved if save.end > done]
        blocks = tuple(block_ids_of())
        return [
            self._save_step(tracked, tracked.plan, save, blocks)
            for save in ready
            if not self._is_saved_in_place(tracked.plan.first_keys[save.index])
        ]

    def take_saved(self, keys: Iterable[SegmentKey], view: StoreView) -> None:
        """The store has these: the view learns them, and their owners' counts grow."""
        for key in keys:
            pending = self._find(key)
            if pending is None:
                continue
            view.learn(key, pending.parent)
            view.promote([key])
            if pending.owner is not None:
                pending.owner.saved_tokens += pending.num_tokens

    def is_awaited(self, plan: RequestPlan) -> bool:
        """Whether an asynchronous request will save what a plan misses."""
        return any(
            key in segments
            for chunk in plan.chunks
            for key in chunk.keys[chunk.num_hit_segments :]
            for segments in self._waiting.values()
        )

    def end_step(self) -> None:
        """The step is over."""
        self._segments.clear()

    def forget(self, req_id: str) -> None:
        """An asynchronous request is filled, or over."""
        self._waiting.pop(req_id, None)

    def _save_step(
        self,
        tracked: TrackedRequest,
        plan: RequestPlan,
        save: SegmentSave,
        blocks: tuple[int, ...],
    ) -> SaveStep:
        key = plan.first_keys[save.index]
        parent: ParentKey = plan.first_keys[save.index - 1] if save.index else plan.root
        self._segments[key] = _Pending(parent, save.end - save.start, owner=tracked)
        document = None
        if save.ends_document:
            assert tracked.wire is not None
            ids, namespace = (
                tracked.token_ids[: save.end],
                tracked.wire.config.namespace,
            )
            document = DocumentInfo.of(ids, plan.first_title, namespace)
        return SaveStep(key, parent, save.index, save.start, save.end, document, blocks)

    def _is_saved_in_place(self, key: SegmentKey) -> bool:
        return key in self._segments and self._segments[key].owner is not None

    def _find(self, key: SegmentKey) -> _Pending | None:
        for segments in (self._segments, *self._waiting.values()):
            if key in segments:
                return segments[key]
        return None
