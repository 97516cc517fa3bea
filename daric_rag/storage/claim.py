"""Whose folder it is: the marker that makes it a store, and names the key."""

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from daric_rag.errors import StoreError
from daric_rag.storage.format import RecordError
from daric_rag.storage.record_file import TEMPORARY_SUFFIX, read_header
from daric_rag.storage.recovery import discard_index, discard_records, list_files

__all__ = ["MARKER", "check_marker", "check_names", "claim"]

_logger = logging.getLogger(__name__)

_MARKER_PREFIX: Final = "DARIC_STORE_"
_VERSION: Final = 2
MARKER: Final = f"{_MARKER_PREFIX}{_VERSION}"
_MARKER_TEXT: Final = (
    "A store of daric_rag. All of it can be deleted while no program uses it;\n"
    "deleting it costs the time to compute the records again.\n"
    "key: {key_id}\n"
)
_MARKER_KEY: Final = re.compile(r"^key: (\S+)\n", re.MULTILINE)
_NO_KEY: Final = "none"

_OUR_NAME: Final = re.compile(
    r"[0-9a-f]{2}|cache\.db(\.old)?(-wal|-shm)?|writers|DARIC_STORE_\d+(\.tmp)?"
    r"|prewarm_templates\.json(\.\d+\.tmp)?"
)


def claim(directory: Path, key_id: str | None) -> None:
    """Mark a folder as ours, unless it is; of an earlier version, nothing stays.

    Raises:
        StoreError: If it belongs to something else, to a later version or another key.
        OSError: If it cannot be written.
    """
    if check_marker(directory, key_id):
        return
    # An empty folder that somebody made beforehand may be open to all.
    directory.chmod(0o700)
    old = directory / f"{_MARKER_PREFIX}1"
    if old.exists():
        _logger.warning(
            "the records in %s are of an earlier version, which no present engine can "
            "use: they are deleted",
            directory,
        )
        discard_index(directory)
        discard_records(directory)
    _write_marker(directory, key_id)
    old.unlink(missing_ok=True)


def _write_marker(directory: Path, key_id: str | None) -> None:
    temporary = directory / (MARKER + ".tmp")
    with open(temporary, "w", encoding="ascii") as file:
        file.write(_MARKER_TEXT.format(key_id=key_id or _NO_KEY))
        file.flush()
        # After a power cut nothing else would tell the key of what was synced.
        os.fsync(file.fileno())
    temporary.rename(directory / MARKER)
    with suppress(OSError):  # Some file systems sync no folders.
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def check_marker(directory: Path, key_id: str | None) -> bool:
    """Whether the folder has our marker, whole; if not, the records are asked.

    Raises:
        StoreError: If marker or records are of another key, or the folder is not ours.
    """
    check_names(directory)
    try:
        text = (directory / MARKER).read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        text = ""
    found = _MARKER_KEY.search(text)
    is_old = not text and (directory / f"{_MARKER_PREFIX}1").exists()
    is_sealed = None if found or is_old else _are_records_sealed(directory)
    if found is None and is_sealed in (None, key_id is not None):
        return False
    lost = "that its damaged marker named" if is_sealed else _NO_KEY
    stored = found[1] if found else lost
    if stored == (key_id or _NO_KEY):
        return True
    if stored == _NO_KEY:
        raise StoreError(
            f"the store in {directory} is not encrypted: open it without a key, or "
            "choose a new folder for an encrypted one"
        )
    given = f"the key given is {key_id}" if key_id else "no key is given"
    raise StoreError(
        f"the store in {directory} is encrypted with the key {stored} and {given}: "
        "set DARIC_STORE_KEY or DARIC_STORE_KEY_FILE to that key, or choose another "
        "folder"
    )


def _are_records_sealed(directory: Path) -> bool | None:
    """Whether the first record that can be read is encrypted; None if none can."""
    for name, path in list_files(directory):
        if not name.endswith(TEMPORARY_SUFFIX):
            with suppress(RecordError, OSError):
                return read_header(path)[0].encrypted
    return None


def check_names(directory: Path) -> None:
    """Check that a folder is empty, or ours and not of a later version.

    Raises:
        StoreError: If it is neither.
    """
    names = [path.name for path in directory.iterdir()]
    versions = [
        int(name.removeprefix(_MARKER_PREFIX))
        for name in names
        if re.fullmatch(_MARKER_PREFIX + r"\d{1,9}", name)
    ]
    if max(versions, default=0) > _VERSION:
        raise StoreError(
            f"the store in {directory} was made by a later version of daric_rag: "
            "upgrade daric_rag, or choose another folder"
        )
    # A folder that was emptied under a running process holds our files and no marker.
    if not versions and not all(map(_OUR_NAME.fullmatch, names)):
        raise StoreError(
            f"{directory} is not empty and no store of daric_rag: choose an empty or "
            "a new folder"
        )
