"""The disk tier: what it keeps over time, and what it shares with other processes."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from daric_rag.storage.folder import MARKER
from tests.storage.records import (
    CAPACITY_BYTES,
    RECORD_BYTES,
    REPOSITORY,
    key,
    payload,
    read,
    record,
    record_files,
)


def run_elsewhere(folder, code):
    """Run code in a process of its own, with `tier` open on the same folder."""
    prelude = (
        "import sys\n"
        "from daric_rag.storage import DiskTier\n"
        "from tests.storage.records import *\n"
        f"tier = DiskTier({str(folder)!r}, {CAPACITY_BYTES})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prelude + code],
        check=True,
        capture_output=True,
        cwd=REPOSITORY,
    )
    return done.stdout.decode().strip()


def test_reopening_keeps_records_and_their_order(open_disk):
    tier = open_disk()
    for number in range(4):
        tier.write(record(number))
    assert read(tier, 0) == payload(0)
    tier.touch([key(1), key(99)])
    tier.close()

    tier = open_disk(4 * RECORD_BYTES)

    assert tier.keys() == [key(2), key(3), key(0), key(1)]
    assert tier.nbytes == 4 * RECORD_BYTES
    tier.write(record(4))
    assert read(tier, 2) is None
    assert read(tier, 0) == payload(0)


def test_reopening_with_a_smaller_budget_evicts_at_the_next_write(open_disk):
    tier = open_disk()
    for number in range(6):
        tier.write(record(number))

    tier = open_disk(2 * RECORD_BYTES)
    tier.write(record(6))

    assert tier.keys() == [key(5), key(6)]


def test_a_hit_runs_no_sql(open_disk, monkeypatch):
    tier = open_disk()
    tier.write(record(1))
    monkeypatch.setattr(tier._cache, "get", None)

    assert read(tier, 1) == payload(1)
    assert tier.contains(key(1))


def test_old_files_without_a_row_are_deleted_at_opening(open_disk, folder):
    open_disk().write(record(1))
    (kept,) = record_files(folder)
    for name, age_s in [("a", 7200), ("b", 60)]:
        path = folder / "00/00" / (name * 28 + ".val")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"left behind")
        os.utime(path, (time.time() - age_s,) * 2)
    os.utime(kept, (1, 1))

    open_disk()

    assert {path.name for path in record_files(folder)} == {
        kept.name,
        "b" * 28 + ".val",
    }


def test_the_folder_never_exceeds_the_budget(open_disk, folder):
    tier = open_disk(4 * RECORD_BYTES)
    done = threading.Event()
    seen = []

    def watch():
        while not done.is_set():
            with contextlib.suppress(FileNotFoundError):
                seen.append(sum(path.stat().st_size for path in record_files(folder)))

    def work(seed):
        for step in range(25):
            tier.write(record(seed * 3 + step % 7, num_tokens=1 + step % 3))
        tier.close_thread()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    done.set()
    watcher.join()

    assert 0 < max(seen) <= 4 * RECORD_BYTES
    held = sum(path.stat().st_size for path in record_files(folder))
    assert held == tier.nbytes == open_disk().nbytes


def test_processes_share_records(open_disk, folder):
    tier = open_disk()
    tier.write(record(1))

    code = (
        "print(tier.read(key(1), FINGERPRINT).payload == payload(1))\n"
        "tier.write(record(2))\n"
        "tier.close()\n"
    )
    assert run_elsewhere(folder, code) == "True"

    assert tier.contains(key(2))
    assert read(tier, 2) == payload(2)
    assert sorted(tier.keys()) == [key(1), key(2)]


def test_another_process_may_delete_and_replace(open_disk, folder):
    tier = open_disk()
    for number in (1, 2):
        tier.write(record(number))

    run_elsewhere(folder, "tier.delete(key(1)); tier.write(record(2)); tier.close()")

    assert read(tier, 1) is None
    assert read(tier, 2) == payload(2)
    assert tier.stats().corrupt == 0
    assert tier.nbytes == RECORD_BYTES


def test_eviction_counts_and_respects_other_processes(open_disk, folder):
    tier = open_disk(3 * RECORD_BYTES)
    tier.write(record(1))
    run_elsewhere(folder, "[tier.write(record(n)) for n in (2, 3)]; tier.close()")
    run_elsewhere(folder, "tier.read(key(1), FINGERPRINT); tier.close()")

    tier.write(record(4))

    assert len(record_files(folder)) == 3
    assert sorted(tier.keys()) == [key(1), key(3), key(4)]


def test_a_read_elsewhere_keeps_a_record(open_disk, folder):
    tier = open_disk(3 * RECORD_BYTES)
    for number in (1, 2, 3):
        tier.write(record(number))
    run_elsewhere(folder, "tier.read(key(1), FINGERPRINT); tier.close()")

    tier.write(record(4))

    assert tier.keys() == [key(3), key(1), key(4)]


def test_two_processes_may_create_the_same_store(folder):
    code = (
        "[tier.write(record(n)) for n in range(20)]\n"
        "print(sum(tier.contains(key(n)) for n in range(20)))\n"
        "tier.close()\n"
    )
    counts = []
    threads = [
        threading.Thread(target=lambda: counts.append(run_elsewhere(folder, code)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert counts == ["20", "20"]
    assert (folder / MARKER).exists()
    assert len(record_files(folder)) == 20
