"""An engine of a few lines: it answers with what it is told, and remembers requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from daric_rag import Completion, Delta, PromptError, ReuseStats

STATS = ReuseStats(20, gpu_prefix_tokens=4, contiguous_hit_tokens=8)


class FakeEngine:
    def __init__(self, *answers: str, has_tools: bool = True) -> None:
        self.answers, self.has_tools = answers or ("Hi.",), has_tools
        self.requests: list[tuple[Any, dict[str, Any]]] = []
        self.prewarmed: list[Any] = []
        self.num_closed = 0

    def layout(self, prompt: Any) -> Any:
        if prompt.tools and not self.has_tools:
            raise PromptError("the chat template writes no tools")
        return SimpleNamespace(prompt_len=sum(len(t) for _, t in prompt.named_texts()))

    def generate(self, prompt: Any, **options: Any) -> Completion:
        self.requests.append((prompt, options))
        done = [
            Completion(text, tuple(range(len(text))), "stop", None, 0.5, STATS)
            for text in self.answers[: options["n"]]
        ]
        return replace(done[0], alternatives=tuple(done[1:]))

    def stream(self, prompt: Any, **options: Any) -> Iterator[Delta]:
        done = self.generate(prompt, **options)
        for number, char in enumerate(done.text, start=1):
            yield Delta(
                char, (number,), None, done if number == len(done.text) else None
            )

    async def agenerate(self, prompt: Any, **options: Any) -> Completion:
        return self.generate(prompt, **options)

    async def astream(self, prompt: Any, **options: Any) -> AsyncIterator[Delta]:
        for delta in self.stream(prompt, **options):
            yield delta

    def prewarm(self, documents: Any, *, namespace: str | None = None) -> int:
        self.prewarmed += documents
        return len(documents)

    def close(self) -> None:
        self.num_closed += 1
