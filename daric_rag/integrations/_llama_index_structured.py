"""Structured answers: decoding that only the schema's JSON can come out of."""

from __future__ import annotations

from typing import Any, TypeVar

from llama_index.core.bridge.pydantic import BaseModel, ValidationError

from daric_rag.errors import EngineError
from daric_rag.integrations._llama_index_settings import EngineLLM

__all__ = ["StructuredLLM", "guided", "read"]

_Object = TypeVar("_Object", bound=BaseModel)


class StructuredLLM(EngineLLM):
    """LlamaIndex's structured prediction, on guided decoding.

    LlamaIndex writes the schema into the prompt and hopes; here no other tokens than
    the schema's can be drawn either. So ``as_structured_llm`` and programs do as well.
    """

    def structured_predict(
        self,
        output_cls: Any,
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """Return an object of a class.

        Args:
            output_cls: A class of pydantic.
            prompt: A template of LlamaIndex.
            llm_kwargs: Generation options.
            **prompt_args: Of the template.

        Raises:
            ValidationError: The answer was cut short; raise ``max_tokens``.
        """
        options = guided(output_cls, llm_kwargs)
        return super().structured_predict(output_cls, prompt, options, **prompt_args)

    async def astructured_predict(
        self,
        output_cls: Any,
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """Return an object of a class, concurrently with others."""
        options = guided(output_cls, llm_kwargs)
        return await super().astructured_predict(
            output_cls, prompt, options, **prompt_args
        )

    def _structured_stream_call(
        self,
        output_cls: Any,
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        options = guided(output_cls, llm_kwargs)
        return super()._structured_stream_call(
            output_cls, prompt, options, **prompt_args
        )

    async def _structured_astream_call(
        self,
        output_cls: Any,
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        options = guided(output_cls, llm_kwargs)
        return await super()._structured_astream_call(
            output_cls, prompt, options, **prompt_args
        )


def guided(
    output_cls: type[BaseModel], options: dict[str, Any] | None
) -> dict[str, Any]:
    """Return generation options under which an answer is an object of a class."""
    return {"json_schema": output_cls.model_json_schema(), **(options or {})}


def read(output_cls: type[_Object], text: str, finish_reason: str) -> _Object:
    """Return the object that a guided answer is.

    Raises:
        EngineError: It was cut short, or breaks a rule that no schema tells.
    """
    try:
        return output_cls.model_validate_json(text)
    except ValidationError as error:
        mend = "raise max_tokens" if finish_reason == "length" else "ask another way"
        raise EngineError(
            f"the answer is no {output_cls.__name__} ({error.error_count()} errors, "
            f"finish reason {finish_reason!r}); {mend}"
        ) from error
