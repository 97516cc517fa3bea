"""What the gate remembers: for which model, on which software, it was passed.

One small file per case in the user's cache folder. Only success is kept, and nothing
depends on the files: without them, or with damaged ones, the check is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from daric_rag.models import cache_folder
from daric_rag.runtime.vllm_api import check_version

__all__ = ["GATE_REVISION", "GateRecord", "gate_facts", "gate_folder"]

GATE_REVISION = 1
"""Raise it when `gate` or `model_gate` check more, or more strictly."""

logger = logging.getLogger(__name__)


def gate_folder() -> Path:
    """Return the folder of the records; it may not exist yet.

    Raises:
        RuntimeError: The user has no home folder.
    """
    return cache_folder().with_name("gate")


def gate_facts(
    fingerprint: bytes, layers: Sequence[Tensor], kernel: str
) -> dict[str, str | int]:
    """Return what the gate's result depends on, for its `GateRecord`.

    Args:
        fingerprint: Of the model, this rank's.
        layers: The KV cache.
        kernel: Name of the attention kernel.
    """
    device = layers[0].device
    return {
        "fingerprint": fingerprint.hex(),
        "vllm": check_version(),
        "torch": torch.__version__,
        "revision": GATE_REVISION,
        "block_size": layers[0].shape[2],
        "kernel": kernel,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} {torch.backends.cpu.get_cpu_capability()}",
    }


class GateRecord:
    """Worker process. One case: the model, and whatever else a result depends on.

    Args:
        facts: By name; the order does not matter.
        folder: Where records lie; by default `gate_folder`.
    """

    def __init__(
        self, facts: Mapping[str, str | int], folder: Path | None = None
    ) -> None:
        """Touch no file yet."""
        self._content = json.dumps(dict(facts), indent=1, sort_keys=True).encode()
        self._folder = folder

    def has_passed(self) -> bool:
        """Whether exactly this case has passed; False too if that cannot be read."""
        try:
            return self._path.read_bytes() == self._content
        except (OSError, RuntimeError):
            return False

    def remember(self) -> None:
        """Keep that this case has passed; failing to costs the next start a check."""
        try:
            folder = self._path.parent
            folder.mkdir(parents=True, exist_ok=True)
            handle, scratch = tempfile.mkstemp(dir=folder, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(self._content)
                Path(scratch).replace(self._path)
            except OSError:
                Path(scratch).unlink()
                raise
        except (OSError, RuntimeError) as error:
            logger.debug("the gate's result is not kept: %s", error)

    @property
    def _path(self) -> Path:
        name = hashlib.blake2b(self._content, digest_size=16).hexdigest()
        return (self._folder or gate_folder()) / f"{name}.json"
