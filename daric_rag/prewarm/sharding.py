"""Which worker of several computes a document, without asking the others."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import NewType, Self

from daric_rag.errors import ConfigError

__all__ = ["Shard", "TextHash", "text_hash"]

TextHash = NewType("TextHash", bytes)
"""Names a document by its rendered text; 16 bytes."""

_PERSON_TEXT = b"daric.text.1"


def text_hash(text: str) -> TextHash:
    """Name a document by its text as it stands in prompts.

    Needs no tokenizer, so that workers can tell their documents from others' at once.
    """
    # Half a character is refused later, with its place; here it must only be told.
    content = text.encode("utf-8", "surrogatepass")
    return TextHash(
        hashlib.blake2b(content, digest_size=16, person=_PERSON_TEXT).digest()
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several equal shares of a corpus; equal texts lie in the same one.

    Attributes:
        index: Counted from 1.
        count: How many there are.

    Raises:
        ConfigError: There is no such share.
    """

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        """Refuse a share that does not exist."""
        if not 1 <= self.index <= self.count:
            raise ConfigError(
                f"there is no shard {self.index} of {self.count}: count from 1, as in "
                f"--shard 3/8"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what ``"3/8"`` means.

        Raises:
            ConfigError: It means nothing.
        """
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
        if found is None:
            raise ConfigError(f"{text!r} is no shard: write it as 3/8, counted from 1")
        return cls(int(found[1]), int(found[2]))

    def holds(self, name: TextHash) -> bool:
        """Whether a document is this worker's."""
        return int.from_bytes(name[:8], "big") % self.count == self.index - 1

    def __str__(self) -> str:
        """Return it as it is parsed."""
        return f"{self.index}/{self.count}"
