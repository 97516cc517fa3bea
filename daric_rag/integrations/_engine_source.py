"""How an integration's object comes to an engine: opened late, shared, given back.

vLLM allows one embedded engine per process, and applications make several objects of
the same model. So those of equal settings share one engine; it opens when the first of
them asks, and closes when the last of them is closed or dropped.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from daric_rag.config import DaricConfig
from daric_rag.engine import Engine
from daric_rag.errors import ConfigError, EngineClosedError

__all__ = ["EngineSettings", "EngineSource"]

_logger = logging.getLogger(__name__)


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
    engine_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

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
    """An engine, opened or not yet, and how many sources it is for."""

    settings: EngineSettings
    engine: Engine | None = None
    num_sources: int = 0

    def opened(self) -> Engine:
        """Return the engine; opens one unless there is one that works."""
        if self.engine is not None and not getattr(self.engine, "is_open", True):
            # One that failed may hold what the next one needs.
            self.engine.close()
            self.engine = None
        if self.engine is None:
            self.engine = self.settings.open()
        return self.engine


# Of the list and its counts; never held for long, as objects are made in event loops.
_lock = threading.Lock()
_all: list[_Shared] = []

# Held while an engine opens or closes: the next one must find the last one gone.
_engine_lock = threading.Lock()

# What dropped sources had. A garbage collection may come in any thread, one that an
# engine must end with among them, so that it may neither wait nor close anything.
_dropped: queue.SimpleQueue[_Shared] = queue.SimpleQueue()
_janitor: threading.Thread | None = None


class EngineSource:
    """Client process. Where an object gets its engine; for any thread.

    Args:
        origin: Settings to open an engine with, or share an open one of; or an engine
            that somebody else opened and closes.
    """

    def __init__(self, origin: EngineSettings | Engine) -> None:
        """Open nothing yet, but count: others' engine stays open for this object."""
        self._origin = origin
        self._engine: Engine | None = None
        self._shared: _Shared | None = None
        self._closed = False
        if not isinstance(origin, EngineSettings):
            self._engine = origin
            return
        self._shared = _joined(origin)
        self._finalizer = weakref.finalize(self, _dropped.put, self._shared)
        # At exit there is nobody to take it; engines close themselves then.
        self._finalizer.atexit = False

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
        # Read once: another thread may close this meanwhile.
        engine = self._engine
        if engine is not None:
            return engine
        with _engine_lock:
            if self._closed or self._shared is None:
                raise EngineClosedError(
                    "this object was closed; make a new one with the same settings"
                )
            if self._engine is None:
                self._engine = self._shared.opened()
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
        with _engine_lock:
            self._closed = True
            self._engine = None
            if self._shared is not None and self._finalizer.detach() is not None:
                _give_back(self._shared)

    async def aclose(self) -> None:
        """Close, without keeping the event loop waiting."""
        await asyncio.to_thread(self.close)


def _joined(settings: EngineSettings) -> _Shared:
    """Return what the sources of these settings share, one more of them counted."""
    global _janitor
    with _lock:
        if _janitor is None or not _janitor.is_alive():
            # A fork has none.
            _janitor = threading.Thread(
                target=_take_dropped, name="daric-engine-source", daemon=True
            )
            _janitor.start()
        shared = next((one for one in _all if one.settings == settings), None)
        if shared is None:
            shared = _Shared(settings)
            _all.append(shared)
        shared.num_sources += 1
        return shared


def _give_back(shared: _Shared) -> None:
    """Count one source less; call it under `_engine_lock`."""
    with _lock:
        shared.num_sources -= 1
        if shared.num_sources:
            return
        _all.remove(shared)
    if shared.engine is not None:
        shared.engine.close()
        shared.engine = None


def _take_dropped() -> None:
    while True:
        shared = _dropped.get()
        try:
            with _engine_lock:
                _give_back(shared)
        except Exception:
            _logger.exception("an engine that was dropped could not be closed")
        del shared
