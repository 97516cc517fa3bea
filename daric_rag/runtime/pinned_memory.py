"""Page-locked host memory, from which a GPU copies by itself and at full speed."""

from __future__ import annotations

import logging

import numpy as np
import torch

from daric_rag.storage.arena import Arena

__all__ = ["pin_arena"]

logger = logging.getLogger(__name__)


def pin_arena(arena: Arena, device: torch.device) -> bool:
    """Lock the host tier's arena for copies to a CUDA device.

    Returns:
        Whether it was; nothing else happens on other devices. If the system refuses,
        copies take a detour and everything else stays as it is.
    """
    if device.type != "cuda":
        return False
    address = np.frombuffer(arena.buffer, dtype=np.uint8).ctypes.data
    # The flag: locked for every device of the process.
    error = torch.cuda.cudart().cudaHostRegister(address, arena.capacity_bytes, 1)
    if int(error) != 0:
        logger.warning(
            "the host tier's memory could not be page-locked (CUDA error %s), so loads "
            "are slower: raise the limit (ulimit -l) or lower host_bytes",
            int(error),
        )
        return False
    # The GPU's mapping is of these very pages; the kernel must not take them back.
    arena.keep_pages()
    return True
