"""Names of files in a store's folder."""

import os
import re
from typing import Final

__all__ = ["is_record_name", "name_of", "new_record_name", "token_of"]

_RECORD_NAME: Final = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val")


def new_record_name() -> str:
    """A name that no record ever had: those of diskcache, `ab/cd/<28 digits>.val`."""
    return name_of(os.urandom(16))


def name_of(token: bytes) -> str:
    """The name that 16 bytes stand for."""
    digits = token.hex()
    return f"{digits[:2]}/{digits[2:4]}/{digits[4:]}.val"


def token_of(filename: str) -> bytes:
    """The 16 bytes that stand for a name, with half its memory."""
    return bytes.fromhex(filename.removesuffix(".val").replace("/", ""))


def is_record_name(filename: object) -> bool:
    """Whether a name found in a row is one that we give to a record."""
    return isinstance(filename, str) and bool(_RECORD_NAME.fullmatch(filename))
