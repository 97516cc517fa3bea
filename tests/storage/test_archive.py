"""Documents in one file: what comes out is what went in."""

import json
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import DiskTier, RecordCipher
from daric_rag.storage.archive import export_documents
from daric_rag.storage.archive_import import import_records
from daric_rag.storage.documents import DocumentTree
from daric_rag.storage.format import HEADER_LEN
from tests.storage.archives import (
    NUMBERS,
    documents,
    export,
    held,
    members_of,
    write_all,
    write_tar,
)
from tests.storage.records import (
    CAPACITY_BYTES,
    key,
    payload,
    record,
    record_files,
)

CIPHER = RecordCipher(b"k" * 32)


@pytest.fixture
def open_tier(tmp_path):
    with ExitStack() as stack:

        def open_one(name, capacity_bytes=CAPACITY_BYTES, cipher=None):
            tier = DiskTier(tmp_path / name, capacity_bytes, cipher=cipher)
            return stack.enter_context(closing(tier))

        yield open_one


@pytest.fixture
def fill(open_tier):
    def fill(name="source", cipher=None):
        tier = open_tier(name, cipher=cipher)
        write_all(tier)
        return tier

    return fill


@pytest.fixture
def archive(fill, tmp_path):
    path = tmp_path / "all.tar"
    export(fill(), path)
    return path


# --------------------------------------------------------------------- there and back


def test_records_titles_and_pins_travel(fill, open_tier, tmp_path):
    source = fill()
    source.pin([key(3)])
    path = tmp_path / "all.tar"
    done = export(source, path)
    assert (done.num_documents, done.num_records, done.failures.total) == (3, 5, 0)
    target = open_tier("target")
    report = import_records(target, path)
    assert (report.num_records, report.num_pinned, report.num_missing) == (5, 1, 0)
    assert report.nbytes == done.nbytes == source.nbytes
    assert not report.failures.counts
    assert not report.stopped
    assert held(target) == {*NUMBERS}
    assert documents(target) == {("Report", True), ("Plan", False), ("", False)}
    tree_of = {r.key: r.parent for r in source.segments()}
    assert {r.key: r.parent for r in target.segments()} == tree_of


def test_the_file_is_a_plain_tar_for_its_owner_alone(fill, tmp_path):
    source = fill()
    path = tmp_path / "all.tar"
    export(source, path)
    (manifest, text), *members = members_of(path)
    assert manifest.name == "manifest.json"
    assert json.loads(text)["num_records"] == len(NUMBERS)
    files = {(source.directory / r.filename).read_bytes() for r in source.segments()}
    assert {content for _, content in members} == files
    assert path.stat().st_mode & 0o777 == 0o600


def test_only_the_chosen_document_is_exported(fill, open_tier, tmp_path):
    path = tmp_path / "plan.tar"
    assert export(fill(), path, {"Plan"}).num_records == 2
    target = open_tier("target")
    import_records(target, path)
    assert documents(target) == {("Plan", False)}


def test_what_the_store_has_is_skipped(archive, open_tier):
    target = open_tier("target")
    target.write(record(2, parent=key(1), index=1))
    report = import_records(target, archive)
    assert (report.num_records, report.num_present) == (4, 1)
    again = import_records(target, archive)
    assert (again.num_records, again.num_present, again.num_missing) == (0, 5, 0)


def test_an_archive_packed_anew_by_tar_is_accepted(archive, open_tier, tmp_path):
    path = tmp_path / "again.tar"
    members = [("./" + m.name, content) for m, content in members_of(archive)]
    write_tar(path, reversed(members))
    target = open_tier("target")
    assert import_records(target, path).num_records == 5


# ------------------------------------------------------------------------- encryption


def test_a_sealed_export_shows_nothing_and_needs_its_key(fill, open_tier, tmp_path):
    path = tmp_path / "sealed.tar"
    export(fill(cipher=CIPHER), path, key_id=CIPHER.key_id)
    content = path.read_bytes()
    assert not any(payload(n) in content for n in NUMBERS)
    for word in (b"Report", b"Plan", b"default"):  # The last is their tenant.
        assert word not in content
    plain = open_tier("plain")
    for wrong in (None, RecordCipher(b"w" * 32)):
        with pytest.raises(StoreError, match="--archive-key-file"):
            import_records(plain, path, cipher=wrong)
    assert held(plain) == set()
    assert import_records(plain, path, cipher=CIPHER).num_records == 5
    assert held(plain) == {*NUMBERS}
    assert documents(plain) == {("Report", False), ("Plan", False), ("", False)}


def test_records_are_sealed_by_the_store_that_imports_them(archive, open_tier):
    cipher = RecordCipher(b"n" * 32)
    target = open_tier("sealed", cipher=cipher)
    assert import_records(target, archive, cipher=cipher).num_records == 5
    assert held(target) == {*NUMBERS}
    contents = b"".join(f.read_bytes() for f in record_files(target.directory))
    assert not any(payload(n) in contents for n in NUMBERS)


def test_a_sealed_record_without_a_manifest_is_refused(fill, open_tier, tmp_path):
    path = tmp_path / "sealed.tar"
    export(fill(cipher=CIPHER), path, key_id=CIPHER.key_id)
    write_tar(path, [(m.name, c) for m, c in members_of(path)[1:]])
    target = open_tier("target")
    with pytest.raises(StoreError, match="holds no records"):
        import_records(target, path)
    assert import_records(target, path, cipher=CIPHER).num_records == 5


# ----------------------------------------------------------------------------- budget


def test_import_stops_before_it_would_evict(archive, open_tier):
    sizes = [len(content) for _, content in members_of(archive)[1:]]
    target = open_tier("target", sum(sizes[:2]) + 100)
    report = import_records(target, archive)
    assert report.num_records == 2
    assert "--evict" in report.stopped
    assert report.num_missing == 0
    assert target.stats().evicted == 0


def test_import_may_be_told_to_evict(archive, open_tier):
    sizes = [len(content) for _, content in members_of(archive)[1:]]
    capacity = max(sizes) + 200
    target = open_tier("target", capacity)
    report = import_records(target, archive, may_evict=True)
    assert report.num_records == 5
    assert not report.stopped
    assert target.stats().evicted > 0
    assert target.nbytes <= capacity


def test_a_record_that_no_eviction_makes_room_for_is_refused(archive, open_tier):
    target = open_tier("target", 320)
    report = import_records(target, archive, may_evict=True)
    assert report.failures.counts["length"] == 2
    assert report.num_records == 3


# ------------------------------------------------------------------ failures of export


def test_an_existing_file_is_not_replaced_unless_asked(fill, tmp_path):
    source, path = fill(), tmp_path / "all.tar"
    path.write_bytes(b"precious")
    with pytest.raises(StoreError, match="--overwrite"):
        export(source, path)
    assert path.read_bytes() == b"precious"
    export(source, path, overwrite=True)
    assert len(members_of(path)) == 1 + len(NUMBERS)


def test_damaged_and_lost_records_are_left_out_and_told(fill, open_tier, tmp_path):
    source, path = fill(), tmp_path / "all.tar"
    rows = {row.key: source.directory / row.filename for row in source.segments()}
    content = bytearray(rows[key(2)].read_bytes())
    content[HEADER_LEN] ^= 1
    rows[key(2)].write_bytes(content)
    rows[key(5)].unlink()
    rows[key(7)].unlink()
    rows[key(7)].symlink_to(rows[key(1)])
    done = export(source, path)
    assert done.num_records == 2
    assert done.failures.counts == {"checksum": 1, "gone": 1, "short": 1}
    report = import_records(open_tier("target"), path)
    assert (report.num_records, report.num_missing) == (2, 3)


def test_an_export_takes_no_more_memory_than_the_files(fill, tmp_path):
    source, path = fill(), tmp_path / "all.tar"
    rows = [replace(row, nbytes=1 << 60) for row in source.segments()]
    tree = DocumentTree(rows)
    done = export_documents(source.directory, tree, tree.documents, path)
    assert done.failures.counts == {"length": len(NUMBERS)}


def test_an_export_that_fails_leaves_no_file(fill, tmp_path):
    folder = tmp_path / "exports"
    folder.mkdir()

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(fill(), folder / "all.tar", on_record=interrupt)
    assert list(folder.iterdir()) == []


def test_an_export_to_nowhere_is_an_error(fill, tmp_path):
    with pytest.raises(StoreError, match="can be written"):
        export(fill(), tmp_path / "gone" / "all.tar")
