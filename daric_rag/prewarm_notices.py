"""What a job says beside its results: lines for people, or JSON lines for a log."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

__all__ = ["log", "notice"]


def notice(event: str, message: str, **values: Any) -> None:
    """Tell of something on standard error, as a log of JSON lines where it is one.

    May be called from a signal's handler.

    Args:
        event: Names it, for programs.
        message: For people.
        values: What programs get in its place; the message itself if there are none.
    """
    if sys.stderr is not None and sys.stderr.isatty():
        _write(message)
    else:
        log(event, **(values or {"message": message}))


def log(event: str, **values: Any) -> None:
    """Write a line of JSON to standard error."""
    _write(json.dumps({"event": event, **values}))


def _write(line: str) -> None:
    if sys.stderr is None:
        return  # The process was started without.
    # A job does not end because nobody reads its log any more.
    with suppress(OSError):
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except RuntimeError:
            # A signal came in the middle of a write, and buffers take no other then.
            os.write(2, (line + "\n").encode(errors="replace"))
