"""Which folders are taken for a store, and how bad ones are refused."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import diskcache
import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import DiskTier, RecordCipher, StoreProbe
from daric_rag.storage.folder import MARKER
from daric_rag.storage.record_file import write_record_file
from tests.storage.records import FINGERPRINT, key, payload, record, record_files


def test_a_folder_emptied_under_a_running_process_opens_again(tmp_path: Path) -> None:
    """What is left of it are record folders and an index, and no marker."""
    store = tmp_path / "store"
    DiskTier(store, 1 << 20).close()
    (store / MARKER).unlink()
    (store / "ab" / "cd").mkdir(parents=True)
    DiskTier(store, 1 << 20).close()
    assert (store / MARKER).exists()


@pytest.mark.parametrize("name", ["photo.jpg", "cache.db.bak", "abc", "AB"])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(StoreError, match="choose an empty or a new folder"):
        DiskTier(tmp_path, 1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_open_folder_is_closed_to_others(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir(mode=0o755)
    DiskTier(store, 1 << 20).close()
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    shutil.rmtree(store)


def test_a_path_with_nul_is_a_sentence() -> None:
    with pytest.raises(StoreError, match="cannot open the store"):
        DiskTier("/tmp/a\0b", 1 << 20)


def test_records_of_the_first_version_are_deleted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    (store / "ab" / "cd").mkdir(parents=True)
    (store / "DARIC_STORE_1").touch()
    old = store / "ab" / "cd" / ("0" * 28 + ".val")
    old.write_bytes(b"a record of old")
    diskcache.Cache(str(store)).close()

    tier = DiskTier(store, 1 << 20)
    tier.close()

    assert caplog.text.count("of an earlier version") == 1
    assert not old.exists()
    assert {path.name for path in store.glob("DARIC*")} == {MARKER}
    caplog.clear()
    DiskTier(store, 1 << 20).close()
    assert caplog.text == ""


def test_a_store_of_a_later_version_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "DARIC_STORE_3").touch()
    (tmp_path / "something.new").touch()
    before = sorted(tmp_path.iterdir())
    for opened in (lambda: DiskTier(tmp_path, 1 << 20), lambda: StoreProbe(tmp_path)):
        with pytest.raises(StoreError, match="upgrade daric_rag"):
            opened()
    assert sorted(tmp_path.iterdir()) == before


def test_a_key_must_be_the_stores(tmp_path: Path) -> None:
    plain, sealed = tmp_path / "plain", tmp_path / "sealed"
    first, second = RecordCipher(bytes(32)), RecordCipher(b"k" * 32)
    DiskTier(plain, 1 << 20).close()
    DiskTier(sealed, 1 << 20, cipher=first).close()

    with pytest.raises(StoreError, match="not encrypted: open it without a key"):
        DiskTier(plain, 1 << 20, cipher=first)
    for cipher in (None, second):
        with pytest.raises(StoreError, match=f"{first.key_id}.*DARIC_STORE_KEY"):
            DiskTier(sealed, 1 << 20, cipher=cipher)
    DiskTier(sealed, 1 << 20, cipher=first).close()
    StoreProbe(sealed).close()


def test_an_encrypted_store_shows_neither_payload_nor_title(tmp_path: Path) -> None:
    cipher = RecordCipher(b"k" * 32)
    title = b"a title that is to be kept secret"
    tier = DiskTier(tmp_path, 1 << 20, cipher=cipher)
    tier.write(record(1, num_tokens=40, side_data=title))
    (row,) = tier.segments()
    assert row.side_data == title
    tier.close()
    (tmp_path / "cache.db").unlink()  # The rows are then made from the records.

    tier = DiskTier(tmp_path, 1 << 20, cipher=cipher)
    (row,) = tier.segments()
    assert row.side_data == title
    found = tier.read(key(1), FINGERPRINT)
    assert found is not None
    assert found.side_data == title
    assert found.payload == payload(1, num_tokens=40)
    tier.close()

    secrets = (title, payload(1, num_tokens=40)[:40])
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not any(secret in content for secret in secrets), path


@pytest.mark.parametrize("position", [20, 130, 184, 200, -1, -30])
def test_a_changed_byte_of_a_sealed_record_is_a_miss(
    tmp_path: Path, position: int
) -> None:
    tier = DiskTier(tmp_path, 1 << 20, cipher=RecordCipher(b"k" * 32))
    tier.write(record(1, side_data=b"title"))
    (path,) = record_files(tmp_path)
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)

    assert tier.read(key(1), FINGERPRINT) is None
    assert tier.stats().corrupt == 1
    tier.close()


def test_a_plain_record_in_a_sealed_store_is_a_miss(tmp_path: Path) -> None:
    """Anybody could have made it."""
    tier = DiskTier(tmp_path, 1 << 20, cipher=RecordCipher(b"k" * 32))
    tier.write(record(1))
    (path,) = record_files(tmp_path)
    path.unlink()
    write_record_file(path, record(1))

    assert tier.read(key(1), FINGERPRINT) is None
    assert tier.stats().corrupt == 1
    tier.close()
