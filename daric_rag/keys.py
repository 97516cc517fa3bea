"""All hashing in daric_rag: what names a model, a document and a segment.

Every digest is blake2b with 32 bytes and its own ``person`` string, so that a
document hash can never collide with a segment key over the same tokens. Token ids
are packed as little-endian uint32, hence the same name on every machine.

A segment's key is chained (section 3.3.2)::

    parent of a chunk's first segment = ModelFingerprint (the root)
    key[i] = digest(key[i - 1], token ids of segment i)

so one key stands for the model, the namespace and every token of the chunk up to the
segment's end. It does not depend on where in a prompt the chunk stands.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NewType

from daric_rag.errors import ConfigError, PromptError

__all__ = [
    "KEY_BYTES",
    "DocumentHash",
    "ModelFingerprint",
    "Scalar",
    "SegmentKey",
    "cache_salt",
    "chunking_id",
    "document_hash",
    "model_fingerprint",
    "pack_token_ids",
    "segment_keys",
    "template_hash",
]

KEY_BYTES = 32

DocumentHash = NewType("DocumentHash", bytes)
SegmentKey = NewType("SegmentKey", bytes)
ModelFingerprint = NewType("ModelFingerprint", bytes)

Scalar = str | int | float | bool | None

# blake2b takes at most 16 bytes here. The digit is the scheme's version: raise it
# whenever the bytes that are digested change, and old stores simply miss.
_PERSON_MODEL = b"daric.model.1"
_PERSON_DOCUMENT = b"daric.document.1"
_PERSON_SEGMENT = b"daric.segment.1"
_PERSON_CHUNKING = b"daric.chunking.1"
_PERSON_SALT = b"daric.salt.1"
_PERSON_TEMPLATE = b"daric.template.1"


def pack_token_ids(ids: Sequence[int]) -> bytes:
    """Return the ids as little-endian uint32, 4 bytes each.

    Raises:
        PromptError: An id is not an int in [0, 2**32).
    """
    try:
        # "I" is 4 bytes on every platform CPython supports; "L" is not. The tuple keeps
        # array from taking a buffer such as bytes for ready-made machine words.
        packed = array("I", tuple(ids))
    except (OverflowError, TypeError) as error:
        raise PromptError(
            f"token ids must be ints in [0, 2**32); pass the tokenizer's ids ({error})"
        ) from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def model_fingerprint(fields: Mapping[str, Scalar]) -> ModelFingerprint:
    """Digest everything that decides the bytes of a model's KV cache.

    The order of the fields does not matter; 1, 1.0, True and "1" all differ.

    Args:
        fields: For example weights identity, dtype, RoPE parameters, TP size and
            rank, record-format version and namespace.

    Raises:
        ConfigError: There is no field, or a value has no canonical form.
    """
    if not fields:
        raise ConfigError(
            "a model fingerprint needs at least one field, such as the model's name"
        )
    return ModelFingerprint(_digest(_PERSON_MODEL, _canonical(fields)))


def document_hash(token_ids: Sequence[int]) -> DocumentHash:
    """Name a whole chunk by its token ids alone, whatever the model.

    Raises:
        PromptError: An id is not an int in [0, 2**32).
    """
    return DocumentHash(_digest(_PERSON_DOCUMENT, pack_token_ids(token_ids)))


def segment_keys(
    root: ModelFingerprint, token_ids: Sequence[int], max_segment_len: int
) -> tuple[SegmentKey, ...]:
    """Return the keys of one chunk's segments, first segment first.

    Args:
        root: The model's fingerprint, parent of the first segment.
        token_ids: The chunk's ids (with its trailing padding, if it has any).
        max_segment_len: Longest segment, in tokens. Every segment but the last has
            exactly this length, as `layout.cut_segments` cuts them.

    Raises:
        PromptError: An id is not an int in [0, 2**32).
        ConfigError: `max_segment_len` is below 1.
    """
    if max_segment_len < 1:
        raise ConfigError(f"max_segment_len is {max_segment_len}; it must be >= 1")
    packed = pack_token_ids(token_ids)
    stride = 4 * max_segment_len
    keys: list[SegmentKey] = []
    parent: bytes = root
    for offset in range(0, len(packed), stride):
        # The parent has a fixed length, so parent + ids is unambiguous.
        parent = _digest(_PERSON_SEGMENT, parent + packed[offset : offset + stride])
        keys.append(SegmentKey(parent))
    return tuple(keys)


def chunking_id(spans: Sequence[tuple[int, int]]) -> str:
    """Return a hex digest of where a prompt's chunks begin and end.

    The same tokens cut differently have different KV, and vLLM's block hashes see
    only the tokens.
    """
    payload = json.dumps([list(span) for span in spans], separators=(",", ":"))
    return _digest(_PERSON_CHUNKING, payload.encode()).hex()


def cache_salt(namespace: str, policy: Mapping[str, Scalar], chunking_id: str) -> str:
    """Return the salt that keeps approximate blocks away from exact requests.

    Args:
        namespace: Tenant.
        policy: What decides the recompute set, as `DaricConfig.policy_fields`
            (with the request's own choice of reuse beside it).
        chunking_id: From `chunking_id`, or the id of a template or conversation whose
            prompts only ever grow by whole chunks.

    Returns:
        64 hex digits, equal exactly when all three arguments are.

    Raises:
        ConfigError: A policy value has no canonical form.
    """
    payload = _canonical(
        {"namespace": namespace, "chunking": chunking_id}
        | {f"policy.{name}": value for name, value in policy.items()}
    )
    return _digest(_PERSON_SALT, payload).hex()


def template_hash(system: str | None, documents: Sequence[str]) -> str:
    """Return a hex digest of how a prompt builder writes systems and documents.

    Args:
        system: Its system text.
        documents: Its document template, or what that makes of sample documents.
    """
    payload = json.dumps([system, list(documents)], separators=(",", ":"))
    return _digest(_PERSON_TEMPLATE, payload.encode()).hex()


def _canonical(fields: Mapping[Any, object]) -> bytes:
    for name, value in fields.items():
        # json would stringify keys and accept lists: both have no unique form here.
        if not isinstance(name, str) or not isinstance(
            value, str | int | float | bool | None
        ):
            raise ConfigError(
                f"field {name!r} has value {value!r}; names must be str and values "
                f"str, int, float, bool or None"
            )
    try:
        text = json.dumps(
            dict(fields), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
    except ValueError as error:
        raise ConfigError(f"NaN and infinity cannot be hashed: {error}") from error
    return text.encode("ascii")


def _digest(person: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=KEY_BYTES, person=person).digest()
