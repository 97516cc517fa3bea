"""The settings of `ChatDaric`: fields, their checks, and what they identify."""

from __future__ import annotations

import hashlib
import uuid
import weakref
from collections.abc import Mapping
from typing import Any, Literal, Self

from langchain_core.language_models import BaseChatModel
from langchain_core.utils import secret_from_env
from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_validator,
    model_validator,
)

from daric_rag.config import DaricConfig
from daric_rag.engine import Engine, GenerationOptions
from daric_rag.errors import ConfigError
from daric_rag.generation import Reuse
from daric_rag.integrations._engine_source import EngineSettings, EngineSource

__all__ = ["OPTION_FIELDS", "ChatFields"]

OPTION_FIELDS = (
    "temperature",
    "max_tokens",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "n",
    "logprobs",
    "reuse",
    "namespace",
    "conversation",
)
"""Fields that are options of every request, by their names in `GenerationOptions`."""

# Of a server's connection, which daric_rag.RemoteEngine names otherwise.
_REMOTE = {"timeout": "timeout_s", "max_retries": "max_retries"}


class ChatFields(BaseChatModel):
    """What a `ChatDaric` is made of; see there."""

    model: str | None = None
    store: str | None = None
    base_url: str | None = None
    api_key: SecretStr | None = Field(
        default_factory=secret_from_env("DARIC_API_KEY", default=None)
    )
    config: dict[str, Any] | None = None
    engine_options: dict[str, Any] = Field(
        default_factory=dict, exclude=True, repr=False
    )
    engine: Any = Field(default=None, exclude=True, repr=False)
    timeout: float | None = None
    max_retries: int | None = None

    temperature: float = 0.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None
    n: int = 1
    logprobs: int | None = None
    streaming: bool | None = None

    reuse: Reuse = "daric"
    namespace: str | None = None
    conversation: str | None = None
    tool_choice: str = "auto"
    tool_format: Literal["auto", "template", "text"] = "auto"
    tool_parser: str | None = None

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    _source: EngineSource = PrivateAttr()
    _settings: DaricConfig = PrivateAttr()

    @field_validator("config", mode="before")
    @classmethod
    def _plain_config(cls, value: Any) -> Any:
        """Keep a configuration as the mapping that can be serialised."""
        return value.to_dict() if isinstance(value, DaricConfig) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse what no request could be made with, before an engine opens.

        Raises:
            ConfigError: A setting is refused; pydantic makes it a ValidationError.
        """
        GenerationOptions(**self._own_options())
        # Validated again as another model's field, it keeps the engine it has.
        if getattr(self, "_source", None) is None:
            self._settings = DaricConfig.from_dict(self.config or {})
            self._source = EngineSource(self._origin())
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a copy in another process is made of: fields, but no `api_key`.

        The environment there has the key; the engine opens anew.

        Raises:
            TypeError: It was made with an engine, which stays where it is.
        """
        if self.engine is not None:
            raise TypeError(
                f"a {type(self).__name__} with engine= cannot be pickled; make it with "
                f"the engine's settings instead"
            )
        names = self.model_fields_set - {"api_key"}
        return _made, (type(self), {name: getattr(self, name) for name in names})

    def _engine_source(self) -> EngineSource:
        """Return where the engine comes from.

        Raises:
            ConfigError: A setting of the engine was changed since.
        """
        origin = self._origin()
        if not self._source.is_of(origin):
            raise ConfigError(
                "model, store, base_url, api_key, config, engine_options or engine was "
                "changed after this object was made; make a new one"
            )
        return self._source

    def _own_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OPTION_FIELDS}

    def _origin(self) -> EngineSettings | Engine:
        opening = ("store", "base_url", "config", "engine_options")
        if self.engine is not None:
            given = [name for name in opening if getattr(self, name)]
            if given:
                raise ConfigError(
                    f"engine= is open already: drop {', '.join(given)}, or open it "
                    f"with them"
                )
            engine: Engine = self.engine
            # Its own configuration says where delimited texts are split.
            self._settings = getattr(engine, "config", None) or self._settings
            return engine
        settings = EngineSettings(
            model=self.model,
            store=self.store,
            base_url=self.base_url,
            api_key=self._key(),
            config=DaricConfig.from_dict(self.config or {}),
            engine_options=self._engine_keywords(),
        )
        settings.check()
        return settings

    def _key(self) -> str | None:
        # An embedded engine needs none, and the environment's may be for others.
        if self.api_key is None or self.base_url is None:
            return None
        return self.api_key.get_secret_value()

    def _engine_keywords(self) -> dict[str, Any]:
        for name in ("headers", "transport"):
            if name in self.engine_options:
                raise ConfigError(
                    f"engine_options holds {name}, which must not be serialised; pass "
                    f"engine=RemoteEngine(..., {name}=...)"
                )
        keywords = dict(self.engine_options)
        if self.base_url is not None:
            for name, keyword in _REMOTE.items():
                if getattr(self, name) is not None:
                    keywords.setdefault(keyword, getattr(self, name))
        return keywords

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that may change an answer; no secret."""
        opening = ("model", "store", "base_url")
        choices = ("tool_choice", "tool_format", "tool_parser")
        return {
            **{name: getattr(self, name) for name in (*opening, *choices)},
            "engine_options": _digest(self.engine_options),
            "engine": _identity_of(self.engine),
            "config": self._settings.to_dict(),
            **self._own_options(),
        }


def _made(kind: type[ChatFields], fields: Mapping[str, Any]) -> ChatFields:
    return kind(**fields)


def _digest(options: Mapping[str, Any]) -> str:
    """Return what tells options apart without telling them: some are secrets."""
    items = repr(sorted((name, repr(value)) for name, value in options.items()))
    return hashlib.sha256(items.encode()).hexdigest()


_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _identity_of(engine: Any) -> str | None:
    """Return a name of an engine that was passed in, which no other one ever has.

    What it was opened with is unknown, and the address of a dropped one is used again.
    """
    if engine is None:
        return None
    return _names.setdefault(engine, f"{type(engine).__name__} {uuid.uuid4().hex}")
