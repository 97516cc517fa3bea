"""What several processes on one folder see of each other."""

import os
import threading
import warnings

import pytest

from daric_rag.storage import StoreProbe
from daric_rag.storage.folder import MARKER
from tests.storage.records import (
    CAPACITY_BYTES,
    RECORD_BYTES,
    disk_usage,
    document,
    key,
    payload,
    read,
    record,
    record_files,
    run_elsewhere,
)


def test_a_document_of_another_process_is_read_without_reopening(open_disk, folder):
    tier = open_disk()
    tier.write(record(1))

    code = (
        "print(tier.read(key(1), FINGERPRINT).payload == payload(1))\n"
        "[tier.write(one) for one in document([2, 3], side_data=b'title')]\n"
        "tier.close()\n"
    )
    assert run_elsewhere(folder, code) == "True"

    assert tier.contains(key(2))
    assert read(tier, 3) == payload(3)
    assert sorted(tier.keys()) == [key(1), key(2), key(3)]
    assert [row.side_data for row in tier.segments()].count(b"title") == 1


def test_another_process_may_delete_and_replace(open_disk, folder):
    tier = open_disk()
    for number in (1, 2):
        tier.write(record(number))

    run_elsewhere(
        folder,
        "tier.evict([key(1), key(2)]); tier.write(record(2)); tier.close()",
    )

    assert read(tier, 1) is None
    assert read(tier, 2) == payload(2)
    assert tier.stats().corrupt == 0
    assert tier.nbytes == RECORD_BYTES
    assert tier.take_evicted() == [key(1)]


def test_eviction_counts_the_records_of_others(open_disk, folder):
    tier = open_disk(3 * RECORD_BYTES)
    tier.write(record(1))
    run_elsewhere(folder, "[tier.write(record(n)) for n in (2, 3)]; tier.close()")

    tier.write(record(4))

    assert len(record_files(folder)) == 3
    assert sorted(tier.keys()) == [key(2), key(3), key(4)]


@pytest.mark.parametrize("policy", ["lru", "frequency"])
def test_uses_elsewhere_keep_a_record(open_disk, folder, policy):
    tier = open_disk(3 * RECORD_BYTES, policy=policy)
    for number in (1, 2, 3):
        tier.write(record(number))
    run_elsewhere(
        folder, "[read(tier, 1) for _ in range(5)]; read(tier, 1); tier.flush()"
    )

    tier.write(record(4))

    assert sorted(tier.keys()) == [key(1), key(3), key(4)]
    (row,) = [row for row in tier.segments() if row.key == key(1)]
    assert row.uses == 7


def test_a_working_writer_tells_uses_without_a_flush(open_disk, monkeypatch):
    monkeypatch.setattr("daric_rag.storage.saver._USES_INTERVAL_S", 0.0)
    tier, other = open_disk(), open_disk()
    tier.write(record(1))
    read(tier, 1)
    tier.write(record(2))

    uses = {row.key: row.uses for row in other.segments()}
    assert uses == {key(1): 2, key(2): 1}


def test_uses_of_two_processes_add_up(open_disk, folder):
    tier = open_disk()
    tier.write(record(1))
    for _ in range(3):
        read(tier, 1)
    run_elsewhere(folder, "[read(tier, 1) for _ in range(4)]; tier.close()")
    for _ in range(2):
        read(tier, 1)
    tier.flush()

    (row,) = tier.segments()
    assert row.uses == 1 + 3 + 4 + 2


def test_pins_elsewhere_keep_a_document(open_disk, folder):
    tier = open_disk(3 * RECORD_BYTES)
    for one in document([1, 2]):
        tier.write(one)
    assert run_elsewhere(folder, "print(tier.pin([key(2)])); tier.close()") == "1"

    for number in range(10, 15):
        tier.write(record(number))

    assert tier.contains(key(1))
    assert tier.contains(key(2))
    run_elsewhere(folder, "tier.unpin([key(2)]); tier.close()")
    for number in range(20, 23):
        tier.write(record(number))
    assert not tier.contains(key(1))


def test_who_slept_through_all_deletions_reads_all_rows(open_disk, monkeypatch):
    monkeypatch.setattr("daric_rag.storage.database._NUM_DELETED_KEPT", 5)
    sleeper, busy = open_disk(), open_disk()
    for number in range(40):
        busy.write(record(number))
        if number:
            busy.delete(key(number - 1))

    assert sleeper.contains(key(39))
    assert sleeper.keys() == [key(39)]


def test_two_processes_may_create_the_same_store_and_write_the_same(folder):
    code = (
        "[tier.write(record(n)) for n in range(20)]\n"
        "print(sum(tier.contains(key(n)) for n in range(20)))\n"
        "print(tier.stats().failed_writes)\n"
        "tier.close()\n"
    )
    counts = []
    threads = [
        threading.Thread(target=lambda: counts.append(run_elsewhere(folder, code)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert counts == ["20\n0"] * 3
    assert (folder / MARKER).exists()
    assert len(record_files(folder)) == 20
    assert list((folder / "writers").iterdir()) == []


def test_the_same_key_written_at_once_is_stored_once(open_disk, folder, monkeypatch):
    """The second writer publishes while the first is between file and row."""
    first, second = open_disk(), open_disk()
    publish = type(first._ledger).publish

    def late(ledger, *args):
        monkeypatch.undo()
        second.write(record(1))
        return publish(ledger, *args)

    monkeypatch.setattr(type(first._ledger), "publish", late)
    first.write(record(1))

    assert len(record_files(folder)) == 1
    assert read(first, 1) == read(second, 1) == payload(1)
    assert first.stats().failed_writes == 0
    assert first.nbytes == disk_usage(folder) == RECORD_BYTES


def test_a_forked_child_neither_counts_as_its_parent_nor_writes(open_disk, folder):
    tier = open_disk()
    tier.write(record(1))
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        # Of threads that other tests may have left: from Python 3.12 on.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            tier.write(record(2))
            found = [tier.contains(key(1)), read(tier, 1), tier.pin([key(1)])]
            tier.close()
            os.write(writes, repr(found).encode())
        finally:
            os._exit(0)
    assert os.read(reads, 100) == b"[False, None, 0]"
    os.waitpid(child, 0)

    assert tier.stats().failed_writes == 0
    tier.write(record(3))
    assert read(tier, 1) == payload(1)
    assert not open_disk().contains(key(2))


def test_a_forked_child_does_not_keep_its_dead_parent_alive(open_disk, folder):
    code = (
        "tier.write(record(1))\n"
        "from daric_rag.storage import saver\n"
        "def die(*_, **__):\n"
        "    if os.fork() == 0:\n"
        "        os.close(0); os.close(1)\n"
        "        time.sleep(60)\n"
        "        os._exit(0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "saver.write_record_file = die\n"
        "tier.write(record(2))\n"
    )
    with pytest.raises(AssertionError):
        run_elsewhere(folder, code)

    tier = open_disk()
    assert tier.reclaim().reservations == 0  # Opening has done it.
    assert tier.nbytes == RECORD_BYTES
    assert len(list((folder / "writers").iterdir())) == 0


def test_a_probe_sees_what_is_committed_and_only_that(open_disk, folder, monkeypatch):
    probe = StoreProbe(folder)
    assert not probe.contains(key(1))
    tier = open_disk()
    seen = []
    publish = type(tier._ledger).publish

    def watched(ledger, *args):
        seen.append(probe.contains(key(1)))
        return publish(ledger, *args)

    monkeypatch.setattr(type(tier._ledger), "publish", watched)
    tier.write(record(1))

    assert seen == [False]
    assert probe.contains(key(1))
    tier.delete(key(1))
    assert not probe.contains(key(1))
    probe.close()


def test_processes_of_different_budgets_each_keep_to_their_own(open_disk, folder):
    large = open_disk(6 * RECORD_BYTES)
    for number in range(6):
        large.write(record(number))
    small = open_disk(2 * RECORD_BYTES)
    small.write(record(10))
    assert disk_usage(folder) == 2 * RECORD_BYTES

    for number in range(20, 26):
        large.write(record(number))
    assert disk_usage(folder) == 6 * RECORD_BYTES
    assert CAPACITY_BYTES > 6 * RECORD_BYTES
