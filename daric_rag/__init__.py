"""daric_rag: position-independent KV cache reuse for RAG on an unmodified vLLM.

Every public name is listed in `__all__` and resolved on first use (PEP 562), so that
`import daric_rag` costs milliseconds and needs neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daric_rag.config import DaricConfig
    from daric_rag.engine import (
        ChatMessage,
        ChatPrompt,
        ChunkedPrompt,
        Completion,
        Delta,
        DocumentPart,
        Engine,
        GenerationOptions,
        ReuseStats,
        TokenPrompt,
    )
    from daric_rag.errors import (
        AuthenticationError,
        ConfigError,
        DaricError,
        EngineClosedError,
        EngineError,
        EngineUnavailableError,
        ModelError,
        ModelNotFoundError,
        PromptError,
        PromptTooLongError,
        StoreError,
        UnsupportedModelError,
        VllmVersionError,
        WireError,
    )
    from daric_rag.layout import PromptLayout
    from daric_rag.models import resolve_model
    from daric_rag.prompt import BuiltPrompt, PromptBuilder
    from daric_rag.runtime.embedded import EmbeddedEngine
    from daric_rag.runtime.remote import RemoteEngine
    from daric_rag.trace import RequestTrace

__version__ = "0.1.0"

__all__ = [
    "AuthenticationError",
    "BuiltPrompt",
    "ChatMessage",
    "ChatPrompt",
    "ChunkedPrompt",
    "Completion",
    "ConfigError",
    "DaricConfig",
    "DaricError",
    "Delta",
    "DocumentPart",
    "EmbeddedEngine",
    "Engine",
    "EngineClosedError",
    "EngineError",
    "EngineUnavailableError",
    "GenerationOptions",
    "ModelError",
    "ModelNotFoundError",
    "PromptBuilder",
    "PromptError",
    "PromptLayout",
    "PromptTooLongError",
    "RemoteEngine",
    "RequestTrace",
    "ReuseStats",
    "StoreError",
    "TokenPrompt",
    "UnsupportedModelError",
    "VllmVersionError",
    "WireError",
    "__version__",
    "resolve_model",
]

_MODULES = {
    "config": ("DaricConfig",),
    "engine": (
        "ChatMessage",
        "ChatPrompt",
        "ChunkedPrompt",
        "Completion",
        "Delta",
        "DocumentPart",
        "Engine",
        "GenerationOptions",
        "ReuseStats",
        "TokenPrompt",
    ),
    "errors": (
        "AuthenticationError",
        "ConfigError",
        "DaricError",
        "EngineClosedError",
        "EngineError",
        "EngineUnavailableError",
        "ModelError",
        "ModelNotFoundError",
        "PromptError",
        "PromptTooLongError",
        "StoreError",
        "UnsupportedModelError",
        "VllmVersionError",
        "WireError",
    ),
    "layout": ("PromptLayout",),
    "models": ("resolve_model",),
    "prompt": ("BuiltPrompt", "PromptBuilder"),
    "runtime.embedded": ("EmbeddedEngine",),
    "runtime.remote": ("RemoteEngine",),
    "trace": ("RequestTrace",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports the module that defines `name` and returns the attribute."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    value = getattr(module, name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    """Lists the public names beside what is loaded."""
    return sorted({*globals(), *__all__})
