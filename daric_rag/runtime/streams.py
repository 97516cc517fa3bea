"""The order of work on a GPU, behind a seam that tests can watch.

Work on one stream runs in the order of its submission, and beside other streams'. What
must come after another stream's work waits for an event recorded there. The host waits
for nothing of this unless it asks to.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CudaStreams", "Event", "Streams"]


class Event(Protocol):
    """A point in a stream's work; `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Mark the end of what was submitted to the current stream so far."""
        ...

    def wait(self) -> None:
        """Let whatever is submitted to the current stream from now on come after it."""
        ...

    def query(self) -> bool:
        """Whether the work before it is done."""
        ...

    def synchronize(self) -> None:
        """Return when the work before it is done."""
        ...


class Streams(Protocol):
    """Worker process, one thread. The current stream is the engine's own.

    Memory allocated inside `loading` or `saving` may be used there only: it is given to
    the next who asks on that stream as soon as its tensor is gone, whatever other
    streams still do.
    """

    def loading(self) -> AbstractContextManager[object]:
        """Make the stream for loads the current one."""
        ...

    def saving(self) -> AbstractContextManager[object]:
        """Make the stream for saves the current one."""
        ...

    def event(self) -> Event:
        """Return a new event, to be recorded."""
        ...

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a small tensor to the device, on the current stream."""
        ...

    def is_locked(self, tensor: Tensor) -> bool:
        """Whether the device copies from and to a host tensor without the host."""
        ...


class CudaStreams:
    """Two streams of a CUDA device beside the engine's. See `Streams`."""

    def __init__(self, device: torch.device) -> None:
        """Create the streams."""
        self._device = device
        self._load = torch.cuda.Stream(device)
        self._save = torch.cuda.Stream(device)

    def loading(self) -> AbstractContextManager[object]:
        """See `Streams.loading`."""
        return torch.cuda.stream(self._load)

    def saving(self) -> AbstractContextManager[object]:
        """See `Streams.saving`."""
        return torch.cuda.stream(self._save)

    def event(self) -> Event:
        """See `Streams.event`."""
        return torch.cuda.Event()

    def upload(self, tensor: Tensor) -> Tensor:
        """See `Streams.upload`."""
        # From pageable memory the host would wait for all that the stream has to do.
        # torch keeps the locked copy until it has been read.
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def is_locked(self, tensor: Tensor) -> bool:
        """See `Streams.is_locked`."""
        return tensor.is_pinned()
