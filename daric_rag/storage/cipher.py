"""Optional encryption at rest: AES-256-GCM over a record, and where its key is from.

A sealed record is `nonce | ciphertext | tag`, `OVERHEAD` bytes longer than what it
hides. What is passed as `aad` is authenticated with it and not stored here: whoever
opens a record must pass the same again, so a record moved to another key's file, or
under another header, is found out.

What it does not hide: how many records there are, how long, and when they were used.
A record put back to an older version of itself is authentic.
"""

import base64
import hashlib
import os
import stat
import string
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from daric_rag.errors import ConfigError, StoreError
from daric_rag.storage.format import RecordError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_LEN: Final = 32
NONCE_LEN: Final = 12
TAG_LEN: Final = 16
OVERHEAD: Final = NONCE_LEN + TAG_LEN

KEY_VARIABLE: Final = "DARIC_STORE_KEY"
KEY_FILE_VARIABLE: Final = "DARIC_STORE_KEY_FILE"

# The library refuses longer input, and counts the tag when it decrypts: a longer
# record could be written and never be read.
MAX_PLAIN_LEN: Final = (1 << 31) - 1 - OVERHEAD

# More than any form of a key takes; a key file that is longer is a wrong file.
_MAX_KEY_FILE_LEN: Final = 128
# Group may read: that is how orchestrators hand a mounted secret to a service.
_FORBIDDEN_MODE: Final = stat.S_IWGRP | stat.S_IRWXO

_PRINTABLE: Final = frozenset(string.printable.encode())
_KEY_FORMS: Final = "64 hex digits or base64 of 32 bytes (`openssl rand -hex 32`)"


class RecordCipher:
    """Seals and opens records with one key; may be used from many threads at once.

    Neither the object nor its errors show the key.

    Args:
        key: 32 random bytes.

    Attributes:
        key_id: Hex text that differs for two keys and reveals neither.

    Raises:
        ConfigError: If the key has another length.
        StoreError: If the package `cryptography` is missing or too old.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_LEN:
            raise ConfigError(
                f"the store's key has {len(key)} bytes and AES-256 needs {KEY_LEN}: "
                f"make one with `openssl rand -hex {KEY_LEN}`"
            )
        self._aead = _load_aead()(key)
        digest = hashlib.blake2b(key=key, digest_size=16, person=b"daric key id")
        self.key_id: str = digest.hexdigest()

    def __repr__(self) -> str:
        return f"RecordCipher(key_id={self.key_id!r})"

    def seal(self, aad: bytes, plain: bytes | bytearray | memoryview) -> memoryview:
        """Encrypt and authenticate; releases the GIL while it runs.

        Args:
            aad: Authenticated and not stored; `open_into` needs the same.
            plain: Contiguous bytes, `MAX_PLAIN_LEN` at most.

        Returns:
            `nonce | ciphertext | tag` in a new buffer, read-only.

        Raises:
            StoreError: If `plain` is too long.
        """
        plain = _checked(plain)
        sealed = memoryview(bytearray(len(plain) + OVERHEAD))
        self.seal_into(aad, plain, sealed)
        return sealed.toreadonly()

    def seal_into(
        self, aad: bytes, plain: bytes | bytearray | memoryview, sealed: memoryview
    ) -> None:
        """`seal` into a buffer that the caller has, which saves its page faults.

        Args:
            aad: Authenticated and not stored; `open_into` needs the same.
            plain: Contiguous bytes, `MAX_PLAIN_LEN` at most.
            sealed: Writable, `OVERHEAD` bytes longer; must not overlap `plain`.

        Raises:
            StoreError: If `plain` is too long or `sealed` has another length.
        """
        plain = _checked(plain)
        if len(sealed) != len(plain) + OVERHEAD:
            raise StoreError(
                f"{len(plain)} bytes do not seal into {len(sealed)}: pass a buffer of "
                f"{len(plain) + OVERHEAD}"
            )
        # Random, for processes that share a key share no counter. Two equal nonces
        # would reveal how two records differ and let others be forged: after 2**32
        # records of one key, where NIST SP 800-38D draws the line, the odds of that
        # are 2**-33. At 6 MB each those are 25 PB written; a store that gets there
        # needs a new key and a new folder.
        nonce = os.urandom(NONCE_LEN)
        sealed[:NONCE_LEN] = nonce
        self._aead.encrypt_into(nonce, plain, aad, sealed[NONCE_LEN:])

    def open_into(self, aad: bytes, sealed: memoryview, out: memoryview) -> None:
        """Check and decrypt with no copy between; releases the GIL while it runs.

        Args:
            aad: What `seal` was given.
            sealed: `nonce | ciphertext | tag`.
            out: Writable, `OVERHEAD` bytes shorter; must not overlap `sealed`. Holds
                the plain bytes afterwards, and only zeros if they were not authentic.

        Raises:
            RecordError: `length` if the two lengths do not go together, `checksum`
                if `sealed` or `aad` was changed or belongs to another key.
        """
        from cryptography.exceptions import InvalidTag

        if len(out) > MAX_PLAIN_LEN or len(sealed) != len(out) + OVERHEAD:
            raise RecordError(
                "length", f"{len(sealed)} sealed bytes do not hold {len(out)}"
            )
        try:
            self._aead.decrypt_into(sealed[:NONCE_LEN], sealed[NONCE_LEN:], aad, out)
        except InvalidTag as error:
            # The library decrypts before it compares the tags, and leaves in `out`
            # what a forger chose.
            out[:] = bytes(len(out))
            raise RecordError(
                "checksum", "not authentic: damaged, or sealed with another key"
            ) from error


def load_cipher(
    key_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> RecordCipher | None:
    """Make the cipher whose key the caller or the environment names.

    At most one of `key_file`, `DARIC_STORE_KEY` (64 hex digits or base64) and
    `DARIC_STORE_KEY_FILE` may be given; which of two was meant is not guessed.

    Args:
        key_file: Holds 32 raw bytes, 64 hex digits or base64. Only its owner may
            write it, and nobody but owner and group may read it.
        environ: Where to look for the two variables.

    Returns:
        None if no key is given at all.

    Raises:
        ConfigError: If two keys are given, or what is given is no key.
        StoreError: If the file cannot be read or is open to others, or the package
            `cryptography` is missing.
    """
    given: dict[str, str | os.PathLike[str]] = {
        name: environ[name]
        for name in (KEY_VARIABLE, KEY_FILE_VARIABLE)
        if name in environ
    }
    if key_file is not None:
        given["the key file argument"] = key_file
    if not given:
        return None
    if len(given) > 1:
        raise ConfigError(
            f"the store's key comes from {' and '.join(given)}: keep one of them"
        )
    ((source, value),) = given.items()
    # Empty is what a failed `$(cat secret)` leaves. Taking it for "no key" would
    # write in the clear what was meant to be sealed.
    if not os.fspath(value):
        raise ConfigError(f"{source} is empty: give it a value or leave it out")
    if source == KEY_VARIABLE:
        return RecordCipher(_parse_text(os.fsencode(value), KEY_VARIABLE))
    return RecordCipher(_read_key_file(os.fspath(value)))


def _checked(plain: bytes | bytearray | memoryview) -> memoryview:
    view = memoryview(plain).cast("B")
    if len(view) > MAX_PLAIN_LEN:
        raise StoreError(
            f"a record of {len(view)} bytes cannot be encrypted, the limit is "
            f"{MAX_PLAIN_LEN}: lower max_segment_len"
        )
    return view


def _load_aead() -> "type[AESGCM]":
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        AESGCM.decrypt_into  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise StoreError(
            "an encrypted store needs the package cryptography, 47 or later: "
            'pip install "daric-rag[encryption]"'
        ) from error
    return AESGCM


def _read_key_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_MAX_KEY_FILE_LEN + 1)
    except OSError as error:
        raise StoreError(
            f"the store's key file {path!r} cannot be read ({error.strerror}): name a "
            "file that this user may read"
        ) from error
    if mode & _FORBIDDEN_MODE:
        raise StoreError(
            f"the store's key file {path!r} is open to others (mode {mode:04o}): "
            f"chmod 600 it, or 640 to share it with its group"
        )
    # Random bytes are all printable once in 10**12: such a file holds a password, or
    # half the hex digits, with far less than 256 bits in it.
    if len(data) == KEY_LEN and not _PRINTABLE.issuperset(data):
        return data
    return _parse_text(data, f"the key file {path!r}")


def _parse_text(data: bytes, source: str) -> bytes:
    """A key from its text; never puts the text into an error, not even chained."""
    text = data.strip()
    key = b""
    with suppress(ValueError):
        if len(text) == 2 * KEY_LEN:
            key = bytes.fromhex(text.decode("ascii"))
        elif len(text) == len(base64.b64encode(bytes(KEY_LEN))):
            key = base64.b64decode(text, altchars=_altchars(text), validate=True)
    if len(key) != KEY_LEN:
        raise ConfigError(
            f"{source} holds {len(text)} characters that are no key: it must be "
            f"{_KEY_FORMS}"
        )
    return key


def _altchars(text: bytes) -> bytes:
    """The two last letters of base64: those of URLs where the text has one."""
    return b"-_" if b"-" in text or b"_" in text else b"+/"
