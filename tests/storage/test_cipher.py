"""Encryption at rest: authentic or an error, and no way out for the key."""

import mmap
import pickle
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from daric_rag.errors import ConfigError, StoreError
from daric_rag.storage.cipher import MAX_PLAIN_LEN, OVERHEAD, RecordCipher
from daric_rag.storage.format import RecordError

aead = pytest.importorskip(
    "cryptography.hazmat.primitives.ciphers.aead", reason="the extra `encryption`"
)

KEY = bytes(range(100, 132))
AAD = b"header"


def open_(cipher, aad, sealed):
    sealed = memoryview(sealed)
    out = bytearray(len(sealed) - OVERHEAD)
    cipher.open_into(aad, sealed, memoryview(out))
    return bytes(out)


# ----------------------------------------------------------------------- the cipher


def test_a_published_vector_opens():
    # AES-256-GCM, test case 14 of the mode's specification.
    sealed = bytes(12) + bytes.fromhex(
        "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"
    )

    assert open_(RecordCipher(bytes(32)), b"", sealed) == bytes(16)


def test_what_is_sealed_is_nonce_ciphertext_tag():
    plain = bytes(range(40))

    sealed = bytes(RecordCipher(KEY).seal(AAD, plain))

    assert len(sealed) == len(plain) + OVERHEAD
    assert aead.AESGCM(KEY).decrypt(sealed[:12], sealed[12:], AAD) == plain


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 4097])
def test_open_gives_back_what_was_sealed(nbytes):
    plain = bytes(position % 251 for position in range(nbytes))
    cipher = RecordCipher(KEY)

    assert open_(cipher, AAD, cipher.seal(AAD, plain)) == plain


def test_the_bytes_of_wider_elements_are_sealed():
    cipher = RecordCipher(KEY)
    elements = memoryview(bytes(range(12))).cast("H")

    assert open_(cipher, AAD, cipher.seal(AAD, elements)) == bytes(range(12))


def test_two_seals_of_one_record_share_no_nonce():
    cipher = RecordCipher(KEY)

    nonces = {bytes(cipher.seal(AAD, b"same")[:12]) for _ in range(100)}

    assert len(nonces) == 100


@pytest.mark.parametrize("position", range(OVERHEAD + 5))
def test_every_sealed_byte_is_authenticated(position):
    cipher = RecordCipher(KEY)
    sealed = bytearray(cipher.seal(AAD, b"plain"))
    sealed[position] ^= 1

    with pytest.raises(RecordError) as caught:
        open_(cipher, AAD, sealed)

    assert caught.value.kind == "checksum"


@pytest.mark.parametrize("aad", [b"", b"Header", b"header\0"])
def test_a_record_under_another_header_does_not_open(aad):
    cipher = RecordCipher(KEY)

    with pytest.raises(RecordError, match="not authentic"):
        open_(cipher, aad, cipher.seal(AAD, b"plain"))


def test_a_record_of_another_key_does_not_open():
    sealed = RecordCipher(KEY).seal(AAD, b"plain")

    with pytest.raises(RecordError, match="another key"):
        open_(RecordCipher(bytes(32)), AAD, sealed)


def test_no_forged_byte_stays_in_the_buffer():
    cipher = RecordCipher(KEY)
    sealed = bytearray(cipher.seal(AAD, bytes(range(64))))
    sealed[-1] ^= 1
    out = bytearray(b"x" * 64)

    with pytest.raises(RecordError):
        cipher.open_into(AAD, memoryview(sealed), memoryview(out))

    assert out == bytes(64)


@pytest.mark.parametrize(
    ("sealed_len", "out_len"),
    [(0, 0), (OVERHEAD - 1, 0), (OVERHEAD + 4, 5), (OVERHEAD + 6, 5)],
)
def test_a_record_cut_short_is_an_error_of_the_record(sealed_len, out_len):
    sealed = memoryview(bytes(sealed_len))

    with pytest.raises(RecordError) as caught:
        RecordCipher(KEY).open_into(AAD, sealed, memoryview(bytearray(out_len)))

    assert caught.value.kind == "length"


def test_a_buffer_of_another_length_is_refused():
    sealed = memoryview(bytearray(OVERHEAD + 4))

    with pytest.raises(StoreError, match=f"pass a buffer of {OVERHEAD + 5}"):
        RecordCipher(KEY).seal_into(AAD, b"plain", sealed)


def test_what_could_never_be_opened_is_not_sealed():
    # Mapped and not touched: it takes no memory.
    plain = memoryview(mmap.mmap(-1, MAX_PLAIN_LEN + 1))

    with pytest.raises(StoreError, match="lower max_segment_len"):
        RecordCipher(KEY).seal(AAD, plain)


def test_threads_share_a_cipher():
    cipher = RecordCipher(KEY)

    def wrong(number):
        plain = bytes([number]) * 300_000
        aad = bytes([number])
        return sum(
            open_(cipher, aad, cipher.seal(aad, plain)) != plain for _ in range(20)
        )

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(wrong, range(4))) == [0, 0, 0, 0]


# -------------------------------------------------------------------------- the key


def test_the_id_tells_keys_apart_and_is_stable():
    one, same, other = (RecordCipher(key).key_id for key in (KEY, KEY, bytes(32)))

    assert one == same != other


def test_neither_text_nor_pickle_holds_the_key():
    cipher = RecordCipher(KEY)

    assert KEY.hex() not in repr(cipher)
    assert KEY.hex() not in cipher.key_id
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(cipher)


@pytest.mark.parametrize("num_bytes", [0, 16, 31, 33])
def test_a_key_has_32_bytes(num_bytes):
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        RecordCipher(bytes(num_bytes))


@pytest.mark.parametrize("module", [None, types.SimpleNamespace(AESGCM=object)])
def test_a_missing_or_old_package_is_named(monkeypatch, module):
    monkeypatch.setitem(sys.modules, aead.__name__, module)

    with pytest.raises(StoreError, match=r'pip install "daric-rag\[encryption\]"'):
        RecordCipher(KEY)
