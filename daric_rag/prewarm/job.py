"""The job: documents in, batches to the engine, entries to the manifest.

::

    source -> rendered, known? -> packed -> engine (two batches at a time)
                                              |
                 manifest <- flushed, fsynced <- outcomes

While one batch is settled, the next one is computed: the engine is never without work,
and its store writes the former one meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from daric_rag.errors import ConfigError, PromptError
from daric_rag.prewarm.items import SourceItem, items_of
from daric_rag.prewarm.job_run import JobRun, PrewarmEngine
from daric_rag.prewarm.manifest import Entry, Manifest, header_of
from daric_rag.prewarm.manifest_writer import ManifestWriter
from daric_rag.prewarm.options import JobOptions, JobReport, Totals, engine_identity
from daric_rag.prewarm.outcomes import NewDocument
from daric_rag.prewarm.seen import Known, SeenDocuments
from daric_rag.prewarm.sharding import text_hash
from daric_rag.prewarm.store_guard import StoreGuard
from daric_rag.prompt import PromptBuilder

__all__ = ["PrewarmEngine", "PrewarmJob"]


class PrewarmJob:
    """Client process. Fills a store with the documents of a source; can be resumed.

    Args:
        engine: Computes and stores.
        source: Documents; see `items_of`. It is read once per run, as it is needed.
        builder: Writes documents as prompts will hold them; default: as they are.
        manifest: Path of the record that makes the job resumable; None for none.
        options: How to run.
        on_entry: Called with every entry once it holds, in the caller's thread.

    Attributes:
        on_vanished: Called at the end with entries of the documents that the manifest
            has and the source has no more, to evict or unpin them; None, as at first,
            to leave them alone.
        header: The manifest's.

    Raises:
        ConfigError: The options do not go with the engine.
    """

    def __init__(
        self,
        engine: PrewarmEngine,
        source: Any,
        *,
        builder: PromptBuilder | None = None,
        manifest: str | os.PathLike[str] | None = None,
        options: JobOptions | None = None,
        on_entry: Callable[[Entry, Totals], None] | None = None,
    ) -> None:
        """Check what can be checked; nothing is read or computed yet."""
        self._engine, self._source = engine, source
        self._builder = builder or PromptBuilder()
        self._options = options or JobOptions()
        self._manifest = manifest
        self._on_entry = on_entry or (lambda entry, totals: None)
        self._make_guard()
        self._stopping = Event()
        self.on_vanished: Callable[[Sequence[Entry]], None] | None = None
        self.header = self._make_header()

    @property
    def template(self) -> str:
        """Names how documents are written, in 64 hex digits.

        The system text is left out: it is no part of a document.
        """
        return replace(self._builder, system=None).template_hash

    def stop(self) -> None:
        """Have `run` finish what the engine works on and return; from any thread."""
        self._stopping.set()

    def run(self) -> JobReport:
        """Compute what is new, until the source ends.

        Returns:
            What was done. Documents that could not be stored are counted in it, and
            stop the job only where the store fails again and again.

        Raises:
            EngineError: The engine failed. What was done before is in the manifest.
            StoreError: The manifest cannot be written.
            ConfigError: Another job writes to the manifest, or it is of other sources
                too and vanished documents are to be given up.
        """
        with ExitStack() as stack:
            seen = stack.enter_context(SeenDocuments())

            def told(entry: Entry, totals: Totals) -> None:
                seen.learn(entry)
                self._on_entry(entry, totals)

            writer, num_damaged = None, 0
            if self._manifest is not None:
                writer = stack.enter_context(
                    ManifestWriter(self._manifest, self.header, self._check_vanishing)
                )
                manifest = Manifest(self._manifest)
                seen.load(manifest.history(self.header))
                num_damaged = manifest.num_damaged
            run = stack.enter_context(
                JobRun(
                    self._engine,
                    self._options,
                    self._make_guard(),
                    writer,
                    told,
                    seen.is_told,
                )
            )
            stopped = self._feed(run, seen)
            run.finish()
            if self.on_vanished is not None and stopped in ("", "budget"):
                emptied = getattr(self._source, "emptied", lambda _: "")
                stopped = run.give_up_vanished(seen, self.on_vanished, emptied, stopped)
        # Of a batch that found no room.
        run.totals.waiting_bytes = 0
        return JobReport(run.totals, stopped, num_damaged)

    def _feed(self, run: JobRun, seen: SeenDocuments) -> str:
        """Hand the source to the engine; returns why it was not read to its end."""
        is_full = False
        for item in items_of(self._source):
            if self._stopping.is_set():
                return "stopped"
            document = self._examine(item, run, seen)
            if document is None:
                run.totals.source_bytes += item.source_bytes
                continue
            if is_full:
                continue
            is_full = not run.take(document)
            if run.store_keeps_failing:
                return "store"
            # What vanished makes room, and only the whole source tells what did.
            if is_full and self.on_vanished is None:
                return "budget"
        if self._stopping.is_set():
            # The source may have ended only because it was asked to.
            return "stopped"
        return "budget" if is_full or not run.take_rest() else ""

    def _examine(
        self, item: SourceItem, run: JobRun, seen: SeenDocuments
    ) -> NewDocument | None:
        """Return what is to be computed of an item; None if nothing is."""
        if item.error:
            seen.keep(item.id, item.place)
            run.hides_others |= item.hides_others
            run.note(Entry(item.id, "failed", error=item.error))
            return None
        try:
            parts = self._builder.document_parts([item.document])
        except PromptError as error:
            seen.keep(item.id)
            run.note(Entry(item.id, "failed", error=str(error)))
            return None
        if not parts:
            run.note(Entry(item.id, "skipped", error="the document is empty"))
            return None
        name = text_hash(parts[0].text)
        if not self._options.shard.holds(name):
            # A former run may have had other shards.
            seen.saw(name)
            run.totals.others += 1
            return None
        known = seen.visit(name, item.id, item.place)
        if known is Known.DONE and self._options.again:
            known = Known.NEW
        if known is Known.DONE:
            run.note_moved(seen.move(name, item.id, item.place))
            run.totals.known += 1
            run.totals.known_bytes += item.source_bytes
        run.totals.repeated += known is Known.REPEATED
        if known is not Known.NEW:
            return None
        return NewDocument(item.id, name, parts[0], item.source_bytes, item.place)

    def _make_guard(self) -> StoreGuard:
        stats = getattr(self._engine, "store_stats", None)
        return StoreGuard(stats, self._options.budget_bytes)

    def _make_header(self) -> dict[str, Any]:
        from daric_rag import __version__

        identity = {**engine_identity(self._engine), **self._options.identity}
        return header_of(
            identity,
            template=self.template,
            shard=str(self._options.shard),
            daric_rag=__version__,
            flushed=hasattr(self._engine, "flush"),
            sources=getattr(self._source, "places", []),
        )

    def _check_vanishing(self, manifest: Manifest) -> None:
        """Refuse to take another job's documents for vanished ones."""
        if self.on_vanished is None:
            return
        places = set(self.header["sources"])
        others = [
            other
            for other in manifest.sources(self.header) - places
            if not any(str(folder) in places for folder in Path(other).parents)
        ]
        if others:
            raise ConfigError(
                f"the manifest {manifest.path} is of other sources too "
                f"({', '.join(sorted(others))}), whose documents would be given up: "
                f"name another file with --manifest, or those sources as well"
            )
