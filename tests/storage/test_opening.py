"""Several processes open a folder, and one of them stands still."""

import contextlib
import fcntl
import os
import sqlite3

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage.inert_disk import retrying

_STEP_S = 20.0


class Clock:
    """Time that passes while somebody sleeps; `on_sleep` is what others do then."""

    def __init__(self, on_sleep):
        self.now = 0.0
        self.on_sleep = on_sleep

    def monotonic(self):
        return self.now

    def sleep(self, _):
        self.now += _STEP_S
        self.on_sleep()


@pytest.fixture
def held(open_disk, folder):
    """The folder, as another process holds it while it opens the store."""
    open_disk().close()
    file = os.open(folder, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    yield file
    os.close(file)


@pytest.mark.timeout(60)
def test_who_stands_still_while_opening_is_told_of(held, open_disk, monkeypatch):
    clock = Clock(lambda: None)
    monkeypatch.setattr("daric_rag.storage.folder.time", clock)

    with pytest.raises(StoreError, match="fuser"):
        open_disk()

    assert clock.now <= 3 * _STEP_S


@pytest.mark.timeout(60)
def test_who_goes_on_is_waited_for(held, open_disk, folder, monkeypatch):
    touched = []

    def go_on():
        touched.append(None)
        os.utime(folder, ns=(0, len(touched)))
        if len(touched) == 10:
            fcntl.flock(held, fcntl.LOCK_UN)

    monkeypatch.setattr("daric_rag.storage.folder.time", Clock(go_on))

    assert not open_disk().read_only
    assert len(touched) == 10


@pytest.mark.timeout(40)
def test_a_locked_index_is_not_waited_for_for_long(open_disk, folder, monkeypatch):
    """Others wait for the folder meanwhile, which diskcache would hold for 60 s."""
    open_disk().close()
    monkeypatch.setattr("daric_rag.storage.database.LOCK_TIMEOUT_S", 0.05)
    with contextlib.closing(sqlite3.connect(folder / "cache.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked"):
            open_disk()
    assert not open_disk().read_only


def test_a_statement_is_repeated_while_the_index_is_locked():
    answers = [sqlite3.OperationalError("database is locked")] * 3 + ["done"]

    def execute(sql):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return sql + answer

    assert retrying(execute, 60.0)("well ") == "well done"
    answers[:] = [sqlite3.OperationalError("no such table")]
    with pytest.raises(sqlite3.OperationalError, match="no such"):
        retrying(execute, 60.0)("")
