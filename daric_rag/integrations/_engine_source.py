"""The engine behind a model object: opened on first use, or given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from daric_rag.config import DaricConfig
from daric_rag.engine import Engine
from daric_rag.errors import ConfigError, EngineClosedError


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is opened with."""

    model: str | None = None
    store: str | None = None
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    config: DaricConfig = field(default_factory=DaricConfig)
    engine_options: Mapping[str, Any] = field(default_factory=dict)


class EngineSource:
    """Opens its engine on first use."""

    def __init__(self, origin: EngineSettings | Engine) -> None:
        """Open nothing yet."""
        self._origin = origin
        self._lock = threading.Lock()
        self._closed = False
        self._engine = None if isinstance(origin, EngineSettings) else origin

    @property
    def is_open(self) -> bool:
        """Whether there is an engine."""
        return self._engine is not None

    def get(self) -> Engine:
        """Return the engine."""
        with self._lock:
            if self._closed:
                raise EngineClosedError("closed; make a new one")
            if self._engine is None:
                assert isinstance(self._origin, EngineSettings)
                self._engine = _opened(self._origin)
            return self._engine

    async def aget(self) -> Engine:
        """Return the engine, opened in a thread."""
        if self._engine is not None and not self._closed:
            return self._engine
        return await asyncio.to_thread(self.get)

    def close(self) -> None:
        """Close what was opened here."""
        with self._lock:
            self._closed = True
            if isinstance(self._origin, EngineSettings) and self._engine is not None:
                self._engine.close()
            self._engine = None

    async def aclose(self) -> None:
        """Close in a thread."""
        await asyncio.to_thread(self.close)


def _opened(settings: EngineSettings) -> Engine:
    import daric_rag

    if settings.base_url is not None:
        return daric_rag.RemoteEngine(
            settings.base_url,
            api_key=settings.api_key,
            model=settings.model,
            config=settings.config,
            **settings.engine_options,
        )
    if settings.model is None:
        raise ConfigError("pass model=, or base_url= of a server")
    return daric_rag.EmbeddedEngine(
        settings.model,
        store=settings.store,
        config=settings.config,
        **settings.engine_options,
    )
