"""The store's key: every form of it is read, every mistake is refused and not shown."""

import base64
import traceback
from itertools import combinations

import pytest

from daric_rag.errors import ConfigError, StoreError
from daric_rag.storage.cipher import RecordCipher, load_cipher

pytest.importorskip(
    "cryptography.hazmat.primitives.ciphers.aead", reason="the extra `encryption`"
)

KEY = bytes(range(100, 132))
KEY_TEXTS = {
    "hex": KEY.hex(),
    "upper case": KEY.hex().upper(),
    "base64": base64.b64encode(KEY).decode(),
    "line end": KEY.hex() + "\n",
}


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.touch(mode=0o600)
    return path


def test_no_key_is_no_cipher():
    assert load_cipher(environ={}) is None


@pytest.mark.parametrize("text", KEY_TEXTS.values(), ids=KEY_TEXTS)
def test_every_text_of_a_key_is_the_same_key(text, key_file):
    key_file.write_text(text)
    environ = {"DARIC_STORE_KEY": text}

    ids = {load_cipher(key_file, {}).key_id, load_cipher(environ=environ).key_id}

    assert ids == {RecordCipher(KEY).key_id}


def test_base64_of_urls_is_base64():
    key = b"\xfb\xff\xbf" * 10 + b"\xfb\xff"
    text = base64.urlsafe_b64encode(key).decode()
    assert "-" in text
    assert "_" in text

    cipher = load_cipher(environ={"DARIC_STORE_KEY": text})

    assert cipher.key_id == RecordCipher(key).key_id


@pytest.mark.parametrize("end", [b"\n", b" ", b"\xff"])
def test_a_file_may_hold_raw_bytes(key_file, end):
    key = KEY[:-1] + end
    key_file.write_bytes(key)
    environ = {"DARIC_STORE_KEY_FILE": str(key_file)}

    assert load_cipher(environ=environ).key_id == RecordCipher(key).key_id


@pytest.mark.parametrize("pair", list(combinations(range(3), 2)))
def test_two_keys_at_once_are_refused(key_file, pair):
    key_file.write_bytes(KEY)
    environ = {
        name: value
        for place, name, value in [
            (0, "DARIC_STORE_KEY", KEY.hex()),
            (1, "DARIC_STORE_KEY_FILE", str(key_file)),
        ]
        if place in pair
    }

    with pytest.raises(ConfigError, match=r" and .*: keep one of them"):
        load_cipher(key_file if 2 in pair else None, environ)


@pytest.mark.parametrize("name", ["DARIC_STORE_KEY", "DARIC_STORE_KEY_FILE"])
def test_an_empty_variable_does_not_turn_encryption_off(name):
    with pytest.raises(ConfigError, match=f"{name} is empty"):
        load_cipher(environ={name: ""})


BAD_KEYS = {
    "password": "correct horse battery staple",
    "32 letters": "correct horse battery staple now",
    "31 letters and line end": "correct horse battery staple no\n",
    "half a key in hex": KEY[:16].hex(),
    "no hex": "g" + KEY.hex()[1:],
    "spaces in hex": KEY.hex()[:61] + "  1",
    "no base64": "!" + KEY_TEXTS["base64"][1:],
    "base64 of 31 bytes": base64.b64encode(KEY[:31]).decode(),
    "base64 of 33 bytes": base64.b64encode(KEY + b"1").decode(),
    "long": KEY.hex() * 3,
    "not ascii": "é" * 64,
}


@pytest.mark.parametrize("text", BAD_KEYS.values(), ids=BAD_KEYS)
@pytest.mark.parametrize("source", ["variable", "file"])
def test_what_is_no_key_is_refused_and_not_shown(text, source, key_file):
    key_file.write_text(text)
    environ = {"DARIC_STORE_KEY": text} if source == "variable" else {}

    with pytest.raises(ConfigError, match="64 hex digits or base64") as caught:
        load_cipher(None if environ else key_file, environ)

    shown = "".join(traceback.format_exception(caught.value))
    assert text.strip() not in shown
    assert text[:8] not in shown


@pytest.mark.parametrize("content", [b"", KEY + b"\n", KEY[:-1]])
def test_a_file_of_other_raw_bytes_is_no_key(key_file, content):
    key_file.write_bytes(content)

    with pytest.raises(ConfigError, match="64 hex digits or base64"):
        load_cipher(key_file, {})


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o601, 0o666])
def test_a_file_open_to_others_is_refused(key_file, mode):
    key_file.write_bytes(KEY)
    key_file.chmod(mode)

    with pytest.raises(StoreError, match="chmod 600"):
        load_cipher(key_file, {})


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400, 0o440])
def test_a_file_may_be_shared_with_its_group(key_file, mode):
    key_file.write_bytes(KEY)
    key_file.chmod(mode)

    assert load_cipher(key_file, {}).key_id == RecordCipher(KEY).key_id


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(StoreError, match="cannot be read"):
        load_cipher(tmp_path / name, {})
