"""The thread that writes behind."""

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from daric_rag.errors import StoreError
from daric_rag.storage.base import Record

_logger = logging.getLogger(__name__)

# A write of a segment takes about 10 ms, and a read of a request's documents as long:
# reads seldom need so much, and saves go on at ten a second if they do.
_MAX_YIELD_S: Final = 0.1

_IDLE_INTERVAL_S: Final = 5.0


_live: "weakref.WeakSet[WriteBehind]" = weakref.WeakSet()


def _abandon_all() -> None:
    for writer in list(_live):
        writer.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class WriteBehind:
    """Writes records in one daemon thread, in the order they were submitted.

    Loads come before saves: while a read is in progress no write is started, unless
    the queue is half full, somebody waits for it, or the reads have gone on for long.

    Args:
        write: Called in the thread for each record. What it raises is logged and
            counted, and the thread goes on.
        max_pending_bytes: Bytes of records that may wait. One record alone may
            exceed it.
        on_exit: Called in the thread as it ends, to close what `write` opened
            there.
        hold: Called with a key as it enters the queue.
        release: Called with a key as it leaves the queue.
        on_idle: Called in the thread whenever nothing was queued for so long.
        idle_interval_s: Seconds.
        max_yield_s: Seconds that reads may keep a record from being written.
    """

    def __init__(
        self,
        write: Callable[[Record], None],
        *,
        max_pending_bytes: int,
        on_exit: Callable[[], None],
        hold: Callable[[list[bytes]], None],
        release: Callable[[list[bytes]], None],
        on_idle: Callable[[], None] = lambda: None,
        idle_interval_s: float = _IDLE_INTERVAL_S,
        max_yield_s: float = _MAX_YIELD_S,
    ) -> None:
        self._write, self._on_exit, self._on_idle = write, on_exit, on_idle
        self._idle_interval_s = idle_interval_s
        self._hold, self._release = hold, release
        self._max_pending_bytes, self._max_yield_s = max_pending_bytes, max_yield_s
        # Oldest first; a record stays in here until its write has ended, so that
        # whoever looks for it finds it here or on disk at every moment.
        self._pending: OrderedDict[bytes, Record] = OrderedDict()
        self._pending_bytes = 0
        self._writing: bytes | None = None
        self._failures = self._num_reads = self._num_waiters = 0
        self._closing = self._congested = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._is_abandoned = False
        _live.add(self)

    @property
    def failures(self) -> int:
        """Writes that raised."""
        return self._failures

    def queued(self) -> tuple[int, int]:
        """Records and bytes that wait or are being written."""
        with self._changed:
            return len(self._pending), self._pending_bytes

    def start(self) -> None:
        """Start the thread before anything is queued, for what it does when idle."""
        if self._thread is None and not self._is_abandoned:
            # Where no thread can be started, nothing is to fail that needs none.
            with self._changed, suppress(RuntimeError):
                if not self._closing:
                    self._start()

    def submit(self, record: Record, *, timeout_s: float | None) -> bool:
        """Queue a record; returns False if the queue stayed full for `timeout_s`.

        A key that is queued already is not queued twice: equal keys are equal bytes.

        Args:
            record: To be written.
            timeout_s: Seconds; None waits as long as it takes.

        Raises:
            StoreError: After `close`.
        """
        with self._changed:
            if self._closing:
                raise StoreError("the store is closed: open it again to write")
            if self._is_abandoned:
                return False
            if record.key in self._pending:
                return True
            # Once somebody has waited in vain, nobody does until there is room again:
            # a request of a hundred segments must not pay for a slow disk each time.
            if self._congested and timeout_s is not None:
                timeout_s = 0.0
            if not self._changed.wait_for(
                lambda: self._has_room_for(record), timeout=timeout_s
            ):
                self._congested = True
                return False
            self._congested = False
            self._enqueue(record)
            return True

    def find(self, key: bytes) -> Record | None:
        """Return a record that is queued or being written."""
        with self._changed:
            return self._pending.get(key)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep writes from starting meanwhile, within the limits of the class."""
        with self._changed:
            self._num_reads += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_reads -= 1
                self._changed.notify_all()

    def cancel(self, key: bytes) -> None:
        """Take a record out of the queue, waiting for it if it is being written."""
        with self._changed:
            self._changed.wait_for(lambda: self._writing != key)
            self._drop(key)
            self._changed.notify_all()

    def wait_for(self, key: bytes) -> None:
        """Return when a record is not queued, or no longer."""
        self._wait(lambda: key not in self._pending)

    def flush(self) -> None:
        """Return when the queue is empty and the last write has ended."""
        self._wait(lambda: not self._pending)

    def close(self) -> None:
        """Write what is queued, then end the thread. Harmless when repeated."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        # A garbage collection inside the thread itself may end up here.
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def abandon(self) -> None:
        """In a forked child: the thread is gone, and what is queued is the parent's.

        Nothing is written from here; whatever would wait for it returns at once.
        """
        self._changed = threading.Condition()  # the old one may be held for ever
        self._pending, self._pending_bytes = OrderedDict(), 0
        self._thread = self._writing = None
        self._is_abandoned = True

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._changed:
            self._num_waiters += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(is_over)
            finally:
                self._num_waiters -= 1

    def _has_room_for(self, record: Record) -> bool:
        total = self._pending_bytes + record.record_bytes
        return not self._pending or total <= self._max_pending_bytes

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(
                target=self._run, name="daric-write-behind", daemon=True
            )
            thread.start()
            self._thread = thread

    def _enqueue(self, record: Record) -> None:
        self._start()  # First: where none can be started, nothing must wait for one.
        self._hold([record.key])
        self._pending[record.key] = record
        self._pending_bytes += record.record_bytes
        self._changed.notify_all()

    def _drop(self, key: bytes) -> None:
        record = self._pending.pop(key, None)
        if record is not None:
            self._pending_bytes -= record.record_bytes
            self._release([key])

    def _run(self) -> None:
        try:
            while not self._is_over():
                record = self._next()
                if record is None:
                    self._idle()
                    continue
                try:
                    self._write(record)
                except Exception:
                    self._failures += 1
                    _logger.exception("a record was not written to disk")
                with self._changed:
                    self._writing = None
                    self._drop(record.key)
                    self._changed.notify_all()
                # Else this frame would keep the last record's buffer in use.
                del record
        finally:
            self._on_exit()

    def _idle(self) -> None:
        try:
            self._on_idle()
        except Exception:
            _logger.exception("the store's idle work failed")

    def _is_over(self) -> bool:
        with self._changed:
            return self._closing and not self._pending

    def _next(self) -> Record | None:
        """Wait for a record to write; None if it is time for idle work."""
        with self._changed:
            while self._changed.wait_for(
                lambda: self._pending or self._closing, timeout=self._idle_interval_s
            ):
                if self._pending:
                    self._changed.wait_for(self._may_start, timeout=self._max_yield_s)
                if self._pending:  # `cancel` may have emptied the queue meanwhile
                    self._writing, record = next(iter(self._pending.items()))
                    return record
                if self._closing:
                    return None
            return None

    def _may_start(self) -> bool:
        return (
            self._num_reads == 0
            or self._num_waiters > 0
            or self._closing
            or 2 * self._pending_bytes > self._max_pending_bytes
        )
