"""An engine in this process: unmodified vLLM with our worker and connector.

vLLM's engine runs in a thread of its own, the only one that ever touches it. Clients
submit from any thread or event loop and hear back through a sink each, so that
concurrent requests meet in vLLM's scheduler and are batched there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from daric_rag.config import DaricConfig
from daric_rag.engine import Delta
from daric_rag.input_processor import InputProcessor
from daric_rag.keys import model_fingerprint
from daric_rag.models import resolve_model
from daric_rag.runtime.client import ClientEngine, checked_config
from daric_rag.runtime.engine_loop import EngineLoop
from daric_rag.runtime.launch import build_engine, drop_engine, rank_fields
from daric_rag.runtime.ranks import total_stats
from daric_rag.runtime.request_stream import RequestStream, Submission
from daric_rag.runtime.submissions import SubmissionMaker
from daric_rag.storage import MEMORY, StoreStats, store_name

__all__ = ["EmbeddedEngine"]


class EmbeddedEngine(ClientEngine):
    """Client process. Answers prompts with vLLM running in this process.

    Args:
        model: A local folder, a hub name, or the short name ``smollm2-135m``.
        store: Folder of the KV store; None for the user's cache folder, ``":memory:"``
            to keep documents in host memory only.
        config: Layout, selection and capacities.
        **vllm_options: Fields of vLLM's ``EngineArgs``, such as ``max_model_len``,
            ``dtype`` or ``kv_cache_memory_bytes``. With
            ``scheduling_policy="priority"`` requests may have priorities.

    Attributes:
        store_path: The store's folder, absolute; of one in memory a name of its own.

    Raises:
        ConfigError: An option is unknown or refused.
        ModelError: The model is missing or unsupported.
        VllmVersionError: vLLM is missing or of another version.
        StoreError: The store's folder cannot be used.
    """

    _loop: EngineLoop

    def __init__(
        self,
        model: str,
        *,
        store: str | os.PathLike[str] | None = None,
        config: DaricConfig | None = None,
        **vllm_options: Any,
    ) -> None:
        """Start the engine; takes seconds."""
        self.config = checked_config(config)
        self.model_path = resolve_model(model)
        store_path = None if store is None else os.fspath(store)
        self.store_path = store_name(store_path if self.config.disk_bytes else MEMORY)
        start = partial(
            build_engine, str(self.model_path), store_path, self.config, vllm_options
        )
        super().__init__(EngineLoop(start, drop_engine))
        facts = self._loop.facts
        self.tokenizer = facts.tokenizer
        self.max_model_len = facts.max_model_len
        self.block_size = facts.block_size
        try:
            self._maker = SubmissionMaker(
                InputProcessor(
                    facts.tokenizer,
                    config=self.config,
                    block_size=facts.block_size,
                    max_model_len=facts.max_model_len,
                ),
                facts.vocab_size,
                facts.scheduling_policy,
                'open it with EmbeddedEngine(..., scheduling_policy="priority")',
            )
        except BaseException:
            self.close()
            raise

    def flush(self) -> None:
        """Return when everything computed so far is on disk."""
        self._loop.call(lambda engine: engine.collective_rpc("daric_flush"))

    def store_stats(self) -> StoreStats:
        """Return what the store holds and did."""
        stats: list[Any] = self._loop.call(
            lambda engine: engine.collective_rpc("daric_store_stats")
        )
        return total_stats(stats)

    def fingerprints(self) -> list[str]:
        """Return the model's fingerprint, in hex, of each rank's records."""
        fields: list[dict[str, Any]] = self._loop.call(
            lambda engine: rank_fields(engine.vllm_config, self.config.kv_storage)
        )
        return [model_fingerprint(rank).hex() for rank in fields]

    def clear_host(self) -> None:
        """Drop host copies of documents that are on disk, to measure the disk tier."""
        self._loop.call(lambda engine: engine.collective_rpc("daric_clear_host"))

    def clear_prefix_cache(self) -> None:
        """Empty vLLM's own prefix cache; the store keeps what it has."""
        self._loop.call(lambda engine: engine.reset_prefix_cache())

    def close(self) -> None:
        """Flush the store, stop the engine, release memory; harmless when repeated."""
        super().close()

    def _submit(
        self, submission: Submission, put: Callable[[Delta | BaseException], None]
    ) -> RequestStream:
        stream = RequestStream(submission, put)
        self._loop.submit(stream)
        return stream
