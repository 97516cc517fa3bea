"""A server's own tokenizer, over HTTP, and what else a client must know of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from daric_rag.errors import ConfigError, UnsupportedModelError, WireError
from daric_rag.tokenization import TokenCache, Tokenizer

__all__ = [
    "FACTS_PATH",
    "TEMPLATE_PATH",
    "RemoteTokenizer",
    "ServerFacts",
    "check_tokenizer",
    "file_encoder",
]

# Below /v1, which the server's API key guards.
FACTS_PATH = "/v1/daric"
TEMPLATE_PATH = "/v1/daric/chat_template"

_MAX_CACHED_CHARS = 1024 * 1024

# Scripts, digits, cases and spaces, at which vocabularies differ.
_SAMPLE = "Ää 日本語, 1234567\n\n  the End. "

Ask = Callable[[str, str, Any], Any]
"""Asks the server: method, path and JSON content to the JSON that it answers."""

Encoder = Callable[[str, bool], list[int]]
"""A text, and whether to add special tokens, to ids."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server with daric_rag says of itself.

    Attributes:
        reuses: Whether it runs our connector.
        block_size: Tokens per KV block.
        vocab_size: Token ids lie below it.
        scheduling_policy: ``"fcfs"`` or ``"priority"``.
        bos_token_id: See `daric_rag.tokenization.Tokenizer`; so are the next two.
        eos_token_id: End-of-turn token.
        unk_token_id: Token for what the vocabulary lacks.
        has_chat_template: Whether the model has one.
        opening_ids: Of the empty text, as the tokenizer begins texts.
        added_tokens: By id, each token's text and whether it is a special one.
    """

    reuses: bool
    block_size: int
    vocab_size: int
    scheduling_policy: str
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    has_chat_template: bool
    opening_ids: tuple[int, ...]
    added_tokens: dict[int, tuple[str, bool]]

    @classmethod
    def from_dict(cls, data: Any) -> ServerFacts:
        """Read what `to_dict` of the server gave; fields added since are ignored.

        Raises:
            WireError: Something is missing or malformed.
        """
        try:
            fields = {name: data[name] for name in cls.__dataclass_fields__}
            fields["opening_ids"] = tuple(fields["opening_ids"])
            fields["added_tokens"] = {
                int(index): (str(text), bool(special))
                for index, (text, special) in fields["added_tokens"].items()
            }
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WireError(
                f"the server describes itself in another form ({error!r}); install "
                f"the same daric_rag on client and server"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class RemoteTokenizer:
    """Client process. The server's tokenizer; every new text is a request to it.

    Used under `InputProcessor`'s lock, which also remembers documents. Special tokens
    and the template are the server's own, so that ids are those of an embedded engine.

    Args:
        facts: Of the server.
        model: The model's name there.
        ask: Asks the server.
        encoder: Encodes texts instead of the server; see `file_encoder`.
    """

    def __init__(
        self, facts: ServerFacts, model: str, ask: Ask, encoder: Encoder | None = None
    ) -> None:
        """Ask nothing yet."""
        self._facts, self._ask = facts, ask
        self._encoder = encoder or partial(served_ids, ask, model)
        self._known = {flag: TokenCache(_MAX_CACHED_CHARS) for flag in (False, True)}
        self.bos_token_id = facts.bos_token_id
        self.eos_token_id = facts.eos_token_id
        self.unk_token_id = facts.unk_token_id
        self.chat_template = "the server's" if facts.has_chat_template else None
        self.added_tokens_decoder: Mapping[int, Any] = {
            index: SimpleNamespace(content=text, special=special)
            for index, (text, special) in facts.added_tokens.items()
        }

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's ids."""
        if not text:
            return list(self._facts.opening_ids) if add_special_tokens else []
        known = self._known[add_special_tokens]
        ids = known.get(text)
        if ids is None:
            ids = self._encoder(text, add_special_tokens)
            known.put(text, ids)
        return list(ids)

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str:
        """Return the rendered conversation; of `variables` servers know ``tools``."""
        content = {
            "messages": conversation,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        answer = self._ask("POST", TEMPLATE_PATH, content)
        if not isinstance(answer, Mapping) or not {"text", "error"} & answer.keys():
            raise WireError("the server's chat template gave no text")
        if "error" in answer:
            raise UnsupportedModelError(str(answer["error"]))
        return str(answer["text"])


def served_ids(ask: Ask, model: str, text: str, add_special_tokens: bool) -> list[int]:
    """Return a text's ids as a server's own tokenizer gives them.

    Raises:
        WireError: The answer holds none.
    """
    content = {
        "model": model,
        "prompt": text,
        "add_special_tokens": add_special_tokens,
    }
    answer = ask("POST", "/tokenize", content)
    ids = answer.get("tokens") if isinstance(answer, Mapping) else None
    if not isinstance(ids, list) or not all(type(index) is int for index in ids):
        raise WireError("the server's /tokenize answered without token ids")
    return ids


def file_encoder(path: str | os.PathLike[str]) -> Encoder:
    """Return an encoder from a tokenizer's file; needs the package ``tokenizers``.

    Args:
        path: A ``tokenizer.json``, or a model's folder with one.

    Raises:
        ConfigError: The package or the file is missing, or the file is another one.
    """
    try:
        from tokenizers import Tokenizer as FileTokenizer
    except ImportError as error:
        raise ConfigError(
            "a tokenizer's file is read by the package tokenizers: pip install "
            "tokenizers, or leave tokenizer= out to have the server tokenise"
        ) from error
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        tokenizer = FileTokenizer.from_str(file.read_text("utf-8"))
    except Exception as error:  # Its own are no subclass of anything more telling.
        raise ConfigError(f"{file} cannot be read as a tokenizer ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = tokenizer.encode(
            text, add_special_tokens=add_special_tokens
        ).ids
        return ids

    return encode


def check_tokenizer(tokenizer: Tokenizer, model: str, ask: Ask) -> None:
    """Refuse a tokenizer that is not the served model's, which would read nonsense.

    Raises:
        ConfigError: A sample's ids differ.
    """
    for add_special_tokens in (False, True):
        ours = tokenizer.encode(_SAMPLE, add_special_tokens=add_special_tokens)
        if ours != served_ids(ask, model, _SAMPLE, add_special_tokens):
            raise ConfigError(
                f"tokenizer= gives other ids than the server's for {model}: pass the "
                f"tokenizer of that model, or leave it out"
            )
