"""Page-locked host memory, from which a GPU copies by itself and at full speed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from daric_rag.storage.arena import Arena

__all__ = ["pin_arena"]

logger = logging.getLogger(__name__)

_PORTABLE = 1  # locked for every device of the process


def pin_arena(arena: Arena, device: torch.device) -> Callable[[], object]:
    """Lock the host tier's arena for copies to a CUDA device.

    Nothing happens for other devices. If the system refuses, copies take a detour and
    everything else stays as it is.

    Returns:
        What to call before the store is closed.
    """
    if device.type != "cuda":
        return _nothing
    address = np.frombuffer(arena.buffer, dtype=np.uint8).ctypes.data
    cuda = torch.cuda.cudart()
    error = int(cuda.cudaHostRegister(address, arena.capacity_bytes, _PORTABLE))
    if error:
        # CUDA tells whoever asks next, which would be some kernel of the model.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
        logger.warning(
            "the host tier's memory could not be page-locked (CUDA error %s), so loads "
            "are slower: raise the limit (ulimit -l) or lower host_bytes",
            error,
        )
        return _nothing
    # The GPU's mapping is of these very pages; the kernel must not take them back.
    arena.keep_pages()
    return partial(cuda.cudaHostUnregister, address)


def _nothing() -> None:
    pass
