"""What any vLLM that serves daric_rag is started with, in this process or as a server.

Standard library only: whoever prints a server's command needs no vLLM for it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from daric_rag.config import DaricConfig

__all__ = [
    "CONFIG_KEY",
    "FIXED_OPTIONS",
    "MIDDLEWARE",
    "STORE_KEY",
    "cpu_binding",
    "default_options",
    "environment",
    "has_fast_bfloat16",
    "transfer_fields",
]

CONFIG_KEY = "daric_config"
STORE_KEY = "daric_store"

MIDDLEWARE = "daric_rag.runtime.server_middleware.DaricMiddleware"
"""What a server's ``--middleware`` names, so that clients hear of reuse."""

# Another value would switch off what this package is for.
FIXED_OPTIONS: dict[str, Any] = {
    "worker_cls": "daric_rag.runtime.worker.DaricWorker",
    "async_scheduling": False,
}
"""Fields of vLLM's ``EngineArgs`` that nobody may change."""

_CONNECTOR = "DaricConnector"
_CONNECTOR_MODULE = "daric_rag.runtime.connector"

_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

_MAX_BATCHED_TOKENS = 8192
_CPU_BLOCK_SIZE = 32
_CPUINFO = Path("/proc/cpuinfo")
_MAX_NUM_SEQS = 128


def default_options(*, on_cpu: bool) -> dict[str, Any]:
    """Return fields of vLLM's ``EngineArgs`` that a caller may overrule."""
    options: dict[str, Any] = {
        "enforce_eager": on_cpu,
        "max_num_seqs": _MAX_NUM_SEQS,
        "max_num_batched_tokens": _MAX_BATCHED_TOKENS,
    }
    if on_cpu:
        options["block_size"] = _CPU_BLOCK_SIZE
        if not has_fast_bfloat16():
            options["dtype"] = "float32"
    return options


def has_fast_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether this machine's CPU computes in bfloat16 no slower than in float32.

    Without AVX-512, x86 processors do it element by element: a prefill of 2,604 tokens
    of a 135M model took 39 s, and 10 s in float32. Others are taken to be fast.

    Args:
        cpuinfo: The kernel's description of the CPU.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True
    flags = next((line.split() for line in lines if line.startswith("flags")), None)
    return flags is None or "avx512f" in flags


def transfer_fields(store: str | None, config: DaricConfig) -> dict[str, Any]:
    """Return vLLM's ``kv_transfer_config``, which makes it load our connector.

    Args:
        store: See `daric_rag.storage.open_store`.
        config: Of daric_rag.
    """
    default = DaricConfig().to_dict()
    ours = {k: v for k, v in config.to_dict().items() if v != default[k]}
    return {
        "kv_connector": _CONNECTOR,
        "kv_connector_module_path": _CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {STORE_KEY: store, CONFIG_KEY: ours},
    }


def environment(*, on_cpu: bool, num_ranks: int) -> dict[str, str]:
    """Return the variables that vLLM and its processes must start with.

    Args:
        on_cpu: Whether the model runs on the CPU.
        num_ranks: Of a tensor-parallel model.
    """
    variables = {_MODEL_RUNNER: "0"}
    if on_cpu and num_ranks == 1:
        # vLLM would insist on a worker process even for a single rank, which on few
        # cores spins against the others.
        variables[_MULTIPROCESSING] = "0"
    elif on_cpu:
        variables[_BINDING] = cpu_binding(num_ranks)
    return variables


def cpu_binding(num_ranks: int) -> str:
    """Return which CPUs each rank computes on, as vLLM wants it written.

    vLLM's own choice takes one NUMA node per rank and refuses to start with fewer.
    """
    cpus = sorted(os.sched_getaffinity(0))
    share = len(cpus) // num_ranks
    if share == 0:
        return "nobind"
    return "|".join(
        ",".join(map(str, cpus[rank * share : (rank + 1) * share]))
        for rank in range(num_ranks)
    )
