"""What SIGINT and SIGTERM do to a job: it ends in order, or the second time at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import BinaryIO, Protocol, cast

from daric_rag.prewarm_notices import notice

__all__ = ["INTERRUPTED", "Stop"]

INTERRUPTED = 130
"""Exit code, as shells have it for SIGINT."""


class _Job(Protocol):
    def stop(self) -> None:
        """See `daric_rag.prewarm.PrewarmJob`."""
        ...


class Stop:
    """Has the first signal stop a job in order, and the second one at once.

    Attributes:
        event: Set by the first one.
    """

    def __init__(self) -> None:
        """Know of no job and no signal."""
        self.event = Event()
        self._job: _Job | None = None
        self._is_reading = False

    @contextmanager
    def takes_signals(self) -> Iterator[None]:
        """Handle signals meanwhile. For the main thread."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def stdin(self) -> BinaryIO | None:
        """Standard input, which ends when a signal comes; None if there is none."""
        if sys.stdin is None:
            return None
        return cast(BinaryIO, _EndingInput(sys.stdin.buffer, self))

    def attach(self, job: _Job) -> None:
        """Say which job is to be stopped."""
        self._job = job
        if self.event.is_set():
            job.stop()

    def read_line(self, stream: BinaryIO, limit: int) -> bytes:
        """Return a line, or b"" at its end or once a signal has come."""
        with suppress(_ReadingEndedError):
            self._is_reading = True
            try:
                return b"" if self.event.is_set() else stream.readline(limit)
            finally:
                self._is_reading = False
        return b""

    def _handle(self, *_: object) -> None:
        if self.event.is_set():
            # As after kill -9: the next run looks up what it does not know.
            os._exit(INTERRUPTED)
        self.event.set()
        if self._job is not None:
            self._job.stop()
        notice(
            "interrupted",
            "finishing the batches under way; interrupt again to stop at once",
        )
        if self._is_reading:
            # Or Python would go on waiting for whoever writes to standard input.
            raise _ReadingEndedError


class _ReadingEndedError(Exception):
    """Ends a read from the signal's handler."""


class _EndingInput:
    """The part of a stream that JSON Lines are read from."""

    def __init__(self, stream: BinaryIO, stop: Stop) -> None:
        self._stream, self._stop = stream, stop

    def readline(self, limit: int = -1, /) -> bytes:
        return self._stop.read_line(self._stream, limit)
