"""Starting and stopping vLLM, with our worker and connector.

By default all of it runs in this process. Ranks of a tensor-parallel model are worker
processes, and with ``VLLM_ENABLE_V1_MULTIPROCESSING=1`` the engine is a process of its
own too. Both are spawned: a program that starts them must be importable, with
``if __name__ == "__main__":`` around what it does.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from daric_rag.config import DaricConfig
from daric_rag.errors import ConfigError, DaricError, EngineError
from daric_rag.keys import Scalar
from daric_rag.runtime.engine_loop import EngineFacts
from daric_rag.runtime.foreign_modules import settle_llvmlite
from daric_rag.runtime.identity import model_fields
from daric_rag.runtime.serving import (
    FIXED_OPTIONS,
    default_options,
    environment,
    transfer_fields,
)
from daric_rag.runtime.support import check_vllm_config
from daric_rag.runtime.vllm_api import (
    EngineArgs,
    KVTransferConfig,
    LLMEngine,
    VllmConfig,
    current_platform,
    executor_class_of,
    quiet,
    release_process_state,
)
from daric_rag.storage import open_probe

__all__ = ["build_engine", "drop_engine", "rank_fields"]

# Set by us.
_OURS = (*FIXED_OPTIONS, "kv_transfer_config", "model", "skip_tokenizer_init")

_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"

# A flush that takes longer than this has something to say of the disk, and at close
# nobody is left to hear it.
_FLUSH_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 5.0

# vLLM keeps its process groups and its connector in module globals.
_one_engine = threading.Lock()

# Room for this many prompts of full length, scratch blocks included.
_CACHED_PROMPTS = 8


def build_engine(
    model: str, store: str | None, config: DaricConfig, options: Mapping[str, Any]
) -> EngineFacts:
    """Start vLLM, driven by this thread.

    Args:
        model: Local folder or hub name.
        store: See `daric_rag.storage.open_store`.
        config: Of daric_rag.
        options: Fields of vLLM's ``EngineArgs``.

    Raises:
        ConfigError: An option is unknown or refused, or another engine is open.
        StoreError: The store's folder cannot be used.
        DaricError: As the connector's halves raise them.
    """
    _check_options(options)
    if not _one_engine.acquire(blocking=False):
        raise ConfigError(
            "another EmbeddedEngine is open in this process, and vLLM allows one; "
            "close it first, or share it"
        )
    engine: Any = None
    try:
        # Before a model is loaded for nothing: the folder must be usable.
        open_probe(store, disk_bytes=config.disk_bytes).close()
        engine = _start(model, store, config, options)
        return _facts(engine)
    except BaseException as error:
        with suppress(Exception):  # what went wrong first is what matters
            drop_engine(engine)
        if isinstance(error, DaricError):
            raise
        if isinstance(error, ValueError | TypeError | NotImplementedError):
            raise ConfigError(f"vLLM refused to start: {error}") from error
        raise EngineError(f"vLLM failed to start: {error!r}") from error


def _facts(engine: Any) -> EngineFacts:
    config = engine.vllm_config
    return EngineFacts(
        engine=engine,
        tokenizer=engine.get_tokenizer(),
        max_model_len=config.model_config.max_model_len,
        block_size=config.cache_config.block_size,
        vocab_size=config.model_config.get_vocab_size(),
        scheduling_policy=config.scheduler_config.policy,
    )


def rank_fields(config: VllmConfig, kv_storage: str) -> list[dict[str, Scalar]]:
    """Return the fields of each rank's `ModelFingerprint`, [num_ranks]."""
    return [
        model_fields(config, kv_storage=kv_storage, rank=rank)
        for rank in range(config.parallel_config.tensor_parallel_size)
    ]


def drop_engine(engine: Any | None) -> None:
    """Stop an engine; its memory goes with the last reference to it."""
    try:
        if engine is not None:
            # Worker processes are given seconds to end, and may have more to write.
            with suppress(Exception):
                engine.collective_rpc("daric_flush", timeout=_FLUSH_TIMEOUT_S)
            engine.engine_core.shutdown()
            _close_sockets(engine.engine_core)
    finally:
        try:
            release_process_state()
        finally:
            _one_engine.release()


def _close_sockets(client: Any) -> None:
    """Close what vLLM's client of an engine process leaves to the garbage collector."""
    context = getattr(client, "ctx", None)
    if context is not None:
        # It closes its own socket, and a socket is for one thread only.
        client.output_queue_thread.join(timeout=_JOIN_TIMEOUT_S)
        context.destroy(linger=0)


def _start(
    model: str, store: str | None, config: DaricConfig, options: Mapping[str, Any]
) -> Any:
    args = EngineArgs(
        **{
            **default_options(on_cpu=current_platform.is_cpu()),
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **options,
            **FIXED_OPTIONS,
            "model": model,
            "kv_transfer_config": KVTransferConfig(**transfer_fields(store, config)),
        }
    )
    engine_process = os.environ.get(_MULTIPROCESSING) == "1"
    settle_llvmlite()
    with _environment(args.tensor_parallel_size), quiet():
        vllm_config = args.create_engine_config()
        # The connector asks again, but only once the model is loaded.
        check_vllm_config(vllm_config)
        _size_buffers(vllm_config, options)
        return LLMEngine(
            vllm_config=vllm_config,
            executor_class=executor_class_of(vllm_config),
            log_stats=not args.disable_log_stats,
            multiprocess_mode=engine_process,
        )


def _size_buffers(config: VllmConfig, options: Mapping[str, Any]) -> None:
    """Set sizes that depend on the model, where the caller did not."""
    if current_platform.is_cpu() and not (
        options.get("kv_cache_memory_bytes") or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    ):
        # vLLM's own default takes most of the machine's memory, which an application
        # that embeds an engine needs for itself.
        model, parallel = config.model_config, config.parallel_config
        per_token = (
            model.get_num_layers(parallel)
            * model.get_num_kv_heads(parallel)
            * model.get_head_size()
            * 2
            * model.dtype.itemsize
        )
        wanted = _CACHED_PROMPTS * model.max_model_len * per_token
        quarter = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
        # All of these are one rank's.
        quarter //= parallel.tensor_parallel_size
        config.cache_config.kv_cache_memory_bytes = min(wanted, quarter)


@contextmanager
def _environment(num_ranks: int) -> Iterator[None]:
    """Set what vLLM and its processes read from the environment while they start."""
    chosen = environment(on_cpu=current_platform.is_cpu(), num_ranks=num_ranks)
    chosen["PYTHONWARNINGS"] = "ignore"  # as `quiet`, in the processes started
    changes = {name: text for name, text in chosen.items() if name not in os.environ}
    # Whether the engine has a process of its own was decided before.
    changes[_MULTIPROCESSING] = "0"
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _check_options(options: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in options:
        if name in _OURS:
            raise ConfigError(
                f"{name} is set by EmbeddedEngine itself; leave it out of the options"
            )
        if name not in known:
            near = difflib.get_close_matches(name, [*known, "store", "config"], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{name!r} is no option of EmbeddedEngine or of vLLM's EngineArgs{hint}"
            )
