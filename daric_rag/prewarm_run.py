"""What ``daric prewarm run`` does: opens an engine, runs a job, tells of it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, cast

import typer

from daric_rag.cli_common import make_console, resolved
from daric_rag.errors import ConfigError
from daric_rag.prewarm_notices import notice
from daric_rag.prewarm_settings import Settings
from daric_rag.prewarm_signals import INTERRUPTED, Stop
from daric_rag.store_options import opened, print_json

if TYPE_CHECKING:
    from daric_rag.prewarm import Entry, JobReport, PathSource

__all__ = [
    "Outcome",
    "dry_run_of",
    "exit_code_of",
    "open_engine",
    "opened_engine",
    "run_job",
    "run_on",
    "tell_ignored",
]

_FAILED, _NO_ROOM = 3, 4
_MOST_KINDS = 10


def exit_code_of(report: JobReport) -> int:
    """Return the exit code that tells how a job ended."""
    if report.stopped == "stopped":
        return INTERRUPTED
    if report.stopped in ("budget", "store"):
        return _NO_ROOM
    unread = report.stopped == "unreadable"
    return _FAILED if unread or report.totals.failed else 0


def run_job(settings: Settings, *, as_json: bool) -> JobReport:
    """Run a job once, and tell how it ended."""
    stop = Stop()
    source = settings.source(stop.stdin)
    tell_ignored(source)
    with stop.takes_signals():
        with opened_engine(settings, settings.store, as_json=as_json) as engine:
            outcome = run_on(engine, settings, source, stop)
        outcome.tell(as_json=as_json)
    return outcome.report


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, for people and for programs."""

    report: JobReport
    lines: list[str]
    values: dict[str, Any]

    def tell(self, *, as_json: bool) -> None:
        """Print it to standard output, once the engine is closed."""
        if as_json:
            print_json(self.values)
        else:
            typer.echo("\n".join(self.lines))


def dry_run_of(settings: Settings, *, as_json: bool) -> int:
    """Tell what a job would take; the store is looked at and not changed.

    Returns:
        How many documents could not be stored.
    """
    from daric_rag.evaluation.prewarm_view import plan_json, plan_lines
    from daric_rag.evaluation.terminal import progress_bar
    from daric_rag.prewarm import Shard
    from daric_rag.prewarm.planning import calibrate, make_plan
    from daric_rag.prompt import PromptBuilder

    source = settings.source()
    tell_ignored(source)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="daric-"))
        engine = stack.enter_context(opened_engine(settings, folder, as_json=as_json))
        cached, room = _held(engine, settings)
        bar = stack.enter_context(progress_bar(make_console(stderr=True), "counting"))
        plan = make_plan(
            source,
            engine,
            builder=PromptBuilder(document_template=settings.template),
            shard=Shard.parse(settings.shard),
            is_cached=lambda name: name.hex() in cached,
            on_item=lambda: bar.step("counting"),
        )
        measured = None
        if settings.url is None:
            # A server's store is its own, and would keep the sample.
            bar.step("measuring")
            measured = calibrate(engine, plan.sample, lambda: _flushed_bytes(engine))
    if as_json:
        print_json(plan_json(plan, measured, room))
    else:
        typer.echo("\n".join(plan_lines(plan, measured, room)))
    return plan.num_refused


def run_on(
    engine: Any,
    settings: Settings,
    source: PathSource,
    stop: Stop,
    has_evicted: Event | None = None,
) -> Outcome:
    """Run a job on an open engine.

    Args:
        engine: Stays open.
        settings: Of the job.
        source: Its documents.
        stop: Ends it.
        has_evicted: Set where documents are evicted that the engine may have in memory.

    Raises:
        DaricError: As `PrewarmJob.run`; and where a source is empty that was not.
    """
    from daric_rag.evaluation.prewarm_view import shown_progress
    from daric_rag.prewarm import PrewarmJob
    from daric_rag.prompt import PromptBuilder

    start = time.monotonic()
    with shown_progress(make_console(stderr=True), source.num_bytes) as on_entry:
        job = PrewarmJob(
            engine,
            source,
            builder=PromptBuilder(document_template=settings.template),
            manifest=settings.manifest,
            options=settings.job_options(),
            on_entry=on_entry,
        )
        if settings.sync is not None:

            def give_up(entries: Sequence[Entry]) -> None:
                if has_evicted is not None and entries and settings.sync == "evict":
                    has_evicted.set()
                _give_up(settings, job.header, entries)

            job.on_vanished = give_up
        _check_template(settings, job.template)
        _check_models(settings, job.header)
        stop.attach(job)
        report = job.run()
    if report.stopped == "empty":
        raise ConfigError(
            "the sources have no document at all, and --sync would have given up "
            "everything: see that they are there; `daric store evict` removes all"
        )
    if settings.pin:
        _pin(settings, job.header)
    return _outcome_of(report, settings, job.template, time.monotonic() - start)


def _outcome_of(
    report: JobReport, settings: Settings, template: str, elapsed_s: float
) -> Outcome:
    from daric_rag.evaluation.prewarm_view import report_json, report_lines

    limit = settings.limit_bytes if settings.url is None else None
    named = {"template": template, "manifest": str(settings.manifest)}
    lines = [
        *report_lines(report, elapsed_s, limit),
        f"document template {template[:12]}, manifest {settings.manifest}",
    ]
    return Outcome(report, lines, report_json(report, elapsed_s, **named))


def tell_ignored(source: PathSource) -> None:
    """Say which files of folders are no documents, so that nobody misses them later."""
    kinds = source.num_ignored.most_common(_MOST_KINDS)
    if kinds:
        named = ", ".join(f"{number} {kind or 'without'}" for kind, number in kinds)
        if len(source.num_ignored) > len(kinds):
            named += ", and others"
        notice(
            "ignored",
            f"files of other suffixes are left out: {named}; name one itself to read "
            f"it as text",
        )


@contextmanager
def opened_engine(
    settings: Settings, store: str | None, *, as_json: bool
) -> Iterator[Any]:
    """Yield the engine, embedded or remote; standard output stays clean for JSON."""
    from daric_rag.evaluation.terminal import (
        json_has_stdout,
        progress_bar,
        quiet_libraries,
    )

    quiet_libraries(verbose=settings.verbose)
    with json_has_stdout(as_json):
        with progress_bar(make_console(stderr=True), "starting vLLM"):
            engine = open_engine(settings, store)
        with closing(engine):
            yield engine


def open_engine(settings: Settings, store: str | None) -> Any:
    """Return the engine that the settings name; a remote one has its own store."""
    if settings.url is not None:
        from daric_rag.runtime.remote import RemoteEngine

        return RemoteEngine(
            settings.url, api_key=settings.api_key, config=settings.config()
        )
    from daric_rag.runtime.embedded import EmbeddedEngine

    assert settings.model is not None
    return EmbeddedEngine(
        resolved(settings.model),
        store=store,
        config=settings.config(),
        **settings.vllm_options(),
    )


def _check_template(settings: Settings, template: str) -> None:
    """Warn where a store was warmed with another template, and remember this one."""
    if not settings.sees_store:
        return
    from daric_rag.prewarm.templates import note_template, other_templates

    folder = settings.store_folder()
    others = other_templates(folder, template)
    if others:
        named = ", ".join(name[:12] for name in others)
        notice(
            "warning",
            f"warning: this store was warmed with another document template ({named}; "
            f"now {template[:12]}): prompts find only documents of their own template",
        )
    note_template(folder, template, settings.template)


def _check_models(settings: Settings, header: Mapping[str, Any]) -> None:
    """Refuse, before any work, to touch documents of models that were not meant."""
    wanted = settings.sync is not None or settings.pin
    if not wanted or header["fingerprints"]:
        return
    if not Path(settings.store_folder()).is_dir():
        return
    from daric_rag.prewarm.audit import check_models

    with opened(settings.store, settings.key_file) as (disk, _):
        check_models(disk, header)


def _give_up(
    settings: Settings, header: Mapping[str, Any], entries: Sequence[Entry]
) -> None:
    from daric_rag.prewarm.refresh import give_up

    how = cast(Literal["evict", "unpin"], settings.sync)
    with opened(settings.store, settings.key_file, writes=True) as (disk, _):
        give_up(disk, dict(header), entries, how)


def _pin(settings: Settings, header: Mapping[str, Any]) -> None:
    from daric_rag.prewarm.manifest import Manifest
    from daric_rag.prewarm.refresh import pin_all

    with opened(settings.store, settings.key_file, writes=True) as (disk, _):
        pin_all(disk, Manifest(settings.manifest), dict(header))


def _held(engine: Any, settings: Settings) -> tuple[set[str], int | None]:
    """Return the hashes of the documents that are stored, and the room left."""
    from daric_rag.prewarm.audit import StoredDocuments
    from daric_rag.prewarm.options import engine_identity

    limit = None if settings.url else settings.limit_bytes
    if not settings.sees_store:
        return set(), limit
    free = _free_bytes(Path(settings.store_folder()))
    if not Path(settings.store_folder()).is_dir():
        return set(), limit and min(limit, free)
    with opened(settings.store, settings.key_file) as (disk, _):
        header = {**engine_identity(engine), "namespace": settings.namespace}
        stored = StoredDocuments(disk, header)
        return stored.names(), limit and min(max(limit - disk.nbytes, 0), free)


def _free_bytes(folder: Path) -> int:
    """Return what a disk has left where a folder is, or is to be made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _flushed_bytes(engine: Any) -> int:
    engine.flush()
    stats = engine.store_stats()
    return int((stats.host if stats.disk is None else stats.disk).nbytes)
