"""New files, through the page cache and past it: the same bytes, whatever happens."""

import errno
import os

import pytest
import xxhash

from daric_rag.storage import new_file
from daric_rag.storage.cipher import RecordCipher
from daric_rag.storage.new_file import Content, DirectWriter, write_cached
from tests.storage.records import payload, read, record, record_files

BLOCK_LEN = 4096
STAGING_LEN = 3 * BLOCK_LEN
HEAD_LEN = 184


@pytest.fixture(autouse=True)
def short_staging(monkeypatch):
    monkeypatch.setattr(new_file, "_STAGING_LEN", STAGING_LEN)


@pytest.fixture
def direct_folder(tmp_path):
    """A folder whose file system takes what comes past the cache."""
    try:
        os.close(os.open(tmp_path / "tried", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except (AttributeError, OSError) as error:
        pytest.skip(f"no direct writing to {tmp_path}: {error!r}")
    return tmp_path


def head_of(checksum):
    return checksum.to_bytes(8, "little") * (HEAD_LEN // 8)


def content(*lens):
    return Content(HEAD_LEN, head_of, [memoryview(os.urandom(n)) for n in lens])


def expected(given):
    body = b"".join(given.body)
    return head_of(xxhash.xxh3_64_intdigest(body)) + body


def write_calls(monkeypatch):
    """Note what is written, and where."""
    calls, pwrite = [], os.pwrite

    def noted(file, part, place):
        calls.append((bytes(part), place))
        return pwrite(file, part, place)

    monkeypatch.setattr(os, "pwrite", noted)
    return calls


def refuses_to_open(monkeypatch):
    """As file systems do: the file is made nevertheless."""
    opened, real = [], os.open

    def refusing(path, flags, *mode):
        opened.append(bool(flags & new_file._DIRECT))
        file = real(path, flags & ~new_file._DIRECT, *mode)
        if opened[-1]:
            os.close(file)
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return file

    monkeypatch.setattr(new_file.os, "open", refusing)
    return opened


def refuses_to_write(monkeypatch):
    """As a disk with longer sectors does, at the second piece."""
    asked, real = [], os.pwrite

    def refusing(file, part, place):
        asked.append(True)
        if len(asked) == 2:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, part, place)

    monkeypatch.setattr(new_file.os, "pwrite", refusing)
    return asked


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("side_len", [0, 700, BLOCK_LEN + 1])
def test_both_ways_make_the_same_file(
    direct_folder, monkeypatch, num_blocks, beyond, side_len
):
    first_len = num_blocks * BLOCK_LEN + beyond - HEAD_LEN
    given = content(first_len, side_len) if side_len else content(first_len)
    write_cached(direct_folder / "new" / "cached", given)
    calls = write_calls(monkeypatch)
    DirectWriter().write(direct_folder / "new" / "direct", given)
    assert calls
    for name in ("cached", "direct"):
        assert (direct_folder / "new" / name).read_bytes() == expected(given)


def test_writing_is_aligned_and_brings_nothing_else_to_the_disk(
    direct_folder, monkeypatch
):
    calls = write_calls(monkeypatch)
    writer = DirectWriter()
    writer.write(
        direct_folder / "a", Content(HEAD_LEN, head_of, [memoryview(b"\1" * 9000)])
    )
    del calls[:]
    given = content(BLOCK_LEN + 10)
    writer.write(direct_folder / "b", given)
    ((written, place),) = calls
    assert place == 0
    assert written == expected(given).ljust(2 * BLOCK_LEN, b"\0")
    del calls[:]
    writer.write(direct_folder / "c", content(2 * STAGING_LEN))
    assert [place for _, place in calls] == [0, STAGING_LEN, 2 * STAGING_LEN, 0]
    # What is torn by a power cut has no head, and no other record's either.
    assert calls[0][0][:HEAD_LEN] == bytes(HEAD_LEN)
    assert all(len(written) % BLOCK_LEN == 0 for written, _ in calls)


@pytest.mark.parametrize("refuses", [refuses_to_open, refuses_to_write])
def test_a_file_system_that_refuses_gets_the_file_through_the_cache(
    direct_folder, monkeypatch, refuses
):
    asked = refuses(monkeypatch)
    writer = DirectWriter()
    for name in ("a", "b"):
        given = content(2 * STAGING_LEN)
        writer.write(direct_folder / name, given)
        assert (direct_folder / name).read_bytes() == expected(given)
    # It is not asked again.
    assert asked.count(True) == (1 if refuses is refuses_to_open else 2)


def test_systems_without_direct_writing_go_through_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(new_file, "_DIRECT", 0)
    calls = write_calls(monkeypatch)
    given = content(STAGING_LEN)
    DirectWriter().write(tmp_path / "a", given)
    assert (tmp_path / "a").read_bytes() == expected(given)
    assert not calls


def test_what_is_there_stays_as_it_is(tmp_path):
    (tmp_path / "a").write_bytes(b"precious")
    for write in (write_cached, DirectWriter().write):
        with pytest.raises(FileExistsError):
            write(tmp_path / "a", content(10))
    assert (tmp_path / "a").read_bytes() == b"precious"


@pytest.mark.parametrize("beyond", [0, 512])
def test_a_disk_that_takes_a_part_is_asked_for_the_rest(
    direct_folder, monkeypatch, beyond
):
    pwrite = os.pwrite
    monkeypatch.setattr(
        new_file.os,
        "pwrite",
        lambda file, part, place: pwrite(file, part[: BLOCK_LEN + beyond], place),
    )
    given = content(2 * STAGING_LEN + 5)
    DirectWriter().write(direct_folder / "a", given)
    assert (direct_folder / "a").read_bytes() == expected(given)


@pytest.mark.parametrize("num_taken", [0, 512])
def test_a_disk_that_takes_nothing_more_is_full(direct_folder, monkeypatch, num_taken):
    monkeypatch.setattr(new_file.os, "pwrite", lambda *_: num_taken)
    with pytest.raises(OSError, match="No space left"):
        DirectWriter().write(direct_folder / "a", content(BLOCK_LEN))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_leaves_no_file_and_is_not_tried_through_the_cache(
    open_disk, folder, direct_folder, monkeypatch, caplog, code
):
    tier = open_disk(keeps_pages=False)
    tier.write(record(1))

    def full(file, part, place):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(new_file.os, "pwrite", full)
    tier.write(record(2))
    monkeypatch.undo()

    assert tier.stats().failed_writes == 1
    assert "is paused" in caplog.text
    assert len(record_files(folder)) == 1
    assert read(tier, 1) == payload(1)
    assert read(tier, 2) is None


@pytest.mark.parametrize("cipher", [None, RecordCipher(bytes(range(32)))])
def test_a_tier_reads_what_it_has_written_past_the_cache(open_disk, cipher):
    lens = [1, 120, 130, 384, 1_000]
    tier = open_disk(1 << 20, keeps_pages=False, cipher=cipher)
    for number, num_tokens in enumerate(lens):
        tier.write(record(number, num_tokens=num_tokens, side_data=b"of a document"))
    tier.close()
    tier = open_disk(1 << 20, cipher=cipher)
    for number, num_tokens in enumerate(lens):
        assert read(tier, number) == payload(number, num_tokens=num_tokens)
    assert tier.stats().corrupt == 0
