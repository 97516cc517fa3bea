"""A server's own tokenizer, over HTTP, and what else a client must know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from daric_rag.errors import UnsupportedModelError, WireError
from daric_rag.tokenization import TokenCache

__all__ = ["FACTS_PATH", "TEMPLATE_PATH", "RemoteTokenizer", "ServerFacts"]

# Below /v1, which the server's API key guards.
FACTS_PATH = "/v1/daric"
TEMPLATE_PATH = "/v1/daric/chat_template"

_MAX_CACHED_CHARS = 1024 * 1024

Ask = Callable[[str, str, Any], Any]
"""Asks the server: method, path and JSON content to the JSON that it answers."""


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
    """

    def __init__(self, facts: ServerFacts, model: str, ask: Ask) -> None:
        """Ask nothing yet."""
        self._facts, self._model, self._ask = facts, model, ask
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
            answer = self._ask(
                "POST",
                "/tokenize",
                {
                    "model": self._model,
                    "prompt": text,
                    "add_special_tokens": add_special_tokens,
                },
            )
            ids = _ids(answer)
            known.put(text, ids)
        return list(ids)

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        """Return the rendered conversation."""
        answer = self._ask(
            "POST",
            TEMPLATE_PATH,
            {
                "messages": conversation,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        if "error" in answer:
            raise UnsupportedModelError(answer["error"])
        return str(answer["text"])


def _ids(answer: Any) -> list[int]:
    ids = answer.get("tokens") if isinstance(answer, Mapping) else None
    if not isinstance(ids, list) or not all(type(index) is int for index in ids):
        raise WireError("the server's /tokenize answered without token ids")
    return ids
