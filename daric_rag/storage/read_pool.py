"""Threads that read."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ReadPool", "num_usable_cores"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ReadPool:
    """Runs a function over items in a few threads, started when first needed.

    Reading a file and hashing release the GIL, so records read side by side.

    Args:
        num_threads: Threads; by default one per usable core, four at most.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or min(4, num_usable_cores())
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def map(
        self, function: Callable[[_Item], _Result], items: Sequence[_Item]
    ) -> list[_Result]:
        """Apply `function`, in the calling thread where threads bring nothing."""
        if len(items) < 2 or self._num_threads < 2:
            return [function(item) for item in items]
        try:
            futures = self._submit(function, items)
        except RuntimeError:
            # Closed meanwhile by another thread, or no thread can be started.
            return [function(item) for item in items]
        return [future.result() for future in futures]

    def _submit(
        self, function: Callable[[_Item], _Result], items: Sequence[_Item]
    ) -> list[Future[_Result]]:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(
                    self._num_threads, thread_name_prefix="daric-read"
                )
            executor = self._executor
        return [executor.submit(function, item) for item in items]

    def close(self) -> None:
        """End the threads; a later `map` starts them anew."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()


def num_usable_cores() -> int:
    """Cores that this process may run on, which a container may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
