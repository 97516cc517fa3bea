"""Appending to a manifest: whole groups of lines, by one process at a time."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Self

from daric_rag.errors import ConfigError, StoreError
from daric_rag.prewarm.manifest import (
    BEGIN,
    Entry,
    Manifest,
    encoded,
    what_else,
)

__all__ = ["ManifestWriter"]

# A pipe must not keep it waiting.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK


class ManifestWriter:
    """Appends to a manifest that nobody else appends to.

    Args:
        path: The file, made if absent.
        header: See `header_of`; written unless it is the file's last one.
        check: Called with what the file holds before anything is written; may raise.

    Raises:
        ConfigError: Another process appends to it, or it is something else.
        StoreError: It cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Mapping[str, Any],
        check: Callable[[Manifest], None] = lambda manifest: None,
    ) -> None:
        """Cut off what a kill left unfinished."""
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Titles and names of documents may be private.
            number = os.open(self.path, _FLAGS, 0o600)
        except OSError as error:
            raise StoreError(
                f"the manifest {path} cannot be written ({error.strerror}): name "
                f"another file with --manifest"
            ) from error
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise ConfigError(f"{path} is no file: name one with --manifest")
        self._file: BinaryIO = os.fdopen(number, "r+b")
        try:
            self._lock()
            manifest = Manifest(self.path)
            headers = manifest.headers()
            if not headers and not self._is_begun():
                raise ConfigError(f"{path} is {what_else(self.path)}")
            self._cut_torn_line()
            check(Manifest(self.path))
            is_last = bool(headers) and headers[-1] == dict(header)
            if not is_last or manifest.has_lost_header:
                self._write([dict(header)])
        except BaseException:
            self.close()
            raise

    def append(self, entries: Sequence[Entry]) -> None:
        """Write entries; they are on disk when this returns.

        Raises:
            StoreError: The file cannot be written.
        """
        if entries:
            self._write([{"type": "document", **asdict(entry)} for entry in entries])

    def close(self) -> None:
        """Let others append; harmless when repeated."""
        # After a failed write there is something left to write, and that fails again.
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _is_begun(self) -> bool:
        """Whether there is nothing yet, or a header that a kill has torn."""
        self._file.seek(0)
        first = self._file.readline(1 << 20)
        return not first.endswith(b"\n") and _is_torn_header(first)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another job writes to {self.path}: wait for it, or give each shard "
                f"a manifest of its own"
            ) from error

    def _cut_torn_line(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        start = end
        while start:
            step = min(start, 1 << 16)
            self._file.seek(start - step)
            newline = self._file.read(step).rfind(b"\n")
            if newline >= 0:
                start = start - step + newline + 1
                break
            start -= step
        self._file.truncate(start)
        self._file.seek(0, os.SEEK_END)

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._file.write(b"".join(map(encoded, lines)))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StoreError(
                f"the manifest {self.path} cannot be written ({error.strerror}): make "
                f"room and run the job again; it goes on where it stopped"
            ) from error


def _is_torn_header(begin: bytes) -> bool:
    return BEGIN.startswith(begin) or begin.startswith(BEGIN)
