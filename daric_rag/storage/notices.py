"""Warnings that do not flood the log: each kind at most once in a while."""

import logging
import threading
import time
from typing import Final

__all__ = ["Notices"]

_INTERVAL_S: Final = 60.0


class Notices:
    """Logs the first warning of a kind, and then how many there were meanwhile.

    Args:
        logger: Where to.
        interval_s: Seconds for which a kind stays silent after it was logged.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = _INTERVAL_S) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._lock = threading.Lock()
        # By kind: when it was logged, and how often it came since.
        self._logged: dict[str, tuple[float, int]] = {}

    def warn(self, kind: str, message: str, *args: object) -> None:
        """Log a warning unless one of its kind was logged a short while ago."""
        now = time.monotonic()
        with self._lock:
            logged_at, num_silent = self._logged.get(kind, (None, 0))
            if logged_at is not None and now - logged_at < self._interval_s:
                self._logged[kind] = (logged_at, num_silent + 1)
                return
            self._logged[kind] = (now, 0)
        if num_silent:
            message += f" (and {num_silent} more like this)"
        self._logger.warning(message, *args)
