"""Answers of an engine as LangChain's messages, whole or piece by piece."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from daric_rag.engine import Completion, Delta
from daric_rag.integrations._tool_calls import (
    AnswerReader,
    CallReader,
    ParsedCalls,
    ToolCall,
)

__all__ = ["AnswerForm", "AnswerStream", "chat_result", "combined_outputs"]

PROVIDER = "daric"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How an answer is to be read.

    Attributes:
        model_name: Said in the response's metadata.
        is_call: Whether it is the JSON of a tool call, and nothing else.
        tool_names: Of the bound tools.
        make_parser: Returns an engine's own reader of calls, if one was named.
    """

    model_name: str
    is_call: bool = False
    tool_names: Sequence[str] = ()
    make_parser: Callable[[], Any] | None = None

    def reader(self) -> AnswerReader:
        """Return what splits one answer into text and calls."""
        if self.make_parser is not None:
            return ParsedCalls(self.make_parser())
        return CallReader(is_call=self.is_call, names=self.tool_names)


class AnswerStream:
    """An engine's deltas to LangChain's chunks; those of the first answer.

    Args:
        form: How to read it.
    """

    def __init__(self, form: AnswerForm) -> None:
        """Wait for the first delta."""
        self._form = form
        self._reader = form.reader()
        self._num_calls = 0

    def feed(self, delta: Delta) -> Iterator[ChatGenerationChunk]:
        """Take a delta and yield what it makes sure; the last chunk has the counts."""
        logprobs = _logprobs(delta.token_ids, delta.logprobs)
        for found in self._reader.feed(delta.text, delta.token_ids):
            yield self._chunk(found, logprobs)
            logprobs = None
        if delta.completion is None:
            if logprobs is not None:
                yield self._chunk("", logprobs)
            return
        for found in self._reader.finish():
            yield self._chunk(found, logprobs)
            logprobs = None
        message = AIMessageChunk(
            content="",
            usage_metadata=_usage(delta.completion),
            response_metadata=_metadata(delta.completion, self._form),
            chunk_position="last",
        )
        info = None if logprobs is None else {"logprobs": logprobs}
        yield ChatGenerationChunk(message=message, generation_info=info)

    def _chunk(
        self, found: str | ToolCall, logprobs: dict[str, Any] | None
    ) -> ChatGenerationChunk:
        info = None if logprobs is None else {"logprobs": logprobs}
        if isinstance(found, str):
            return ChatGenerationChunk(
                message=AIMessageChunk(content=found), generation_info=info
            )
        call = tool_call_chunk(
            name=found.name, args=found.arguments, id=_call_id(), index=self._num_calls
        )
        self._num_calls += 1
        message = AIMessageChunk(content="", tool_call_chunks=[call])
        return ChatGenerationChunk(message=message, generation_info=info)


def chat_result(completion: Completion, form: AnswerForm) -> ChatResult:
    """Return a request's answers, one generation each.

    Every message counts the prompt's tokens, which were computed once for all;
    ``llm_output`` has the sums of the request.
    """
    answers = completion.answers
    num_generated = sum(len(answer.token_ids) for answer in answers)
    num_prompt = completion.reuse.prompt_tokens
    return ChatResult(
        generations=[_generation(answer, form) for answer in answers],
        llm_output={
            "model_name": form.model_name,
            "token_usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_generated,
                "total_tokens": num_prompt + num_generated,
            },
        },
    )


def combined_outputs(outputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return several requests' ``llm_output`` as one; cached answers have none."""
    usages = [output["token_usage"] for output in outputs]
    if not usages:
        return {}
    totals = {name: sum(usage[name] for usage in usages) for name in usages[0]}
    return {**outputs[0], "token_usage": totals}


def _generation(answer: Completion, form: AnswerForm) -> ChatGeneration:
    found = list(form.reader().read(answer.text))
    message = AIMessage(
        "".join(part for part in found if isinstance(part, str)),
        tool_calls=[
            {
                "name": part.name,
                "args": part.parsed(),
                "id": _call_id(),
                "type": "tool_call",
            }
            for part in found
            if isinstance(part, ToolCall)
        ],
        usage_metadata=_usage(answer),
        response_metadata=_metadata(answer, form),
    )
    logprobs = _logprobs(answer.token_ids, answer.logprobs)
    if logprobs is not None:
        message.response_metadata["logprobs"] = logprobs
    info = {"finish_reason": answer.finish_reason}
    return ChatGeneration(message=message, generation_info=info)


def _usage(answer: Completion) -> UsageMetadata:
    num_prompt, num_generated = answer.reuse.prompt_tokens, len(answer.token_ids)
    return UsageMetadata(
        input_tokens=num_prompt,
        output_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        input_token_details={"cache_read": answer.reuse.reused_tokens},
    )


def _metadata(answer: Completion, form: AnswerForm) -> dict[str, Any]:
    return {
        "model_name": form.model_name,
        "model_provider": PROVIDER,
        "finish_reason": answer.finish_reason,
        "ttft_s": answer.ttft_s,
        "reuse": asdict(answer.reuse),
    }


def _logprobs(
    token_ids: Sequence[int], positions: Sequence[dict[int, float]] | None
) -> dict[str, Any] | None:
    """Return log-probabilities in OpenAI's form, tokens named by their ids."""
    if not positions:
        return None
    content = [
        {
            "token_id": token,
            "logprob": position[token],
            "top_logprobs": [
                {"token_id": other, "logprob": value}
                for other, value in position.items()
            ],
        }
        for token, position in zip(token_ids, positions, strict=False)
    ]
    return {"content": content}


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
