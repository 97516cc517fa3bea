"""Jobs that end by SIGKILL at chosen points, each resumed by the next one.

Usage: killed.py FOLDER POINT... ; a point is the number of the call, counted over
writes, flushes and fsyncs, at which that run's process kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from daric_rag.prewarm import JobOptions, PrewarmJob
from tests.prewarm.engines import FolderEngine

TEXTS = [f"document {number} of some words" for number in range(60)]
BATCH_TOKENS = 30


def counted(point: int) -> Callable[[], None]:
    """Kills this process when it is called for the point-th time."""
    num_calls = 0

    def step() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


class KilledEngine(FolderEngine):
    """Tells a file of every document that it begins to compute."""

    def __init__(self, folder: Path, step: Callable[[], None]) -> None:
        log = folder.with_suffix(".log").open("ab", buffering=0)

        def on_write() -> None:
            log.write(b"x\n")
            step()

        super().__init__(folder, on_write)
        self.step = step

    def flush(self) -> None:
        self.step()
        super().flush()
        self.step()


def run(folder: Path, point: int) -> None:
    step, fsync = counted(point), os.fsync

    def killing_fsync(number: int) -> None:
        step()
        fsync(number)
        step()

    os.fsync = killing_fsync  # type: ignore[assignment]
    engine = KilledEngine(folder / "store", step)
    options = JobOptions(batch_tokens=BATCH_TOKENS, commit_interval_s=0)
    PrewarmJob(engine, TEXTS, manifest=folder / "m.jsonl", options=options).run()


def main() -> None:
    folder = Path(sys.argv[1])
    for point in map(int, sys.argv[2:]):
        child = os.fork()
        if child == 0:
            run(folder, point)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
