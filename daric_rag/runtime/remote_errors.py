"""The one place where a server's failures become exceptions of `daric_rag.errors`."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from daric_rag.errors import (
    AuthenticationError,
    ConfigError,
    DaricError,
    EngineError,
    EngineUnavailableError,
    ModelNotFoundError,
    PromptTooLongError,
)

__all__ = ["BUSY_STATUSES", "ServerErrors", "shown_cause"]

BUSY_STATUSES = frozenset({429, 503})
"""What a server says that would take the request later."""

_GATEWAY_STATUSES = frozenset({502, 504})
_KEY_STATUSES = frozenset({401, 403})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REFUSALS = frozenset({400, 413, 422})

_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})

_MAX_MESSAGE_LEN = 300
_TOO_LONG = re.compile(
    r"maximum context length is (?P<limit>\d+) tokens.* (?P<len>\d+) input tokens"
)


@dataclass(frozen=True, slots=True)
class ServerErrors:
    """Client process. Names what went wrong at one server, and the way out.

    Attributes:
        url: Of the server.
        timeout_s: Longest silence that is waited for, in seconds.
        secrets: What no text may ever show.
        silence_mend: What to do where the silence was too long.
    """

    url: str
    timeout_s: float
    secrets: tuple[str, ...] = field(default=(), repr=False)
    silence_mend: str = "raise timeout_s, or see in the server's log what holds it up"

    def within(self, timeout_s: float) -> ServerErrors:
        """Return those of what is waited for no longer than so many seconds."""
        if self.timeout_s <= timeout_s:
            return self
        mend = "see in the server's log what holds it up, and ask again"
        return replace(self, timeout_s=timeout_s, silence_mend=mend)

    def of_response(self, status: int, body: bytes) -> DaricError:
        """Return what a response with another status than 200 means."""
        try:
            content = json.loads(body)
        except ValueError:
            content = body.decode(errors="replace")
        if isinstance(content, Mapping):
            content = content.get("error", content)
        return self._of(status, content)

    def of_event(self, error: Any) -> DaricError:
        """Return what an error in a stream means, which began as an answer."""
        code = error.get("code") if isinstance(error, Mapping) else None
        return self._of(code if isinstance(code, int) else 500, error)

    def of_transport(self, error: httpx.HTTPError) -> DaricError:
        """Return what a failed connection means."""
        if _lacks_files(error):
            return EngineUnavailableError(
                f"no connection to {self.url} can be opened, for this process has too "
                f"many files open: raise its limit (ulimit -n), or run fewer requests "
                f"at once"
            )
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return EngineUnavailableError(
                f"no server answers at {self.url} ({self._shown(error)}): start one "
                f"with the command that `daric serve-command` prints, or correct "
                f"base_url"
            )
        if isinstance(error, httpx.TimeoutException):
            return EngineUnavailableError(
                f"{self.url} was silent for {self.timeout_s:g} s: {self.silence_mend}"
            )
        if isinstance(error, httpx.LocalProtocolError | httpx.UnsupportedProtocol):
            return ConfigError(f"{self.url} cannot be asked: {self._shown(error)}")
        return EngineUnavailableError(
            f"the connection to {self.url} broke before the answer was complete "
            f"({self._shown(error) or type(error).__name__}): see in the server's log "
            f"whether it ended, and ask again"
        )

    def of_protocol(self, what: str) -> DaricError:
        """Return what an answer means that vLLM would not give."""
        return EngineError(
            f"{self.url} {self._shown(what)}: base_url must be the address of "
            f"`vllm serve` 0.32"
        )

    def _of(self, status: int, content: Any) -> DaricError:
        message = content.get("message") if isinstance(content, Mapping) else content
        text = self._shown(message) if isinstance(message, str) else ""
        if status in _KEY_STATUSES:
            return AuthenticationError(
                f"{self.url} refused the API key ({status}): pass api_key= as the "
                f"server's --api-key or VLLM_API_KEY has it"
            )
        if status == 404:
            return self._not_found(content, text)
        if status in _REFUSALS:
            too_long = _TOO_LONG.search(text)
            if too_long:
                # As the engine counts it: one token of answer must fit beside it.
                return PromptTooLongError(
                    int(too_long["len"]), int(too_long["limit"]) - 1
                )
            return ConfigError(f"the server refused the request: {text or status}")
        reason = f"{status} {text}".rstrip()
        if status in BUSY_STATUSES | _GATEWAY_STATUSES:
            return EngineUnavailableError(
                f"{self.url} is overloaded or not ready ({reason}): ask again later, "
                f"or raise max_retries"
            )
        if status in _REDIRECTS:
            return EngineError(
                f"{self.url} sends its clients elsewhere ({reason}): pass the address "
                f"behind it as base_url"
            )
        return EngineError(f"{self.url} failed ({reason}): see the server's log")

    def _not_found(self, content: Any, text: str) -> DaricError:
        if isinstance(content, Mapping) and content.get("param") == "model":
            return ModelNotFoundError(f"{text} See {self.url}/v1/models")
        return self.of_protocol("has no such path (404)")

    def _shown(self, message: object) -> str:
        """Return a text as one printable line without secrets."""
        text = " ".join(str(message).split())
        for secret in self.secrets:
            text = text.replace(secret, "***")
        if len(text) > _MAX_MESSAGE_LEN:
            text = f"{text[:_MAX_MESSAGE_LEN]}..."
        return "".join(char if char.isprintable() else "?" for char in text)


def shown_cause(error: httpx.HTTPError) -> httpx.HTTPError | None:
    """Return what a traceback may show: httpx quotes a header that it does not take."""
    return None if isinstance(error, httpx.LocalProtocolError) else error


def _lacks_files(error: BaseException | None) -> bool:
    """Return whether what lies behind an error is a limit on open files."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_FILES:
            return True
        # One attempt per address of a host: the first tells as much as the others.
        tried = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        error = tried[0] if tried else error.__cause__ or error.__context__
    return False
