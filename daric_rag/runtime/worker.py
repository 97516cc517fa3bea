"""The worker that vLLM loads by name: its platform's own, with two stages added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from daric_rag.runtime.connector import DaricConnector, closing_params
from daric_rag.runtime.step_builder import check_runner, discard_pass
from daric_rag.runtime.vllm_api import (
    SchedulerOutput,
    get_kv_transfer_group,
    platform_worker_class,
)
from daric_rag.runtime.worker_side import WorkerSide
from daric_rag.storage import StoreStats

__all__ = ["DaricWorker", "DaricWorkerMixin"]


class DaricWorkerMixin:
    """Worker process. Runs each engine step's sub-requests before vLLM's own pass."""

    model_runner: Any

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run a step; see `vllm.v1.worker.gpu_worker.Worker.execute_model`."""
        connector = get_kv_transfer_group()
        if isinstance(connector, DaricConnector):
            scheduler_output = connector.worker.prepare_step(
                scheduler_output, self._run_pass
            )
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Bind the worker side to the model once its KV cache exists."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        check_runner(self.model_runner)
        connector = get_kv_transfer_group()
        if isinstance(connector, DaricConnector):
            connector.bind_model(self.model_runner.get_model())

    def compile_or_warm_up_model(self) -> Any:
        """Verify the model once it can run."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        connector = get_kv_transfer_group()
        if isinstance(connector, DaricConnector):
            connector.verify_model(self._run_pass)
        return times

    def daric_flush(self) -> None:
        """Return when everything computed so far is on disk."""
        self._side.store.flush()

    def daric_store_stats(self) -> StoreStats:
        """Return what the store holds and did."""
        return self._side.store.stats()

    def daric_closing_params(
        self, request_ids: Sequence[str]
    ) -> list[dict[str, Any] | None]:
        """Return ended requests' reuse counts, once; None where they are unknown.

        A scheduler in another process tells of one in the step behind its last one.
        """
        told = [closing_params(request_id) for request_id in request_ids]
        return [
            self._side.answers.take(request_id) if params is None else params
            for request_id, params in zip(request_ids, told, strict=True)
        ]

    def daric_clear_host(self) -> None:
        """Drop host copies of segments that are on disk."""
        self._side.store.clear_host()

    @property
    def _side(self) -> WorkerSide:
        connector = get_kv_transfer_group()
        assert isinstance(connector, DaricConnector)
        return connector.worker

    def _run_pass(self, scheduler_output: SchedulerOutput) -> None:
        super().execute_model(scheduler_output)  # type: ignore[misc]
        discard_pass(self.model_runner)


class DaricWorker(DaricWorkerMixin, platform_worker_class()):  # type: ignore[misc]
    """What ``worker_cls`` names."""
