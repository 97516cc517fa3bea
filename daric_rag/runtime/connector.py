"""The connector that vLLM loads by name: one switch by role, then forwarding."""

from __future__ import annotations

import logging
import sys
import weakref
from functools import partial
from typing import Any

from daric_rag.config import DaricConfig
from daric_rag.runtime.gate import MAX_GATE_TOKENS, check_cached_keys
from daric_rag.runtime.identity import model_fields, namespace_root
from daric_rag.runtime.kv_codec import KvShape, codec_of
from daric_rag.runtime.metadata import DaricMetadata, DaricWorkerMetadata
from daric_rag.runtime.metrics import DaricPromMetrics, DaricStats
from daric_rag.runtime.ranks import RankKeys, agree, record_keys
from daric_rag.runtime.rope import rope_parameters
from daric_rag.runtime.scheduler_side import SchedulerSide
from daric_rag.runtime.scratch import ScratchBlocks
from daric_rag.runtime.serving import CONFIG_KEY, STORE_KEY
from daric_rag.runtime.step_builder import RunPass
from daric_rag.runtime.store_view import StoreView
from daric_rag.runtime.support import check_vllm_config, only_spec
from daric_rag.runtime.vllm_api import (
    KVConnectorBase_V1,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    SchedulerOutput,
    VllmConfig,
    attention_kernel_of,
    extract_layer_index,
    replays_whole_graph,
    rotary_modules,
    rotate_rows,
    tensor_parallel_group,
    write_slots_of,
)
from daric_rag.runtime.worker_side import WorkerSide
from daric_rag.steps import Limits
from daric_rag.storage import load_cipher, open_probe, open_store
from daric_rag.storage.format import payload_len_of

__all__ = ["DaricConnector", "closing_params"]

logger = logging.getLogger(__name__)

_RESET = (
    "vLLM's caches were reset, after which its weights may be others; start another "
    "engine to reuse documents"
)

# Any will do: vocabularies begin with special tokens and bytes.
_GATE_TOKEN = 7


# Of this process, for the worker side's answers to clients in another one.
_scheduler_sides: weakref.WeakSet[SchedulerSide] = weakref.WeakSet()


def closing_params(request_id: str) -> dict[str, Any] | None:
    """Return the reuse counts of a request that ended, where this process has them."""
    for side in _scheduler_sides:
        params = side.closing_params(request_id)
        if params is not None:
            return params
    return None


class DaricConnector(KVConnectorBase_V1):
    """Scheduler process and worker process: one half of it lives in each."""

    scheduler: SchedulerSide
    worker: WorkerSide

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        """Build the half that `role` names.

        Raises:
            UnsupportedModelError: The engine or its model cannot be served.
            ConfigError: The extra configuration is wrong.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        check_vllm_config(vllm_config)
        spec = only_spec(kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        config = DaricConfig.from_dict(extra.get(CONFIG_KEY, {}))
        scheduler = vllm_config.scheduler_config
        limits = Limits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        # What all ranks share; each keeps records of its own, and its share of memory.
        fields = model_fields(vllm_config, kv_storage=config.kv_storage)
        size = vllm_config.parallel_config.tensor_parallel_size
        host_bytes = config.host_bytes // size
        store = extra.get(STORE_KEY)
        if role is KVConnectorRole.SCHEDULER:
            num_layers = len(kv_cache_config.kv_cache_groups[0].layer_names)
            shape = KvShape(num_layers, spec.num_kv_heads, spec.head_size, spec.dtype)
            dtype = codec_of(config.kv_storage, shape).dtype_name
            self._probe = open_probe(store, disk_bytes=config.disk_bytes)
            view = StoreView(
                partial(namespace_root, fields),
                probe=lambda key: self._probe.contains_all(record_keys(key, size)),
                max_bytes=host_bytes + config.disk_bytes // size,
                segment_bytes=payload_len_of(shape.of(config.max_segment_len), dtype),
                max_segment_len=config.max_segment_len,
            )
            self.scheduler = SchedulerSide(config, view, limits)
            _scheduler_sides.add(self.scheduler)
        else:
            rank, size, group = tensor_parallel_group()
            tiers = open_store(
                store,
                host_bytes=host_bytes,
                disk_bytes=config.disk_bytes,
                eviction=config.eviction,
                cipher=load_cipher(config.encryption_key_file),
                require_disk=config.require_disk,
            )
            self.worker = WorkerSide(
                tiers,
                model_fields(vllm_config, kv_storage=config.kv_storage, rank=rank),
                limits,
                block_size=spec.block_size,
                kv_storage=config.kv_storage,
                ranks=RankKeys(rank, size),
                agree=partial(agree, group=group),
            )

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the layers' tensors, in order of layers."""
        names = sorted(kv_caches, key=extract_layer_index)
        self._kv_caches = {name: kv_caches[name] for name in names}
        self._layer_index = {name: index for index, name in enumerate(names)}
        self.worker.register_layers(list(self._kv_caches.values()))

    def bind_model(self, model: Any) -> None:
        """Bind the worker side to the loaded model."""
        hf_config = self._vllm_config.model_config.hf_text_config
        self._rope = rope_parameters(hf_config, rotary_modules(model))
        self.worker.bind_model(
            self._rope,
            rotate_rows,
            write_slots_of(self._vllm_config, self._kv_caches),
        )

    def verify_model(self, run_pass: RunPass) -> None:
        """Refuse a model whose cached keys are not what re-encoding assumes."""
        block_size = only_spec(self._kv_cache_config).block_size
        per_pass = self._vllm_config.scheduler_config.max_num_batched_tokens
        token_ids = [_GATE_TOKEN] * min(MAX_GATE_TOKENS, block_size, per_pass)
        keys = self.worker.cached_keys_of(token_ids, run_pass)
        model = self._vllm_config.model_config
        self.worker.check_first_use(
            run_pass,
            kernel=attention_kernel_of(self._vllm_config, self._kv_caches),
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
        )
        # Last, for ranks that differ must not part before the last pass.
        check_cached_keys(keys, self._rope)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No: vLLM would do without whole graphs, which decoding is fastest with.

        No hook runs inside of one. A pass that is replayed as a whole waits for all
        loads before it begins, and what it completes is saved when it is over.
        """
        return False

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A pass is submitted next: start the loads that it needs."""
        super().bind_connector_metadata(connector_metadata)
        self.worker.begin_pass(layerwise=not replays_whole_graph())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to do: vLLM may call this after the pass, when it is too late."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let a layer's attention come after its loads."""
        self.worker.wait_layer(self._layer_index[layer_name])

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Start to save what the pass has completed of a layer."""
        self.worker.save_layer(self._layer_index[layer_name])

    def wait_for_save(self) -> None:
        """Finish the step; passes of sub-requests have an empty plan.

        vLLM asks in a ``finally``, so also after a pass that failed. What such a pass
        left in the blocks is nobody's KV and must not be saved.
        """
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, DaricMetadata)
        if sys.exception() is not None:
            self.worker.abandon_pass()
        elif metadata.is_step:
            self.worker.finish_step()

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Return asynchronous requests whose blocks are filled."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, DaricMetadata)
        return None, self.worker.filled() if metadata.is_step else None

    def build_connector_worker_meta(self) -> DaricWorkerMetadata | None:
        """Return what the step did, for the scheduler side."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, DaricMetadata)
        return self.worker.take_report() if metadata.is_step else None

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the pool that scratch blocks are borrowed from."""
        spec = only_spec(self._kv_cache_config)
        scheduler = self._vllm_config.scheduler_config
        self.scheduler.bind_scratch(
            ScratchBlocks(
                gpu_block_pool, spec.block_size, scheduler.max_num_batched_tokens
            )
        )

    def on_new_request(self, request: Any) -> None:
        """Take notice of a request."""
        self.scheduler.track(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Plan a request; says whether it waits until its blocks are filled."""
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """A request got its blocks."""
        (block_ids,) = blocks.get_block_ids()
        self.scheduler.admit(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> DaricMetadata:
        """Collect the step's work."""
        state = scheduler_output.kv_connector_block_state

        def block_ids_of(req_id: str) -> list[int]:
            (block_ids,) = state.get_block_ids(req_id)
            return block_ids

        num_tokens = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {
            new.req_id: new.num_computed_tokens
            for new in scheduler_output.scheduled_new_reqs
        }
        after = {req_id: computed[req_id] + num for req_id, num in num_tokens.items()}
        plan = self.scheduler.build_step(after, block_ids_of)
        return DaricMetadata(plan, True, self.scheduler.take_told())

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn what the worker did, at the end of every step that ran a pass."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, DaricWorkerMetadata):
            self.scheduler.take_report(report)
        self.scheduler.end_step(connector_output.finished_recving or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return a request's reuse counts; its blocks may go at once."""
        return False, self.scheduler.finish(request)

    # Statistics, of either side.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this half counted since it was last asked."""
        if self.role is KVConnectorRole.SCHEDULER:
            return self.scheduler.stats.take()
        metadata = self._connector_metadata
        if isinstance(metadata, DaricMetadata) and not metadata.is_step:
            # vLLM asks in every pass, and discards what those of sub-requests say.
            return None
        return self.worker.stats.take()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats:
        """Return what another process counted."""
        return DaricStats(data) if data is not None else DaricStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Return our counters and gauges for Prometheus."""
        return DaricPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def reset_cache(self) -> bool:
        """Reuse nothing from now on: the weights may be others after it.

        vLLM asks for it where an operator has it pause, sleep, or take other weights.
        Records are named after the weights that an engine started with.
        """
        if self.role is KVConnectorRole.SCHEDULER:
            self.scheduler.end_reuse(_RESET)
            logger.warning("no request is served with reuse any more: %s", _RESET)
        return True

    def shutdown(self) -> None:
        """Close what this half holds open."""
        if self.role is KVConnectorRole.WORKER:
            self.worker.close()
        else:
            self._probe.close()
