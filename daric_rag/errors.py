"""Every exception that daric_rag raises on purpose.

The tree::

    DaricError
    ├── ConfigError (ValueError)         a setting has a value it cannot have
    ├── PromptError (ValueError)         chunks, documents or token ids are unusable
    │   └── PromptTooLongError           the prompt exceeds the model's context
    ├── ModelError
    │   ├── UnsupportedModelError        the model's KV cannot be re-encoded exactly
    │   └── ModelNotFoundError           no such model, locally or on the hub
    ├── EngineError (RuntimeError)
    │   ├── VllmVersionError             the installed vLLM is not one we know
    │   ├── EngineClosedError            the engine was closed before the call
    │   ├── EngineUnavailableError       no server answers, or it is overloaded
    │   │   (ConnectionError)
    │   └── AuthenticationError          the server does not take the API key
    │       (PermissionError)
    ├── StoreError (OSError)             the store cannot be opened or written
    └── WireError (ValueError)           a message between processes is malformed

Each class also derives from the builtin that a caller unaware of daric_rag would
catch. Whoever raises one says in its text what to change; a cache miss or a damaged
record is never an exception (it is a value: the chunk is computed again).
"""

from __future__ import annotations

__all__ = [
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
]


class DaricError(Exception):
    """Base of every exception raised on purpose by daric_rag."""


class ConfigError(DaricError, ValueError):
    """A setting is unknown or has a value outside its range."""


class PromptError(DaricError, ValueError):
    """The chunks, documents or token ids handed over cannot form a prompt."""


class PromptTooLongError(PromptError):
    """The prompt does not fit the model's context.

    Attributes:
        prompt_len: Tokens in the prompt.
        limit: Tokens the prompt may have.
        excess: Tokens to remove, ``prompt_len - limit``.
    """

    def __init__(self, prompt_len: int, limit: int) -> None:
        """Build the text from the two lengths, both in tokens."""
        self.prompt_len = prompt_len
        self.limit = limit
        self.excess = prompt_len - limit
        super().__init__(
            f"the prompt has {prompt_len} tokens and the limit is {limit}: remove at "
            f"least {self.excess} tokens (retrieve fewer or shorter documents), or "
            f"start the engine with a larger max_model_len"
        )

    def __reduce__(self) -> tuple[type[PromptTooLongError], tuple[int, int]]:
        """Pickle by the two lengths: the default would pass the text to __init__."""
        return type(self), (self.prompt_len, self.limit)


class ModelError(DaricError):
    """The model cannot be used."""


class UnsupportedModelError(ModelError):
    """The model's architecture or KV cache is one daric_rag refuses to reuse."""


class ModelNotFoundError(ModelError):
    """No model of that name or path exists."""


class EngineError(DaricError, RuntimeError):
    """The engine failed, or was used in a state that does not allow the call."""


class VllmVersionError(EngineError):
    """The installed vLLM is missing or is a version daric_rag does not know."""


class EngineClosedError(EngineError):
    """The engine was closed; build a new one."""


class EngineUnavailableError(EngineError, ConnectionError):
    """A server cannot be reached, is overloaded, or went away; try again later."""


class AuthenticationError(EngineError, PermissionError):
    """A server does not take the API key that it was given."""


class StoreError(DaricError, OSError):
    """The KV store cannot be opened, or cannot ever hold what is written to it."""


class WireError(DaricError, ValueError):
    """A message between client, scheduler and worker is malformed or too new."""
