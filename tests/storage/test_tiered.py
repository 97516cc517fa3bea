"""Host over disk behind one face: what is found where, and what is promoted."""

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import (
    default_store_path,
    open_store,
)
from tests.storage.records import (
    FINGERPRINT,
    PAYLOAD_LEN,
    RECORD_BYTES,
    REPOSITORY,
    header,
    key,
    payload,
    put,
    read,
    record,
)


@pytest.fixture
def store(tmp_path):
    with open_store(
        tmp_path / "store", host_bytes=4 * RECORD_BYTES, disk_bytes=100 * RECORD_BYTES
    ) as opened:
        yield opened


def test_a_host_hit_is_the_very_buffer_that_was_written(store):
    buffer = store.allocate(PAYLOAD_LEN)
    buffer[:] = payload(1)
    store.write(header(1), buffer)

    found = store.read(key(1), FINGERPRINT)

    ours, theirs = (np.frombuffer(view, np.uint8) for view in (buffer, found.payload))
    assert ours.ctypes.data == theirs.ctypes.data


def test_a_disk_hit_is_promoted(store):
    put(store, 1)
    store.flush()
    store.clear_host()
    assert store.host.keys() == []

    assert read(store, 1) == payload(1)

    assert store.host.contains(key(1))
    assert store.stats().promoted == 1
    assert read(store, 1) == payload(1)
    assert store.stats().disk.hits == 1


def test_read_many_mixes_tiers_and_may_exceed_the_host(store):
    for number in range(8):
        put(store, number)
    store.flush()
    wanted = [7, 3, 99, 0, 3, 1, 2, 6, 5, 4]

    found = store.read_many([key(number) for number in wanted], FINGERPRINT)

    contents = [None if one is None else bytes(one.payload) for one in found]
    assert contents == [None if n == 99 else payload(n) for n in wanted]
    assert store.host.nbytes == 4 * RECORD_BYTES


def test_side_data_comes_back_from_every_tier(store):
    one = record(1, side_data=b"title")
    store.write(one.header, one.payload, one.side_data)
    assert store.read(key(1), FINGERPRINT).side_data == b"title"
    store.flush()
    store.clear_host()
    assert store.read(key(1), FINGERPRINT).side_data == b"title"
    with pytest.raises(StoreError, match="side data"):
        store.write(one.header, one.payload)


def test_writing_what_the_disk_has_writes_no_file(store):
    put(store, 1)
    store.flush()
    before = sorted(store.disk.directory.glob("??/??/*.val"))
    put(store, 1)
    store.flush()
    assert sorted(store.disk.directory.glob("??/??/*.val")) == before


def test_records_too_large_for_one_tier_go_to_the_other(tmp_path):
    with open_store(
        tmp_path / "s", host_bytes=RECORD_BYTES, disk_bytes=2 * RECORD_BYTES
    ) as store:
        large = record(1, num_tokens=5)
        store.write(large.header, large.payload)
        store.flush()
        assert store.read(key(1), FINGERPRINT).payload == large.payload
        assert store.host.keys() == []
    with open_store(
        tmp_path / "t", host_bytes=2 * RECORD_BYTES, disk_bytes=RECORD_BYTES
    ) as store:
        store.write(large.header, large.payload)
        store.flush()
        assert store.read(key(1), FINGERPRINT).payload == large.payload
        assert store.disk.keys() == []
        assert store.stats().dropped_writes == 1


def test_a_record_too_large_for_both_is_refused(store):
    large = record(1, num_tokens=1000)
    with pytest.raises(StoreError, match="host_bytes"):
        store.write(large.header, large.payload)


def test_closing_flushes_and_reopening_finds(tmp_path):
    store = open_store(tmp_path / "s", host_bytes=10_000, disk_bytes=10_000)
    for number in range(5):
        put(store, number)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        put(store, 6)

    with open_store(tmp_path / "s", host_bytes=10_000, disk_bytes=10_000) as store:
        assert [read(store, n) for n in range(5)] == [payload(n) for n in range(5)]


def test_a_program_that_never_closes_still_saves(tmp_path):
    code = (
        "from daric_rag.storage import open_store\n"
        "from tests.storage.records import *\n"
        f"store = open_store({str(tmp_path / 's')!r}, host_bytes=10**6,"
        " disk_bytes=10**6)\n"
        "for n in range(20): store.write(header(n), memoryview(payload(n)))\n"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, cwd=REPOSITORY
    )
    with open_store(tmp_path / "s", host_bytes=10**6, disk_bytes=10**6) as store:
        assert all(read(store, n) == payload(n) for n in range(20))


def test_a_store_that_is_forgotten_saves_and_ends_its_thread(tmp_path):
    before = set(threading.enumerate())
    store = open_store(tmp_path / "s", host_bytes=10_000, disk_bytes=10_000)
    for number in range(5):
        put(store, number)
    disk, forgotten = store.disk, weakref.ref(store)

    del store
    gc.collect()

    assert forgotten() is None
    assert set(threading.enumerate()) <= before
    assert sorted(disk.keys()) == [key(number) for number in range(5)]
    disk.close()


def test_memory_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_store(":memory:", host_bytes=10_000, disk_bytes=10_000) as store:
        put(store, 1)
        store.flush()
        store.clear_host()
        assert read(store, 1) == payload(1)
        assert store.read_many([key(2)], FINGERPRINT) == [None]
        assert store.stats().disk is None
        store.delete(key(1))
        assert store.keys() == []
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_store(host_bytes=10_000, disk_bytes=10_000) as store:
        assert store.disk.directory == tmp_path / "daric_rag" / "store"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_store_path().is_relative_to(tmp_path / "home")


def test_a_store_that_holds_more_than_it_may_is_told(folder, caplog):
    with open_store(folder, host_bytes=1 << 20, disk_bytes=1 << 20) as store:
        for number in range(5):
            put(store, number)
    with open_store(folder, host_bytes=1 << 20, disk_bytes=5 * RECORD_BYTES):
        assert caplog.text == ""
    with open_store(folder, host_bytes=1 << 20, disk_bytes=2 * RECORD_BYTES) as store:
        assert "raise disk_bytes to keep what is there" in caplog.text
        assert len(store.disk.keys()) == 5
