"""Answers as objects of a schema, by guided decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import (
    convert_to_json_schema,
    convert_to_openai_tool,
)
from langchain_core.utils.pydantic import is_basemodel_subclass

from daric_rag.errors import ConfigError

__all__ = ["structured_output"]

_METHODS = ("json_schema", "function_calling", "json_mode")


class _Whole:
    """Refuses an answer that is no whole one; pieces of a stream are read as ever."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Read an answer.

        Raises:
            OutputParserException: It was cut short, or there is nothing to read.
        """
        if not partial:
            self._check(result[0])
        parsed = super().parse_result(  # type: ignore[misc]
            result, partial=partial
        )
        if parsed is None and not partial:
            raise OutputParserException(
                "the answer is no call to the schema's tool; raise max_tokens if it "
                'was cut short, or use method="json_schema"',
                llm_output=result[0].text,
            )
        return parsed

    def _check(self, generation: Generation) -> None:
        message = getattr(generation, "message", None)
        metadata = getattr(message, "response_metadata", {})
        if metadata.get("finish_reason") in ("length", "abort"):
            raise OutputParserException(
                f"the answer was cut short (finish_reason is "
                f"{metadata['finish_reason']}); raise max_tokens",
                llm_output=generation.text,
            )


class _Json(_Whole):
    """LangChain's parsers complete half a JSON object, and nobody would know."""

    def _check(self, generation: Generation) -> None:
        super()._check(generation)
        try:
            json.loads(generation.text)
        except ValueError as error:
            raise OutputParserException(
                f"the answer is not JSON ({error}); if it was cut short, raise "
                f"max_tokens or drop stop",
                llm_output=generation.text,
            ) from error


class _WholeJson(_Json, JsonOutputParser):
    """Reads JSON."""


class _WholeObject(_Json, PydanticOutputParser[Any]):
    """Reads an object of a class."""


class _JsonCall(_Whole, JsonOutputKeyToolsParser):
    """Reads a call's arguments."""


class _PydanticCall(_Whole, PydanticToolsParser):
    """Reads a call's arguments as an object of a class."""


def structured_output(
    model: BaseChatModel,
    schema: dict[str, Any] | type | None,
    *,
    method: str,
    include_raw: bool,
    options: Mapping[str, Any],
) -> Runnable[Any, Any]:
    """Return a chain of a guided model and what reads its answers.

    Args:
        model: A `ChatDaric`.
        schema: See `ChatDaric.with_structured_output`, as for the rest.
        method: How the answer is guided.
        include_raw: Whether the message itself is returned too.
        options: Further ones of every request.

    Raises:
        ConfigError: There is no schema, or no such method.
    """
    if method not in _METHODS:
        raise ConfigError(f"method is {method!r}; it must be one of {_METHODS}")
    if schema is None and method != "json_mode":
        raise ConfigError(
            f'method="{method}" needs a schema; pass a pydantic class, a TypedDict or '
            f'a JSON schema, or method="json_mode"'
        )
    if schema is None:
        guided: Runnable[Any, Any] = model.bind(json_object=True, **options)
        parser: Any = _WholeJson()
    else:
        if method != "function_calling":
            schema = _titled(schema)
        told = {"kwargs": {"method": method}, "schema": convert_to_openai_tool(schema)}
        named = {"ls_structured_output_format": told, **options}
        if method == "function_calling":
            guided, parser = _calling(model, schema, named), _call_parser(schema)
        else:
            guided = model.bind(json_schema=_json_schema(schema), **named)
            parser = _json_parser(schema)
    return _with_raw(guided, parser) if include_raw else guided | parser


def _calling(model: BaseChatModel, schema: Any, options: Mapping[str, Any]) -> Any:
    name = convert_to_openai_tool(schema)["function"]["name"]
    return model.bind_tools([schema], tool_choice=name, **options)


def _call_parser(schema: Any) -> Any:
    if _is_pydantic(schema):
        return _PydanticCall(tools=[schema], first_tool_only=True)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return _JsonCall(key_name=name, first_tool_only=True)


def _json_parser(schema: Any) -> Any:
    if _is_pydantic(schema):
        return _WholeObject(pydantic_object=schema)
    return _WholeJson()


def _json_schema(schema: Any) -> dict[str, Any]:
    if _is_pydantic(schema) and hasattr(schema, "model_json_schema"):
        own: dict[str, Any] = schema.model_json_schema()
        return own
    return convert_to_json_schema(schema)


def _titled(schema: Any) -> Any:
    # Of a tool LangChain needs the name, of an answer nobody does.
    if isinstance(schema, Mapping) and not {"title", "name", "function"} & set(schema):
        return {"title": "Answer", **schema}
    return schema


def _is_pydantic(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _with_raw(guided: Any, parser: Any) -> Runnable[Any, Any]:
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=guided) | parsed.with_fallbacks(
        [unparsed], exception_key="parsing_error"
    )
