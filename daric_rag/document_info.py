"""What a document's last segment says about it, for those who look after a store.

It is the record's side data: small JSON, so that an operator's listing needs neither
tokenizer nor engine::

    {"document": "<hex>", "title": "...", "num_tokens": 512, "namespace": "default"}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from daric_rag.keys import DocumentHash, document_hash
from daric_rag.layout import MAX_TITLE_LEN

__all__ = ["DocumentInfo", "decode_document", "encode_document"]


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """A document as its last segment describes it.

    Attributes:
        document_hash: Names it by its token ids, whatever the model.
        title: For people; at most `MAX_TITLE_LEN` characters, may be empty.
        num_tokens: Of the whole document.
        namespace: The tenant it was stored for.
    """

    document_hash: DocumentHash
    title: str
    num_tokens: int
    namespace: str

    @classmethod
    def of(cls, token_ids: Sequence[int], title: str, namespace: str) -> DocumentInfo:
        """Describe a document by its ids."""
        return cls(document_hash(token_ids), title, len(token_ids), namespace)


def encode_document(info: DocumentInfo) -> bytes:
    """Return the side data; a title that is too long is cut."""
    fields = {
        "document": info.document_hash.hex(),
        "title": info.title[:MAX_TITLE_LEN],
        "num_tokens": info.num_tokens,
        "namespace": info.namespace,
    }
    # ASCII escapes: a title may hold half a character, which UTF-8 has no bytes for.
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_document(side_data: bytes) -> DocumentInfo | None:
    """Read side data; None where there is none or it is not what we write."""
    try:
        fields = json.loads(side_data)
        info = DocumentInfo(
            DocumentHash(bytes.fromhex(fields["document"])),
            fields["title"],
            fields["num_tokens"],
            fields["namespace"],
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    plain = (
        type(info.title) is str
        and type(info.num_tokens) is int
        and type(info.namespace) is str
    )
    return info if plain else None
