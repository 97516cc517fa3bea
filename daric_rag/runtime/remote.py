"""An engine on a server: any ``vllm serve`` that `daric serve-command` describes.

Prompts become token ids and layouts here, exactly as for an embedded engine; the
server gets ids, layout and salt by its ordinary HTTP API. Neither torch nor vLLM nor
transformers is needed on this side.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from daric_rag.config import DaricConfig, shown
from daric_rag.engine import Delta
from daric_rag.errors import ConfigError, ModelNotFoundError
from daric_rag.input_processor import InputProcessor
from daric_rag.runtime.client import ClientEngine, checked_config
from daric_rag.runtime.remote_errors import ServerErrors
from daric_rag.runtime.remote_loop import RemoteLoop, RemoteRequest
from daric_rag.runtime.remote_retry import Backoff
from daric_rag.runtime.remote_tokenizer import (
    FACTS_PATH,
    RemoteTokenizer,
    ServerFacts,
    check_tokenizer,
    file_encoder,
)
from daric_rag.runtime.remote_wire import (
    MAX_COUNTED,
    REUSE_HEADER,
    AnswerReader,
    completion_body,
)
from daric_rag.runtime.request_stream import RequestStream, Submission
from daric_rag.runtime.submissions import SubmissionMaker
from daric_rag.tokenization import Tokenizer

__all__ = ["RemoteEngine"]

_CONNECT_TIMEOUT_S = 10.0
# uvicorn closes idle connections after 5 s: one that it is closing is not used again.
_KEPT_CONNECTIONS = 64
_KEEP_ALIVE_S = 4.0

_MIN_SECRET_LEN = 8
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_KINDS = {int: "an int", float: "a number"}

_PLAIN_REASON = (
    "the server runs without daric_rag's connector or middleware: start it with the "
    "command that `daric serve-command` prints"
)
_UNTOLD_REASON = (
    f"the server did not tell: the connection, or its engine, broke before it could, "
    f"or the answer is none of the first {MAX_COUNTED}"
)


class RemoteEngine(ClientEngine):
    """Client process. Answers prompts on a server; for any thread and event loop.

    At most 128 requests run at once, each on a connection of its own; more of them
    wait here.

    On a vLLM server without daric_rag answers are ordinary ones, and their reuse
    counts say why; such a server needs `tokenizer`.

    Args:
        base_url: Of the server, as ``http://host:8000``.
        api_key: The server's ``--api-key``, if it has one.
        model: The model's name on the server; None for its only one.
        config: Layout and selection; capacities are the server's affair.
        tokenizer: The model's, to save a round trip per new text: its folder or its
            ``tokenizer.json``, or an object of the `Tokenizer` protocol. None to have
            the server tokenise.
        timeout_s: Longest silence to wait for, in seconds: for the first token, and
            between tokens.
        max_retries: Further tries of a request that the server has not begun to answer,
            where it cannot be reached or is too busy.
        headers: Sent with every request, for a gateway in front of the server.
        transport: Of httpx, to be used instead of the network.

    Raises:
        AuthenticationError: The server does not take the key.
        ConfigError: An argument cannot be used with this server.
        EngineUnavailableError: No server answers.
        ModelNotFoundError: It does not serve the model.
    """

    # Known later, but tracebacks may show an engine that could not be opened.
    base_url = model = ""
    _loop: RemoteLoop

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        config: DaricConfig | None = None,
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 2,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Ask the server what it serves."""
        self.config = checked_config(config)
        self.base_url = _checked_url(base_url)
        sent = _checked_headers(api_key, headers)
        _check_number("timeout_s", timeout_s, above=0.0)
        _check_number("max_retries", max_retries, above=-1)
        self._errors = ServerErrors(self.base_url, timeout_s, tuple(_secrets(sent)))
        client = httpx.AsyncClient(
            base_url=self.base_url,
            headers=sent,
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=_KEPT_CONNECTIONS,
                keepalive_expiry=_KEEP_ALIVE_S,
            ),
            transport=transport,
        )
        super().__init__(RemoteLoop(client, self._errors, Backoff(max_retries)))
        try:
            self._connect(model, tokenizer)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        """Return the address and the model, and no secret."""
        return f"RemoteEngine({self.base_url!r}, model={self.model!r})"

    def _connect(
        self, model: str | None, tokenizer: Tokenizer | str | os.PathLike[str] | None
    ) -> None:
        cards = self._loop.ask("GET", "/v1/models")
        self.model, self.max_model_len = self._choose(cards, model)
        facts = self._facts()
        if facts is None and self.config.alignment == "block":
            raise ConfigError(
                f'alignment="block" needs the KV block size, and {self.base_url} runs '
                f'without daric_rag: use alignment="exact"'
            )
        self._reuses = facts is not None and facts.reuses
        self.tokenizer = self._tokenizer(facts, tokenizer)
        processor = InputProcessor(
            self.tokenizer,
            config=self.config,
            # With exact alignment nothing depends on it.
            block_size=1 if facts is None else facts.block_size,
            max_model_len=self.max_model_len,
        )
        self._maker = SubmissionMaker(
            processor,
            None if facts is None else facts.vocab_size,
            None if facts is None else facts.scheduling_policy,
            "start the server with --scheduling-policy=priority",
        )

    def _tokenizer(
        self,
        facts: ServerFacts | None,
        given: Tokenizer | str | os.PathLike[str] | None,
    ) -> Tokenizer:
        """Return what makes ids of texts: the server, a file or what was given."""
        ask = self._loop.ask
        if given is not None and not isinstance(given, str | os.PathLike):
            check_tokenizer(given, self.model, ask)
            return given
        if facts is None:
            raise ConfigError(
                f"{self.base_url} runs without daric_rag and does not describe its "
                f"tokenizer: start it with the command that `daric serve-command` "
                f"prints, or pass tokenizer= as an object"
            )
        if given is None:
            return RemoteTokenizer(facts, self.model, ask)
        tokenizer = RemoteTokenizer(facts, self.model, ask, file_encoder(given))
        check_tokenizer(tokenizer, self.model, ask)
        return tokenizer

    def _choose(self, cards: Any, wanted: str | None) -> tuple[str, int]:
        """Return the name and the context length of the model to use."""
        try:
            # Adapters have no length of their own.
            lens = {
                str(card["id"]): int(card["max_model_len"])
                for card in cards["data"]
                if card["max_model_len"] is not None
            }
        except (KeyError, TypeError, ValueError) as error:
            raise self._errors.of_protocol(
                f"lists its models in another form ({error!r})"
            ) from error
        names = ", ".join(sorted(lens))
        if wanted is None and len(lens) != 1:
            raise ConfigError(f"pass model=: {self.base_url} serves {names or 'none'}")
        name = wanted if wanted is not None else next(iter(lens))
        if name not in lens:
            raise ModelNotFoundError(
                f"{self.base_url} does not serve {name!r}; it serves {names}"
            )
        return name, lens[name]

    def _facts(self) -> ServerFacts | None:
        """Return what the server says of itself; None if it runs without daric_rag."""
        answer = self._loop.ask("GET", FACTS_PATH, optional=True)
        return None if answer is None else ServerFacts.from_dict(answer)

    def _submit(
        self, submission: Submission, put: Callable[[Delta | BaseException], None]
    ) -> RequestStream:
        stream = RequestStream(submission, put)
        body = completion_body(submission, self.model, reuses=self._reuses)
        headers = {"x-request-id": uuid.uuid4().hex}
        if self._reuses and submission.wire is not None:
            headers[REUSE_HEADER] = str(min(submission.options.n, MAX_COUNTED))
        reason = _UNTOLD_REASON if self._reuses else _PLAIN_REASON
        reader = AnswerReader(submission, self._errors, reason)
        self._loop.submit(stream, RemoteRequest(body, headers, reader))
        return stream


def _checked_url(base_url: str) -> str:
    """Return a server's address, without the path that belongs to every request."""
    try:
        url = httpx.URL(base_url)
    except (TypeError, httpx.InvalidURL) as error:
        raise ConfigError(f"base_url is no address ({error})") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError("base_url must be as http://host:8000 or https://host")
    if url.userinfo or url.query or url.fragment:
        raise ConfigError(
            "base_url holds a user name, a query or a fragment; pass what a gateway "
            "wants to know as headers="
        )
    return str(url).rstrip("/").removesuffix("/v1")


def _check_number(name: str, value: object, *, above: float) -> None:
    kind = type(above)
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    if not is_number or not value > above:  # type: ignore[operator]
        raise ConfigError(
            f"{name} is {shown(value)}; it must be {_KINDS[kind]} above {above:g}"
        )


def _secrets(headers: Mapping[str, str]) -> Iterator[str]:
    """Yield what is worth hiding of headers: shorter words would be no secrets."""
    for value in headers.values():
        yield from (word for word in value.split() if len(word) >= _MIN_SECRET_LEN)


def _checked_headers(
    api_key: str | None, headers: Mapping[str, str] | None
) -> dict[str, str]:
    sent = dict(headers or {})
    for name, value in sent.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ConfigError(
                "headers= has a name that HTTP does not take; use letters, digits and "
                "hyphens"
            )
        _check_secret(f"the value of the header {name!r}", value)
    if api_key is not None:
        _check_secret("api_key", api_key)
        sent["authorization"] = f"Bearer {api_key}"
    return sent


def _check_secret(name: str, value: object) -> None:
    """Refuse what no header can carry, without showing it: it may be a secret."""
    is_carried = (
        isinstance(value, str)
        and value.isascii()
        and value.isprintable()
        and value == value.strip() != ""
    )
    if not is_carried:
        raise ConfigError(
            f"{name} is empty, has white space around it or is no printable ASCII "
            f"text; strip() it, and mind line breaks at the end of a key that was read "
            f"from a file"
        )
