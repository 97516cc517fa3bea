"""A disk tier on a fresh folder, opened as often as a test likes."""

import pytest

from daric_rag.storage import DiskTier
from tests.storage.records import CAPACITY_BYTES


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def open_disk(folder):
    opened = []

    def open_one(capacity_bytes=CAPACITY_BYTES, **options):
        opened.append(DiskTier(folder, capacity_bytes, **options))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()
