"""Tool calls in the form that a model was trained for, read by vLLM's own parsers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daric_rag.errors import ConfigError, VllmVersionError

__all__ = ["ToolReader", "tool_reader"]

# Classes of parsers that are known to read something, as every request asks for one.
_made: set[type[Any]] = set()


class ToolReader:
    """Client process. Reads one answer, piece by piece.

    Args:
        make_parser: Returns a parser of vLLM's, which has a state of its own.
        request: What parsers want to know of the request, as vLLM's chat endpoint has
            it.

    Attributes:
        skip_special_tokens: Whether the parser reads answers without special tokens.
    """

    def __init__(self, make_parser: Callable[[], Any], request: Any) -> None:
        """Wait for the first piece."""
        self._make_parser, self._parser = make_parser, make_parser()
        self._request = self._parser.adjust_request(request)
        self.skip_special_tokens = bool(self._request.skip_special_tokens)
        self._text = self._told = ""
        self._token_ids: list[int] = []
        self._is_lost = False

    def feed(self, text: str, token_ids: Sequence[int]) -> str:
        """Take the next piece; returns text that is no part of a call for sure.

        A parser that stumbles over a piece tells nothing more until the end.
        """
        before, ids_before = self._text, list(self._token_ids)
        self._text += text
        self._token_ids += token_ids
        if self._is_lost or not (text or token_ids):
            return ""
        try:
            delta = self._parser.extract_tool_calls_streaming(
                before,
                self._text,
                text,
                ids_before,
                list(self._token_ids),
                list(token_ids),
                self._request,
            )
        except Exception:
            # Forty parsers of as many authors; what they read at the end is whole.
            self._is_lost = True
            return ""
        content = getattr(delta, "content", None) or ""
        self._told += content
        return content

    def finish(self) -> tuple[str, list[tuple[str, str]]]:
        """Read the whole answer.

        Returns:
            Text that `feed` has not returned, and the calls: name, and arguments as
            JSON.
        """
        return self.read(self._text)

    def read(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """Read a whole answer; returns what `finish` does."""
        try:
            found = self._make_parser().extract_tool_calls(text, self._request)
        except Exception:
            # What cannot be read is text, as in vLLM's own endpoint.
            return _rest(text, self._told), []
        if not found.tools_called:
            return _rest(text, self._told), []
        calls = [(c.function.name, c.function.arguments) for c in found.tool_calls]
        return _rest(found.content or "", self._told), calls


def tool_reader(
    name: str, tools: Sequence[Mapping[str, Any]], tokenizer: Any
) -> ToolReader:
    """Return a reader for one answer.

    Args:
        name: As of vLLM's option ``--tool-call-parser``.
        tools: Those that the model was told of, in OpenAI's form.
        tokenizer: The model's.

    Raises:
        ConfigError: There is no such parser, or it cannot read this model.
        VllmVersionError: vLLM is not installed here.
    """
    try:
        from daric_rag.runtime.vllm_api import chat_request, tool_parser_class
    except VllmVersionError as error:
        raise VllmVersionError(
            f"tool_parser {name!r} is vLLM's, which is needed here too: {error}; or "
            f"leave tool_parser out"
        ) from error
    kind = tool_parser_class(name)
    request = chat_request(tools)

    def make_parser() -> Any:
        parser = kind(tokenizer, request.tools)
        if hasattr(parser, "skip_reasoning_parsing"):
            # Thoughts are text here, and not taken out.
            parser.skip_reasoning_parsing = True
        return parser

    try:
        reader = ToolReader(make_parser, request)
    except Exception as error:
        # Most look for their markers among the model's tokens, and each of them has
        # an error of its own where these are missing.
        raise ConfigError(
            f"tool_parser {name!r} cannot read this model's answers ({error}); pass "
            f"the parser that vLLM's documentation names for the model, and with a "
            f"server tokenizer= as an object"
        ) from error
    if kind not in _made:
        _check_made(name, make_parser(), request)
        _made.add(kind)
    return reader


def _check_made(name: str, parser: Any, request: Any) -> None:
    """Refuse a parser that reads nothing: vLLM registers one."""
    try:
        parser.extract_tool_calls("", request)
    except NotImplementedError as error:
        raise ConfigError(
            f"tool_parser {name!r} stands for a form that vLLM reads elsewhere; leave "
            f"tool_parser out"
        ) from error
    except Exception:
        # An empty answer may be a fault to it.
        return


def _rest(text: str, told: str) -> str:
    """Return what of a text was not told yet; parsers strip the white space around.

    Nothing, where a parser told something else than it read in the end.
    """
    if text.startswith(told):
        return text[len(told) :]
    text, told = text.lstrip(), told.strip()
    return text[len(told) :] if text.startswith(told) else ""
