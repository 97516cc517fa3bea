"""What commands share on a terminal: bars, a quiet engine, JSON on standard output."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["Bar", "json_has_stdout", "progress_bar", "quiet_libraries"]

# Read by torch, transformers and vLLM when they are imported.
_QUIET = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Bar:
    """One bar that says what is being done; nothing where there is no terminal."""

    def __init__(self, progress: Progress, text: str) -> None:
        """Show a bar of unknown length."""
        self._progress = progress
        self._task = progress.add_task(text, total=None)
        self._running = False
        self.console = progress.console

    def expect(self, num_steps: int) -> None:
        """Set how many steps there will be."""
        self._progress.update(self._task, total=num_steps, completed=0)

    def step(self, text: str) -> None:
        """Begin the next step; the ones before it are done."""
        self._progress.update(self._task, description=text, advance=int(self._running))
        self._running = True


@contextmanager
def progress_bar(console: Console, text: str) -> Iterator[Bar]:
    """Yield a bar; print to its `console` meanwhile, which goes above it."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield Bar(progress, text)


def quiet_libraries(*, verbose: bool = False) -> None:
    """Keep torch's, transformers' and vLLM's chatter away; errors still show.

    Call it before they are imported. What the user has set in the environment stays.

    Args:
        verbose: Let vLLM's chatter through instead.
    """
    if verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    # What vLLM says before it has read its own setting.
    logging.getLogger("vllm").setLevel(logging.ERROR)


@contextmanager
def json_has_stdout(wanted: bool) -> Iterator[None]:
    """Send what libraries print to standard output to standard error meanwhile.

    Below Python's level too, where vLLM's operators print. Does nothing unless wanted.
    """
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
