"""What ``daric prewarm run --watch`` does: a job at once, and whenever files change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from daric_rag.errors import ConfigError, DaricError, EngineError
from daric_rag.prewarm_notices import notice
from daric_rag.prewarm_run import Outcome, opened_engine, run_on, tell_ignored
from daric_rag.prewarm_settings import Settings
from daric_rag.prewarm_signals import Stop

if TYPE_CHECKING:
    from daric_rag.prewarm import JobReport, PathSource

__all__ = ["watch_and_run"]

_STEP_MS = 500

_Place = tuple[int, int] | None


def watch_and_run(settings: Settings, *, as_json: bool) -> JobReport:
    """Run a job, and again whenever a source has changed, until interrupted.

    Returns:
        How the last run ended.

    Raises:
        DaricError: The first or the last run failed, or the engine did for good.
    """
    if "-" in settings.sources:
        raise ConfigError("standard input cannot be watched: name files or folders")
    source, stop = settings.source(), Stop()
    tell_ignored(source)
    with stop.takes_signals(), ExitStack() as engines:
        watcher = _Watcher(settings, stop, engines, as_json=as_json)
        watcher.run(source)
    if watcher.error is not None:
        raise watcher.error
    if watcher.outcome is None:
        from daric_rag import prewarm

        return prewarm.JobReport(prewarm.Totals(), "stopped")
    watcher.outcome.tell(as_json=as_json)
    return watcher.outcome.report


class _Watcher:
    """Runs a job over and over on one engine.

    Attributes:
        outcome: Of the last run that did not fail.
        error: Why the last run failed, if it did.
    """

    def __init__(
        self, settings: Settings, stop: Stop, engines: ExitStack, *, as_json: bool
    ) -> None:
        """Open nothing yet; what is opened is closed by `engines`."""
        self._settings, self._stop, self._as_json = settings, stop, as_json
        self._engines, self._engine = engines, None
        self._has_evicted = Event()
        # As they are now: what is gone later is looked for where it was.
        self._roots = settings.watched_folders()
        self._linked: list[Path] = []
        self.outcome: Outcome | None = None
        self.error: DaricError | None = None

    def run(self, source: PathSource) -> None:
        """Go on until interrupted.

        Args:
            source: As it is now.
        """
        self._source = source
        while True:
            self._linked = sorted(self._source.linked)
            if self._stop.event.is_set():
                return
            places, changes = self._places(), self._changes()
            # From now on nothing is missed, what changes during a run included.
            next(changes, None)
            self._run_once()
            for changed in changes:
                if changed:
                    self._run_once()
                # A new link leads to where nobody looks, as does a new folder in the
                # place of one that is gone.
                if sorted(self._source.linked) != self._linked:
                    break
                if any(now not in (None, then) for now, then in self._moves(places)):
                    break
            else:
                return  # Interrupted.

    def _places(self) -> list[_Place]:
        """Return which folders are watched; None for one that is gone."""
        return [_place_of(path) for path in (*self._roots, *self._linked)]

    def _moves(self, places: list[_Place]) -> Iterator[tuple[_Place, _Place]]:
        """Yield what is at every place now, and what was."""
        return zip(self._places(), places, strict=True)

    def _changes(self) -> Iterator[Any]:
        try:
            from watchfiles import watch
        except ImportError as error:
            raise ConfigError(
                "--watch needs watchfiles: pip install 'daric-rag[prewarm]'"
            ) from error
        is_change = self._settings.change_filter(self._linked)
        return watch(
            *filter(Path.exists, (*self._roots, *self._linked)),
            watch_filter=lambda _, path: is_change(path),
            stop_event=self._stop.event,
            rust_timeout=_STEP_MS,
            yield_on_timeout=True,
        )

    def _run_once(self) -> None:
        settings = self._settings
        try:
            self._source = settings.source()
            outcome = run_on(
                self._opened(), settings, self._source, self._stop, self._has_evicted
            )
        except DaricError as error:
            is_lost = isinstance(error, EngineError) and settings.url is None
            if self.outcome is None or is_lost:
                raise
            # A folder may be gone for a moment: the next change tries again.
            self.error = error
            notice("error", f"error: {error}")
        else:
            self.outcome, self.error = outcome, None
            notice("run", "\n".join(outcome.lines), **outcome.values)

    def _opened(self) -> Any:
        if self._has_evicted.is_set() and self._settings.url is None:
            # What was evicted on disk is in this engine's memory still: should it come
            # back, the engine would call it stored.
            self._engines.close()
            self._engine = None
        self._has_evicted.clear()
        if self._engine is None:
            self._engine = self._engines.enter_context(
                opened_engine(
                    self._settings, self._settings.store, as_json=self._as_json
                )
            )
        return self._engine


def _place_of(path: Path) -> _Place:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
