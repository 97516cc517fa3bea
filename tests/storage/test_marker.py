"""A marker that a power cut emptied or took: the records say if they are encrypted."""

import pytest

from daric_rag.errors import StoreError
from daric_rag.prewarm.templates import note_template
from daric_rag.storage import DiskTier
from daric_rag.storage.cipher import RecordCipher
from daric_rag.storage.folder import MARKER
from daric_rag.storage.record_file import write_record_file
from tests.storage.records import CAPACITY_BYTES, path_of, payload, read, record

pytest.importorskip(
    "cryptography.hazmat.primitives.ciphers.aead", reason="the extra `encryption`"
)


def lose(marker, how):
    text = marker.read_text()
    if how == "missing":
        marker.unlink()
    else:
        marker.write_text({"empty": "", "cut short": text[:-3]}[how])


@pytest.mark.parametrize("how", ["empty", "missing", "cut short"])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_lost_marker_costs_no_record(folder, how, is_sealed):
    cipher = RecordCipher(b"k" * 32)
    right, wrong = (cipher, None) if is_sealed else (None, cipher)
    tier = DiskTier(folder, CAPACITY_BYTES, cipher=right)
    tier.write(record(1))
    tier.close()
    note_template(folder, "aa", "{text}")
    before = (folder / MARKER).read_text()
    lose(folder / MARKER, how)

    mend = "DARIC_STORE_KEY" if is_sealed else "open it without a key"
    with pytest.raises(StoreError, match=mend):
        DiskTier(folder, CAPACITY_BYTES, cipher=wrong)
    tier = DiskTier(folder, CAPACITY_BYTES, cipher=right)

    assert read(tier, 1) == payload(1)
    assert (folder / MARKER).read_text() == before
    tier.close()


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_record_sealed_otherwise_than_the_store_is_a_miss_and_stays(
    folder, is_sealed
):
    cipher = RecordCipher(b"k" * 32)
    tier = DiskTier(folder, CAPACITY_BYTES, cipher=cipher if is_sealed else None)
    tier.write(record(1))
    path = path_of(tier, 1)
    path.unlink()
    write_record_file(path, record(1), cipher=None if is_sealed else cipher)

    assert read(tier, 1) is None
    tier.flush()  # What is condemned goes now.

    assert path.exists()
    assert tier.stats().corrupt == 1
    tier.close()
