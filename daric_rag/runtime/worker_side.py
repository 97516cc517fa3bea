"""The connector's worker side: bound to the model once, then one run per step.

It obeys the step plan. The one thing it decides is what to do about a record that is
not there or not intact: its chunk is generated all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from daric_rag.config import KvStorageName
from daric_rag.keys import Scalar, model_fingerprint
from daric_rag.runtime.background_reads import BackgroundReads
from daric_rag.runtime.ended import KeptAnswers
from daric_rag.runtime.fill_queue import FillQueue
from daric_rag.runtime.gate_record import GateRecord, gate_facts
from daric_rag.runtime.kv_codec import KvShape, codec_of
from daric_rag.runtime.kv_layout import KvLayout, WriteSlots
from daric_rag.runtime.kv_mover import KvMover
from daric_rag.runtime.kv_probe import probe_layout
from daric_rag.runtime.metadata import DaricMetadata, DaricWorkerMetadata
from daric_rag.runtime.metrics import DaricStats
from daric_rag.runtime.model_gate import GateEngine, ModelGate
from daric_rag.runtime.pace import Pace
from daric_rag.runtime.pinned_memory import pin_arena
from daric_rag.runtime.ranks import Agree, RankKeys
from daric_rag.runtime.rope import Reencoder, RopeParameters, RotateFn
from daric_rag.runtime.step_builder import (
    RunPass,
    StepBuilder,
    StepPasses,
    SubRequest,
    empty_step,
)
from daric_rag.runtime.step_run import StepRun
from daric_rag.runtime.stream_transfers import transfers_for
from daric_rag.runtime.transfers import KvAccess, Transfers
from daric_rag.runtime.vllm_api import SchedulerOutput
from daric_rag.steps import Limits, SaveStep
from daric_rag.storage import TieredStore

__all__ = ["WorkerSide"]

# vLLM's null block: nobody's data, so it may be written while probing.
_SPARE_BLOCK = 0


class WorkerSide:
    """Worker process. Executes step plans.

    Args:
        store: The KV store; owned and closed here.
        fields: What the model's KV depends on, this rank's.
        limits: Of one forward pass.
        block_size: Tokens per block.
        kv_storage: How records hold keys and values; see `DaricConfig`.
        ranks: Of this worker.
        agree: Between the ranks; see `ranks`.
    """

    def __init__(
        self,
        store: TieredStore,
        fields: dict[str, Scalar],
        limits: Limits,
        *,
        block_size: int,
        kv_storage: KvStorageName,
        ranks: RankKeys | None = None,
        agree: Agree = list,
    ) -> None:
        """Wait for `register_layers` and `bind_model`."""
        self.store, self.stats = store, DaricStats()
        self._fingerprint = model_fingerprint(fields)
        self._limits, self._block_size = limits, block_size
        self._kv_storage = kv_storage
        self._ranks, self._agree = ranks, agree
        self._layers: list[Tensor] = []
        self._builder = StepBuilder()
        self._layout: KvLayout | None = None
        self._mover: KvMover | None = None
        self._reencoder: Reencoder | None = None
        self._transfers: Transfers | None = None
        self._queue = FillQueue(block_size)
        self._pace = Pace()
        self._reads: BackgroundReads | None = None
        self._run: StepRun | None = None
        self.answers = KeptAnswers()
        self._unpin: Callable[[], object] = lambda: None

    def register_layers(self, layers: Sequence[Tensor]) -> None:
        """Take the KV cache's tensors, in order of layers."""
        self._layers = list(layers)

    def bind_model(
        self, rope: RopeParameters, rotate: RotateFn, write_slots: WriteSlots
    ) -> None:
        """Learn the block layout and get ready to run.

        Raises:
            UnsupportedModelError: The layout is unknown.
        """
        first = self._layers[0]
        _, num_kv_heads, _, width = first.shape
        head_dim = width // 2
        self._unpin = pin_arena(self.store.host.arena, first.device)
        layout = probe_layout(self._layers, head_dim, write_slots, _SPARE_BLOCK)
        self._clear_spare_block()
        self._layout = layout
        shape = KvShape(len(self._layers), num_kv_heads, head_dim, first.dtype)
        self._reencoder = Reencoder(rope, rotate)
        codec = codec_of(self._kv_storage, shape, first.device)
        access = KvAccess(
            layout, write_slots, self._reencoder, codec, shape, first.device
        )
        self._transfers = transfers_for(access, self._layers)
        self._mover = KvMover(
            self.store,
            self._transfers,
            shape=shape,
            codec=codec,
            fingerprint=self._fingerprint,
            ranks=self._ranks,
            agree=self._agree,
        )
        self._reads = BackgroundReads(
            self._mover.read,
            self._mover.is_near,
            self._pace,
            on_exit=self.store.close_thread,
        )

    def cached_keys_of(self, token_ids: Sequence[int], run_pass: RunPass) -> Tensor:
        """Run a few tokens on their own and return the keys they left in the cache.

        Args:
            token_ids: At most a block of ids.
            run_pass: Runs a pass of sub-requests.

        Returns:
            ``[num_layers, num_tokens, num_kv_heads, head_dim]``.
        """
        assert self._layout is not None
        sub = SubRequest(token_ids, 0, len(token_ids), [_SPARE_BLOCK])
        run_pass(self._builder.alone(empty_step(), [sub], first=True))
        first = self._layers[0]
        shape = (len(self._layers), len(token_ids), first.shape[1], first.shape[3] // 2)
        keys = torch.empty(shape, dtype=first.dtype, device=first.device)
        self._layout.gather(keys, torch.empty_like(keys), [_SPARE_BLOCK], 0)
        self._clear_spare_block()
        return keys

    def check_first_use(
        self, run_pass: RunPass, *, kernel: str, max_model_len: int, vocab_size: int
    ) -> None:
        """Put the model through the full gate unless it has passed it before.

        No request may exist yet: blocks are overwritten, and zero afterwards.

        Args:
            run_pass: Runs a pass of sub-requests.
            kernel: Name of the attention kernel.
            max_model_len: Tokens that a sequence may have.
            vocab_size: Token ids are below it.

        Raises:
            UnsupportedModelError: Reused documents would be garbled.
        """
        assert self._layout is not None
        assert self._reencoder is not None
        record = GateRecord(gate_facts(self._fingerprint, self._layers, kernel))
        (has_passed,) = self._agree([record.has_passed()])
        if has_passed:
            return

        def run(subs: Sequence[SubRequest]) -> None:
            run_pass(self._builder.alone(empty_step(), subs, first=True))

        engine = GateEngine(
            run,
            self._layout,
            self._reencoder.reencode_keys,
            self._layers,
            self._limits,
            max_model_len,
            vocab_size,
        )
        ModelGate(engine).check()
        record.remember()

    def prepare_step(
        self, scheduled: SchedulerOutput, run_pass: RunPass
    ) -> SchedulerOutput:
        """Run everything of a step that comes before vLLM's own pass.

        Args:
            scheduled: What vLLM scheduled; not mutated.
            run_pass: Runs a pass of sub-requests.

        Returns:
            What vLLM's own pass runs.
        """
        metadata = scheduled.kv_connector_metadata
        assert isinstance(metadata, DaricMetadata)
        assert self._reads is not None, "bind_model comes before the first step"
        self._bound_mover.forget()  # of a step that failed
        for req_id, params in metadata.answers.items():
            self.answers.add(req_id, params)
        self._bound_mover.protect(metadata.plan.hit_keys())
        self._run = StepRun(
            self._bound_mover,
            self._reads,
            self._queue,
            metadata.plan,
            StepPasses(scheduled, run_pass, self._builder, self._pace),
            limits=self._limits,
            block_size=self._block_size,
        )
        with torch.inference_mode():
            own = self._run.prepare()
        self._expect(metadata.plan.saves)
        return own

    def begin_pass(self, *, layerwise: bool) -> None:
        """A pass is submitted next; see `Transfers.begin_pass`."""
        with torch.inference_mode():
            self._bound_transfers.begin_pass(layerwise=layerwise)

    def wait_layer(self, layer: int) -> None:
        """See `Transfers.wait_layer`."""
        self._bound_transfers.wait_layer(layer)

    def save_layer(self, layer: int) -> None:
        """See `Transfers.save_layer`."""
        self._bound_transfers.save_layer(layer)

    def abandon_pass(self) -> None:
        """A pass failed: leave nothing under way, and nothing to be started."""
        # What went wrong first is what matters.
        with suppress(Exception):
            self._bound_mover.forget()
            self._bound_transfers.settle()

    def finish_step(self) -> None:
        """After vLLM's pass: save what it completed."""
        with torch.inference_mode():
            if self._run is not None:
                self._run.finish()
            self._bound_transfers.submit()

    def filled(self) -> set[str]:
        """Return asynchronous requests that wait no longer, after `finish_step`.

        Their blocks are filled, or they were aborted and nothing is written to their
        blocks any more.
        """
        return self._queue.take_filled()

    def take_report(self) -> DaricWorkerMetadata:
        """Return what this step did, once."""
        report = DaricWorkerMetadata() if self._run is None else self._run.report
        self._run = None
        self._bound_mover.release()
        report.evicted, report.demoted = self._bound_mover.take_moved()
        report.backlog_len = self._queue.backlog_len
        if report.reports:
            # A store that cannot count itself must not end an engine.
            with suppress(Exception):
                self.stats.set_store(self.store.stats())
        # Even an empty one: what only some of the ranks saved must not count as saved,
        # and vLLM leaves out ranks that have nothing to say.
        return report

    def close(self) -> None:
        """Save what is on its way, and close the store."""
        if self._reads is not None:
            self._reads.close()
        if self._transfers is not None:
            # What a broken device has to say must not keep the store open.
            with suppress(Exception):
                self._transfers.settle()
        self._unpin()
        self.store.close()

    def _expect(self, saves: Sequence[SaveStep]) -> None:
        mover = self._bound_mover
        if not mover.is_layerwise:
            return
        for save in saves:
            identity = mover.identity(save.key, save.parent, save.index, save.document)
            num_tokens = save.end - save.start
            mover.expect_save(identity, save.block_ids, save.start, num_tokens)

    def _clear_spare_block(self) -> None:
        for layer in self._layers:
            layer[_SPARE_BLOCK].zero_()

    @property
    def _bound_transfers(self) -> Transfers:
        assert self._transfers is not None, "bind_model comes before the first pass"
        return self._transfers

    @property
    def _bound_mover(self) -> KvMover:
        assert self._mover is not None, "bind_model comes before the first step"
        return self._mover
