"""Which folders are taken for a store, and how bad ones are refused."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import DiskTier
from daric_rag.storage.folder import MARKER


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
