"""How an integration's object comes to an engine: opened late, shared, given back.

vLLM allows one embedded engine per process, and applications make several objects of
the same model. So those of equal settings share one engine; it opens when the first of
them asks, and closes when the last that asked is closed or dropped.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from daric_rag.config import DaricConfig
from daric_rag.engine import Engine
from daric_rag.errors import ConfigError, EngineClosedError

__all__ = ["EngineSettings", "EngineSource"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What makes two engines the same one.

    Attributes:
        model: As in `EmbeddedEngine`; of a server, its name there, or None.
        store: As in `EmbeddedEngine`.
        base_url: Of a server; None for an embedded engine.
        api_key: The server's.
        config: Layout, selection and capacities.
        engine_options: Further keywords of `EmbeddedEngine` or `RemoteEngine`.
    """

    model: str | None = None
    store: str | None = None
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    config: DaricConfig = field(default_factory=DaricConfig)
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what no engine can be opened with, before anybody waits for it.

        Raises:
            ConfigError: Settings are missing, or do not go together.
        """
        if self.base_url is None and not self.model:
            raise ConfigError(
                "model is missing; pass a local folder, a hub name or smollm2-135m, or "
                "base_url= of a server"
            )
        if self.base_url is None and self.api_key is not None:
            raise ConfigError("api_key is for a server; pass base_url= too, or drop it")
        if self.base_url is not None and self.store is not None:
            raise ConfigError(
                "a server has its own store; drop store=, and start the server with "
                "`daric serve-command MODEL --store FOLDER`"
            )

    def open(self) -> Engine:
        """Open the engine; takes seconds.

        Raises:
            DaricError: As the engines raise it.
        """
        self.check()
        # Here, so that importing an integration loads neither torch nor vLLM.
        import daric_rag

        engine: Engine
        if self.base_url is not None:
            engine = daric_rag.RemoteEngine(
                self.base_url,
                api_key=self.api_key,
                model=self.model,
                config=self.config,
                **self.engine_options,
            )
        else:
            engine = daric_rag.EmbeddedEngine(
                str(self.model),
                store=self.store,
                config=self.config,
                **self.engine_options,
            )
        return engine


@dataclass(slots=True, eq=False)
class _Shared:
    """An engine and how many sources have it."""

    settings: EngineSettings
    engine: Engine
    num_sources: int = 0


_lock = threading.RLock()
_open: list[_Shared] = []


class EngineSource:
    """Client process. Where an object gets its engine; for any thread.

    Args:
        origin: Settings to open an engine with, or share an open one of; or an engine
            that somebody else opened and closes.
    """

    def __init__(self, origin: EngineSettings | Engine) -> None:
        """Open nothing yet."""
        self._origin = origin
        self._engine: Engine | None = None
        self._closed = False
        self._finalizer: Any = None
        if not isinstance(origin, EngineSettings):
            self._engine = origin

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineSource:
        """Return another source of the same engine."""
        return EngineSource(self._origin)

    def is_of(self, origin: EngineSettings | Engine) -> bool:
        """Return whether that is where this source's engine comes from."""
        if isinstance(origin, EngineSettings):
            return origin == self._origin
        return origin is self._origin

    @property
    def is_open(self) -> bool:
        """Whether there is an engine by now."""
        return self._engine is not None

    def get(self) -> Engine:
        """Return the engine; the first call opens it.

        Raises:
            EngineClosedError: The source was closed.
            DaricError: The engine cannot be opened; the next call tries again.
        """
        if self._engine is not None and not self._closed:
            return self._engine
        with _lock:
            if self._closed:
                raise EngineClosedError(
                    "this object was closed; make a new one with the same settings"
                )
            if self._engine is None:
                assert isinstance(self._origin, EngineSettings)
                shared = _shared(self._origin)
                shared.num_sources += 1
                self._engine = shared.engine
                self._finalizer = weakref.finalize(self, _give_back, shared)
            return self._engine

    async def aget(self) -> Engine:
        """Return the engine, without keeping the event loop waiting."""
        if self.is_open:
            return self.get()
        return await asyncio.to_thread(self.get)

    def close(self) -> None:
        """Give the engine back; it closes with its last user. Harmless when repeated.

        An engine that was passed in stays open.
        """
        with _lock:
            self._closed = True
            self._engine = None
        if self._finalizer is not None:
            self._finalizer()

    async def aclose(self) -> None:
        """Close, without keeping the event loop waiting."""
        await asyncio.to_thread(self.close)


def _shared(settings: EngineSettings) -> _Shared:
    for shared in _open:
        if shared.settings == settings:
            return shared
    shared = _Shared(settings, settings.open())
    _open.append(shared)
    return shared


def _give_back(shared: _Shared) -> None:
    with _lock:
        shared.num_sources -= 1
        if shared.num_sources:
            return
        _open.remove(shared)
        # Under the lock: whoever opens the next one must find this one gone.
        shared.engine.close()
