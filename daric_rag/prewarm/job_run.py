"""One run of a job: what the engine works on, and what is still to be written down."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from daric_rag.engine import DocumentOutcome
from daric_rag.prewarm.manifest import Entry
from daric_rag.prewarm.manifest_writer import ManifestWriter
from daric_rag.prewarm.options import JobOptions, Totals
from daric_rag.prewarm.outcomes import NewDocument, doubted, entry_of, kept_in
from daric_rag.prewarm.packing import Packer
from daric_rag.prewarm.seen import SeenDocuments
from daric_rag.prewarm.store_guard import StoreGuard

__all__ = ["JobRun", "PrewarmEngine"]

# Entries in memory, however fast an engine is.
_MAX_UNWRITTEN = 2048


class PrewarmEngine(Protocol):
    """What a job needs of an `Engine`.

    It also uses ``flush()``, ``store_stats()`` and ``fingerprints()`` if they are
    there: an embedded engine has them, a remote one has not.
    """

    def prewarm_each(self, documents: Sequence[Any]) -> list[DocumentOutcome]:
        """See `daric_rag.engine.Engine`."""
        ...


@dataclass(slots=True)
class _Batch:
    """Documents that the engine works on."""

    documents: list[NewDocument]
    num_tokens: int
    outcomes: Future[list[DocumentOutcome]]
    started: float
    is_suspect: bool = False


class JobRun:
    """One run of a job: what is under way, what is settled, what is not yet told.

    Attributes:
        totals: What was done so far.
        hides_others: Whether the source has documents that nothing is known of.
    """

    def __init__(
        self,
        engine: PrewarmEngine,
        options: JobOptions,
        guard: StoreGuard,
        writer: ManifestWriter | None,
        on_entry: Callable[[Entry, Totals], None],
        is_told: Callable[[Entry], bool],
    ) -> None:
        self._engine, self._options, self._guard = engine, options, guard
        self._writer, self._on_entry, self._is_told = writer, on_entry, is_told
        self._packer: Packer[NewDocument] = Packer(
            options.batch_tokens, options.batch_documents
        )
        self._pool = ThreadPoolExecutor(options.max_in_flight, "daric-prewarm")
        self._in_flight: deque[_Batch] = deque()
        self._unwritten: list[Entry] = []
        self._moved: list[Entry] = []
        self._settled_bytes = self._num_chars = self._num_tokens = 0
        self._committed_s = self._settled_s = time.monotonic()
        self._begun_s: float | None = None
        self.totals = Totals()
        self.hides_others = False

    def __enter__(self) -> JobRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self._save_what_is_done()
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def note(self, entry: Entry) -> None:
        """Tell of a document that the engine has nothing to do with."""
        self._unwritten.append(entry)
        self._commit_if_due()

    def note_moved(self, entry: Entry | None) -> None:
        """Have the next entries written down with one of a document that is known."""
        if entry is not None:
            self._moved.append(replace(entry, time=time.time()))
            if len(self._moved) >= _MAX_UNWRITTEN:
                self._write_moved()

    @property
    def store_keeps_failing(self) -> bool:
        """See `StoreGuard.keeps_failing`."""
        return self._guard.keeps_failing

    def take(self, document: NewDocument) -> bool:
        """Take a document in; returns whether the store has room for it."""
        self.totals.waiting_bytes += document.source_bytes
        batches = self._packer.add(document, len(document.part.text))
        return all(self._submit(batch) for batch in batches)

    def take_rest(self) -> bool:
        """Hand over what is packed; returns whether the store has room for it."""
        batch = self._packer.take()
        return not batch or self._submit(batch)

    def finish(self) -> None:
        """Wait for everything and write it down."""
        while self._in_flight:
            self._settle()
        self._commit()

    def give_up_vanished(
        self,
        seen: SeenDocuments,
        give_up: Callable[[Sequence[Entry]], None],
        emptied: Callable[[str], str],
        stopped: str = "",
    ) -> str:
        """Give up what the source has no more; returns why not all was done.

        Args:
            seen: Everything that the source has.
            give_up: Evicts or unpins.
            emptied: See `PathSource.emptied`: what was there is kept, and told.
            stopped: Why not everything was computed, or "".
        """
        if self.hides_others:
            return stopped or "unreadable"
        kept: Counter[str] = Counter()
        vanished = []
        for entry in seen.vanished():
            if place := emptied(entry.place):
                kept[place] += 1
            else:
                vanished.append(entry)
        is_any_left = self.totals.num_alive or self.totals.others
        if (vanished or kept) and not is_any_left and not stopped:
            # An empty mount looks like an empty corpus.
            return "empty"
        for place, num_documents in kept.items():
            self._unwritten.append(kept_in(place, num_documents))
        # In this order: a kill in between leaves documents that nobody asks for, and
        # never one that is called done and is not there.
        self._unwritten += vanished
        self._commit()
        give_up(vanished)
        return stopped

    def _submit(self, documents: list[NewDocument]) -> bool:
        num_tokens = self._packer.tokens_of(
            sum(len(document.part.text) for document in documents)
        )
        while len(self._in_flight) >= self._options.max_in_flight:
            self._settle()
        if not self._has_room(num_tokens):
            return False
        if self._begun_s is None:
            self._begun_s = time.monotonic()
        parts = [document.part for document in documents]
        outcomes = self._pool.submit(self._engine.prewarm_each, parts)
        self._in_flight.append(
            _Batch(documents, num_tokens, outcomes, time.monotonic())
        )
        if self._guard.is_measuring:
            # The first document says what a token takes up.
            self.finish()
        else:
            # Flushing waits for the engine: after it has got its next batch.
            self._commit_if_due()
        return True

    @property
    def _waiting_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self._in_flight)

    def _has_room(self, num_tokens: int) -> bool:
        if self._guard.has_room(num_tokens, self._waiting_tokens):
            return True
        # Some of what is under way was counted twice.
        self.finish()
        return self._guard.has_room(num_tokens, 0)

    def _settle(self) -> None:
        """Wait for the oldest batch and turn its outcomes into entries."""
        batch = self._in_flight.popleft()
        outcomes = batch.outcomes.result()
        now = time.monotonic()
        seconds = now - max(batch.started, self._settled_s)
        self._settled_s = now
        num_tokens = sum(outcome.num_tokens for outcome in outcomes)
        for document, outcome in zip(batch.documents, outcomes, strict=True):
            share = outcome.num_tokens / num_tokens if num_tokens else 0.0
            entry = entry_of(document, outcome, seconds * share)
            self._unwritten.append(doubted(entry) if batch.is_suspect else entry)
            self._settled_bytes += document.source_bytes
            if outcome.num_tokens:
                self._num_chars += len(document.part.text)
                self._num_tokens += outcome.num_tokens
        self._packer.learn(self._num_chars, self._num_tokens)

    def _commit_if_due(self) -> None:
        waited_s = time.monotonic() - self._committed_s
        if (
            waited_s >= self._options.commit_interval_s
            or len(self._unwritten) >= _MAX_UNWRITTEN
        ):
            self._commit()

    def _commit(self) -> None:
        """Once the store has them on disk, write entries down and tell of them."""
        entries, self._unwritten = self._unwritten, []
        self._committed_s = time.monotonic()
        self._write_moved()
        if not entries:
            return
        if any(entry.is_stored for entry in entries):
            entries = list(self._confirmed(entries))
        now = time.time()
        entries = [replace(entry, time=entry.time or now) for entry in entries]
        if self._writer is not None:
            # What cannot be stored is not, run after run.
            self._writer.append([e for e in entries if not self._is_told(e)])
        settled_bytes, self._settled_bytes = self._settled_bytes, 0
        self.totals.source_bytes += settled_bytes
        self.totals.engine_bytes += settled_bytes
        self.totals.waiting_bytes -= settled_bytes
        if self._begun_s is not None:
            self.totals.engine_s = self._committed_s - self._begun_s
        for entry in entries:
            self.totals.add(entry)
            self._on_entry(entry, self.totals)

    def _write_moved(self) -> None:
        entries, self._moved = self._moved, []
        if self._writer is not None:
            self._writer.append(entries)

    def _confirmed(self, entries: Sequence[Entry]) -> Iterator[Entry]:
        """Flush, and yield the entries as they turned out."""
        flush = getattr(self._engine, "flush", None)
        if flush is not None:
            flush()
        self._guard.look(self._waiting_tokens)
        took_all = self._guard.took_all()
        if not took_all:
            entries = [doubted(entry) for entry in entries]
            # What was lost may be of a batch that is not settled yet.
            for batch in self._in_flight:
                batch.is_suspect = True
        computed = (e.num_tokens for e in entries if e.status == "computed")
        self._guard.learn(sum(computed), all_told=not self._in_flight)
        now, lifetime = time.time(), self._options.lifetime_s
        for entry in entries:
            nbytes = round(entry.num_tokens * self._guard.bytes_per_token)
            expires = now + lifetime if lifetime and entry.is_stored else None
            yield replace(entry, nbytes=nbytes, time=now, expires=expires)

    def _save_what_is_done(self) -> None:
        """After an error, which may be the engine's: then the next run finds out."""
        try:
            self.finish()
        except Exception:
            with suppress(Exception):
                self._commit()
