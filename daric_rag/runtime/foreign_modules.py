"""Modules of other packages that vLLM stumbles over while it starts."""

from __future__ import annotations

import sys

__all__ = ["settle_llvmlite"]


def settle_llvmlite() -> None:
    """Give llvmlite's library object an attribute dictionary; harmless without it.

    vLLM's CPU platform looks for its kernels in the ``__dict__`` of everything that
    any loaded module names. llvmlite's object answers every name with a C function,
    ``__dict__`` too, so that an engine did not start where numba had been imported
    (numba users such as BM25 libraries do that).
    """
    library = getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None)
    functions = getattr(library, "_fntab", None)
    if isinstance(functions, dict):
        functions["__dict__"] = {}
