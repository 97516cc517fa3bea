"""What a `DaricLLM` is made of: settings, options per call, and its engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_validator,
)
from llama_index.core.llms.llm import LLM, default_completion_to_prompt

from daric_rag.config import DaricConfig
from daric_rag.engine import Engine, GenerationOptions, Reuse
from daric_rag.errors import ConfigError
from daric_rag.integrations._engine_source import EngineSettings, EngineSource

__all__ = ["EngineLLM"]

_OPTIONS = tuple(GenerationOptions.__dataclass_fields__)

# Settings of an engine that is opened here.
_OPENING = ("store", "base_url", "api_key", "config", "engine_options")


class EngineLLM(LLM):
    """The fields of `DaricLLM`, which has their documentation, and its engine."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str | None = Field(default=None, frozen=True)
    store: str | None = Field(default=None, frozen=True)
    base_url: str | None = Field(default=None, frozen=True)
    api_key: SecretStr | None = Field(default=None, frozen=True, exclude=True)
    config: DaricConfig = Field(default_factory=DaricConfig, frozen=True)
    engine_options: dict[str, Any] = Field(
        default_factory=dict, frozen=True, exclude=True, repr=False
    )
    context_window: int | None = Field(default=None, gt=0)

    # Of the same names and defaults as in `GenerationOptions`.
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: int | None = None
    reuse: Reuse = "daric"
    namespace: str | None = None
    conversation: str | None = None
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)

    _source: EngineSource = PrivateAttr()
    _opens_itself: bool = PrivateAttr()

    def __init__(
        self, model: str | None = None, *, engine: Engine | None = None, **fields: Any
    ) -> None:
        """Check every setting; nothing is opened yet."""
        given = [name for name in _OPENING if fields.get(name) not in (None, {})]
        if engine is not None and given:
            raise ConfigError(
                f"{', '.join(given)} with engine=: an open engine has its settings; "
                f"leave one of the two out"
            )
        if fields.get("base_url") is not None and fields.get("api_key") is None:
            fields["api_key"] = os.environ.get("DARIC_API_KEY")
        super().__init__(**{"model": model, **fields})
        self._check_templates()
        self.checked_options({})
        self._opens_itself = engine is None
        self._source = EngineSource(self._settings() if engine is None else engine)

    @field_validator("config", mode="before")
    @classmethod
    def _read_config(cls, config: Any) -> Any:
        return DaricConfig.from_dict(config) if isinstance(config, Mapping) else config

    def __enter__(self) -> Self:
        """Return the model itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return the model itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.aclose()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process is made of: settings, but no `api_key`.

        Raises:
            TypeError: It was made with an engine, which stays where it is, or its
                `engine_options` hold secrets.
        """
        if not self._opens_itself:
            raise TypeError(
                f"a {type(self).__name__} with engine= cannot be pickled; make it "
                f"with the engine's settings instead"
            )
        for name in ("headers", "transport", "hf_token"):
            if name in self.engine_options:
                # Left out, the copy would be another one without a word.
                raise TypeError(
                    f"a {type(self).__name__} with {name} in engine_options cannot be "
                    f"pickled, as they may be secret; make it anew where it is needed"
                )
        state = self.__dict__.copy()
        for name in ("api_key", "callback_manager", "rate_limiter"):
            state.pop(name, None)
        return {"__dict__": state}

    @property
    def engine(self) -> Engine:
        """The engine. The first one to ask opens it, which takes seconds."""
        return self._engine_source().get()

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts by.

        Raises:
            ConfigError: `context_window` is None and the engine does not know it.
        """
        return LLMMetadata(
            context_window=self._known_context_window(),
            num_output=self.max_tokens,
            is_chat_model=True,
            model_name=self.model_name,
        )

    @property
    def model_name(self) -> str:
        """The model's name, as far as it is known without opening the engine."""
        if self.model is not None:
            return self.model
        engine = self._source.get() if self._source.is_open else None
        known = getattr(engine, "model", None) or getattr(engine, "model_path", None)
        return str(known or self.base_url or "unknown")

    def to_payload(self) -> dict[str, Any]:
        """Return the settings for observers, without secrets and without opening."""
        return {**self.model_dump(), "model_name": self.model_name}

    def close(self) -> None:
        """Give the engine back: the last one who shares it closes it."""
        self._source.close()

    async def aclose(self) -> None:
        """Give the engine back, without keeping the event loop waiting."""
        await self._source.aclose()

    def checked_options(self, given: Mapping[str, Any]) -> GenerationOptions:
        """Return a call's generation options: its own over this object's.

        Raises:
            ConfigError: One is unknown or refused.
        """
        return GenerationOptions(**self._options(given))

    def _engine_source(self) -> EngineSource:
        """Return where the engine comes from.

        Raises:
            ConfigError: A copy has other settings of the engine than its original.
        """
        if self._opens_itself and not self._source.is_of(self._settings()):
            raise ConfigError(
                f"{', '.join(('model', *_OPENING))}: one of them is not what this "
                f"object was made with; make a new one instead of changing a copy"
            )
        return self._source

    def _known_context_window(self) -> int:
        if self.context_window is not None:
            return self.context_window
        known = getattr(self.engine, "max_model_len", None)
        if not isinstance(known, int):
            raise ConfigError(
                f"the engine, a {type(self.engine).__name__}, does not know its "
                f"context; pass DaricLLM(context_window=...), in tokens"
            )
        return known

    def _options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's options by name; their values are the engine's affair."""
        for name in (*self.additional_kwargs, *given):
            if name not in _OPTIONS:
                raise ConfigError(
                    f"{name!r} is not a generation option; known: {', '.join(_OPTIONS)}"
                )
        own = {name: getattr(self, name) for name in _OWN_OPTIONS}
        options = {**own, **self.additional_kwargs, **given}
        if options.get("n", 1) != 1:
            raise ConfigError(
                f"n is {options['n']} and LlamaIndex's responses hold one answer; ask "
                f"several times, or the engine itself: llm.engine.generate(..., n=...)"
            )
        return options

    def _settings(self) -> EngineSettings:
        key = self.api_key
        settings = EngineSettings(
            model=self.model,
            store=self.store,
            base_url=self.base_url,
            api_key=None if key is None else key.get_secret_value(),
            config=self.config,
            engine_options=dict(self.engine_options),
        )
        settings.check()
        return settings

    def _check_templates(self) -> None:
        """Refuse templates that would go unused."""
        own = {
            "messages_to_prompt": messages_to_prompt,
            "completion_to_prompt": default_completion_to_prompt,
        }
        for name, default in own.items():
            if getattr(self, name) is not default:
                raise ConfigError(
                    f"{name} is set, but the model's own chat template is used; leave "
                    f"it out, or pass ready text: llm.complete(text, formatted=True)"
                )


_OWN_OPTIONS = tuple(name for name in EngineLLM.model_fields if name in _OPTIONS)
