"""A light process that forks programs in milliseconds, so that they can be killed.

    test --(one JSON line: a program and its arguments)--> server --fork--> program
    test <------------------(JSON lines of both)------------------------------/

A line is one `write` below PIPE_BUF, so lines of several processes do not mix, and the
server tells of a process's end only when nothing more can come from it.
"""

import json
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.storage.records import REPOSITORY

Report = dict[str, Any]


class WriterServer:
    """Forks the programs of `writers`; a context manager."""

    def __enter__(self) -> "WriterServer":
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.storage.writers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
        )
        self._unread: deque[Report] = deque()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def start(self, program: str, *arguments: Report) -> list[int]:
        """Fork one process for each of `arguments`; returns their ids."""
        line = json.dumps([program, arguments]) + "\n"
        self._server.stdin.write(line.encode())
        self._server.stdin.flush()
        pids = []
        while len(pids) < len(arguments):
            report = self._line()
            if "forked" in report:
                pids.append(report["forked"])
            else:
                self._unread.append(report)
        return pids

    def reports(self) -> Iterator[Report]:
        """What the processes say, until the last has ended.

        Of each that ended there is a report with its `status`, as of `Popen`.
        """
        while True:
            report = self._unread.popleft() if self._unread else self._line()
            if "all_ended" in report:
                return
            yield report

    def _line(self) -> Report:
        line = self._server.stdout.readline()
        assert line, "the server of writers has died"
        return json.loads(line)


def report(**content: Any) -> None:
    """Say something to the test, in one piece."""
    os.write(1, json.dumps(content).encode() + b"\n")


class _Reporter(logging.Handler):
    """Tells the test of every warning."""

    def emit(self, record: logging.LogRecord) -> None:
        report(warning=record.getMessage())


def serve(programs: Mapping[str, Callable[..., None]]) -> None:
    """Fork programs until the input ends."""
    for line in sys.stdin:
        program, all_arguments = json.loads(line)
        pids = []
        for arguments in all_arguments:
            pid = os.fork()
            if pid == 0:
                logging.getLogger().addHandler(_Reporter())
                programs[program](**arguments)
                os._exit(0)
            report(forked=pid)
            pids.append(pid)
        for pid in pids:
            _, status = os.waitpid(pid, 0)
            report(pid=pid, status=os.waitstatus_to_exitcode(status))
        report(all_ended=True)
