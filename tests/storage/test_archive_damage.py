"""Archives that are damaged, cut short or forged: what is whole in them is imported."""

import io
import json
import tarfile
from contextlib import closing

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage import DiskTier
from daric_rag.storage.archive import member_name
from daric_rag.storage.archive_import import import_records
from daric_rag.storage.format import body_checksum, encode_header
from tests.storage.archives import (
    NUMBERS,
    export,
    held,
    members_of,
    write_all,
    write_tar,
)
from tests.storage.records import CAPACITY_BYTES, header, key, payload, record


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "all.tar"
    with closing(DiskTier(tmp_path / "source", CAPACITY_BYTES)) as source:
        write_all(source)
        export(source, path)
    return path


@pytest.fixture
def target(tmp_path):
    with closing(DiskTier(tmp_path / "target", CAPACITY_BYTES)) as tier:
        yield tier


def test_no_damaged_byte_changes_a_record_or_ends_the_import(archive, target):
    whole = archive.read_bytes()
    for offset in range(0, len(whole), 97):
        damaged = bytearray(whole)
        damaged[offset] ^= 0x41
        archive.write_bytes(damaged)
        report = import_records(target, archive)
        assert report.num_records >= len(NUMBERS) - 1
        assert len(held(target)) == report.num_records == len(target.keys())
        target.evict(target.keys())


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8, 0.99])
def test_of_a_file_cut_short_the_beginning_is_imported(archive, target, share):
    whole = archive.read_bytes()
    length = int(share * len(whole))
    ends = [m.offset_data + m.size for m, _ in members_of(archive)[1:]]
    num_whole = sum(end <= length for end in ends)
    archive.write_bytes(whole[:length])
    report = import_records(target, archive)
    assert report.num_records == len(held(target)) == num_whole
    assert report.num_missing + report.failures.total == len(NUMBERS) - num_whole


@pytest.mark.parametrize("length", [0, 100, 512, 700])
def test_without_a_whole_member_there_is_no_archive(archive, target, length):
    archive.write_bytes(archive.read_bytes()[:length])
    with pytest.raises(StoreError, match="holds no records"):
        import_records(target, archive)


def test_foreign_members_are_refused_one_by_one(archive, target, tmp_path):
    outside = tmp_path / "outside"
    with tarfile.open(archive, "a") as tar:
        for name in ("../outside", str(outside), "records/../../outside", "x" * 300):
            member = tarfile.TarInfo(name)
            member.size = 5
            tar.addfile(member, io.BytesIO(b"hello"))
        link = tarfile.TarInfo(member_name(key(8)))
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    report = import_records(target, archive)
    assert report.num_records == 5
    # The long name takes a member more.
    assert report.failures.counts == {"magic": 6}
    assert not outside.exists()


def test_a_record_under_another_s_name_is_refused(target, tmp_path):
    path = tmp_path / "forged.tar"
    content = encode_header(header(1), body_checksum(payload(1))) + payload(1)
    write_tar(path, [(member_name(key(2)), content), (member_name(key(1)), content)])
    report = import_records(target, path)
    assert report.failures.counts == {"identity": 1}
    assert target.keys() == [key(1)]


def test_lengths_that_lie_are_refused_before_memory_is_taken(archive, target):
    huge = header(8, num_tokens=1 << 20)
    assert huge.payload_len > 1 << 24
    members = [(m.name, content) for m, content in members_of(archive)]
    liar = (member_name(key(8)), encode_header(huge, 0) + bytes(64))
    write_tar(archive, [members[0], liar, *members[1:]])
    # The last lie is of the tar's own header: more bytes than the file has.
    content = bytearray(archive.read_bytes())
    start = members_of(archive)[1][0].offset
    member = tarfile.TarInfo(member_name(key(9)))
    member.size = 1 << 50
    content[start:start] = member.tobuf(tarfile.GNU_FORMAT)
    archive.write_bytes(content)
    report = import_records(target, archive)
    assert report.num_records == 5
    assert report.failures.counts == {"short": 1, "length": 1}


def test_an_archive_pins_nothing_but_what_it_brings(target, tmp_path):
    target.write(record(1))
    path = tmp_path / "forged.tar"
    manifest = {
        "format": "daric_rag archive",
        "version": 1,
        "key_id": None,
        "num_records": 0,
        "documents": [{"key": key(1).hex(), "pinned": True}],
    }
    write_tar(path, [("manifest.json", json.dumps(manifest).encode())])
    assert import_records(target, path).num_pinned == 0
    assert not target.segments()[0].pinned


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([], "holds no records"),
        ([("manifest.json", b"[]")], "holds no records"),
        (
            [("manifest.json", b'{"format":"other","num_records":1,"version":1}')],
            "holds no records",
        ),
        (
            [
                (
                    "manifest.json",
                    b'{"format":"daric_rag archive","num_records":1,"version":2}',
                )
            ],
            "import it with a later daric_rag",
        ),
    ],
)
def test_a_file_that_is_no_archive_is_an_error(target, tmp_path, members, text):
    path = tmp_path / "other.tar"
    write_tar(path, members)
    with pytest.raises(StoreError, match=text):
        import_records(target, path)


def test_a_file_that_is_absent_is_an_error(target, tmp_path):
    with pytest.raises(StoreError, match="daric store export"):
        import_records(target, tmp_path / "gone.tar")
