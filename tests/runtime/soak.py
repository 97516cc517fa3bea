"""Sends a storm of requests to an engine, and makes trouble meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daric_rag import Completion, TokenPrompt
from daric_rag.errors import StoreError
from tests.reference.prompts import TokenIds
from tests.runtime.harness import Harness
from tests.runtime.soak_asks import NUM_TALKS, Ask, Trouble
from tests.runtime.test_faults import (
    delete,
    empty,
    flip_header,
    truncate,
)

MAX_TALK_LEN = 500
TIMEOUT_S = 60.0


@dataclass
class Talk:
    """A conversation under way.

    Attributes:
        name: Its id; "" before its first turn.
        chunks: Of its last turn, the answer included.
        is_over: Nobody knows what its blocks are any more: a turn was aborted, or was
            preempted and perhaps went on over another prefix.
        turn: Held while a turn is under way.
    """

    name: str = ""
    chunks: tuple[TokenIds, ...] = ()
    is_over: bool = True
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Answer:
    """A completed request.

    Attributes:
        ask: The request.
        chunks: Its prompt.
        talk: Its conversation's id, or None.
        completion: What came.
        num_certain: Tokens of it that are certain to come from the prefix that was
            reported: those before the first preemption, if a prefix may change.
    """

    ask: Ask
    chunks: tuple[TokenIds, ...]
    talk: str | None
    completion: Completion
    num_certain: int


class Storm:
    """Sends requests and collects what comes.

    Attributes:
        answers: Completed requests, in the order of their completion.
        errors: Requests that failed, and how.
        num_aborted: Requests that were ended before their answer.
        preempted: Prompts that were preempted, and the tokens they had by then.

    Args:
        harness: The engine.
        documents: The pool.
        damage: Damages a record on disk.
    """

    def __init__(
        self,
        harness: Harness,
        documents: Sequence[TokenIds],
        damage: Callable[[], None],
    ) -> None:
        self._engine, self._documents, self._damage = harness.engine, documents, damage
        self._talks = [Talk() for _ in range(NUM_TALKS)]
        self.answers: list[Answer] = []
        self.errors: list[tuple[Ask, BaseException]] = []
        self.num_aborted = 0
        self.preempted: dict[TokenIds, int] = {}

    def note_preemption(self, request: Any) -> None:
        """In the engine's thread: a request loses its blocks."""
        ids = tuple(request.prompt_token_ids)
        self.preempted.setdefault(ids, request.num_output_tokens)

    async def run(self, asks: Sequence[Ask]) -> None:
        """Send everything; ends early when something failed."""
        under_way: set[asyncio.Task[None]] = set()
        for ask in asks:
            is_idle_wanted = ask.trouble == "clear_prefix_cache"
            while under_way and (is_idle_wanted or len(under_way) >= ask.max_in_flight):
                await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            if self.errors:
                break
            if ask.trouble:
                await asyncio.to_thread(self._make_trouble, ask.trouble)
            task = asyncio.create_task(self._send(ask))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)

    def _make_trouble(self, trouble: Trouble) -> None:
        if trouble == "damage":
            self._damage()
        elif trouble == "clear_host":
            self._engine.clear_host()
        else:
            self._engine.clear_prefix_cache()

    async def _send(self, ask: Ask) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if ask.talk is None:
                    documents = (self._documents[i] for i in ask.documents)
                    await self._ask(ask, (*documents, ask.question))
                else:
                    await self._take_turn(ask, self._talks[ask.talk])
        except Exception as error:
            self.errors.append((ask, error))

    async def _take_turn(self, ask: Ask, talk: Talk) -> None:
        async with talk.turn:
            if talk.is_over:
                talk.name, talk.chunks = f"talk {ask.number}", ()
            kept = list(talk.chunks[: max(1, len(talk.chunks) - ask.num_dropped)])
            added = [*(self._documents[i] for i in ask.documents), ask.question]
            while kept and sum(map(len, (*kept, *added))) > MAX_TALK_LEN:
                kept.pop()
            chunks = (*kept, *added)
            talk.is_over = True
            answer = await self._ask(ask, chunks, talk.name)
            if answer is not None:
                tokens = answer.completion.token_ids
                talk.chunks = (*chunks, tokens)
                talk.is_over = answer.num_certain < len(tokens)

    async def _ask(
        self, ask: Ask, chunks: tuple[TokenIds, ...], talk: str | None = None
    ) -> Answer | None:
        completion = await self._completion(ask, chunks, talk)
        if completion is None:
            self.num_aborted += 1
            return None
        num_certain = len(completion.token_ids)
        if talk is not None:
            ids = tuple(token for chunk in chunks for token in chunk)
            num_certain = self.preempted.get(ids, num_certain)
        answer = Answer(ask, chunks, talk, completion, num_certain)
        self.answers.append(answer)
        return answer

    async def _completion(
        self, ask: Ask, chunks: tuple[TokenIds, ...], talk: str | None
    ) -> Completion | None:
        """The answer; None if the request was ended before."""
        prompt = TokenPrompt(chunks)
        options: dict[str, Any] = {
            "max_tokens": ask.max_tokens,
            "reuse": ask.reuse,
            "namespace": ask.namespace,
            "conversation": talk,
            "logprobs": 0,
            "ignore_eos": True,
        }
        if ask.ending == "closed":
            return await self._closed(prompt, options, int(ask.ends_after))
        task = asyncio.create_task(self._engine.agenerate(prompt, **options))
        if ask.ending == "cancelled":
            await asyncio.wait({task}, timeout=ask.ends_after)
            task.cancel()
            await asyncio.wait({task})
            if task.cancelled():
                return None
        return await task

    async def _closed(
        self, prompt: TokenPrompt, options: dict[str, Any], num_deltas: int
    ) -> Completion | None:
        stream = self._engine.astream(prompt, **options)
        completion = None
        async for delta in stream:
            completion = delta.completion
            num_deltas -= 1
            if not num_deltas:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return completion


class Damage:
    """Damages one record on disk at a time, in one way or another."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._draw = folder, random.Random(seed)

    def __call__(self) -> None:
        # Eviction goes on meanwhile.
        with suppress(FileNotFoundError):
            files = [p for p in self._folder.glob("??/??/*.val") if p.stat().st_size]
            if files:
                # What a truncation has left short has no byte to flip.
                with suppress(IndexError):
                    ways = (delete, empty, flip_header, truncate, self._scramble)
                    self._draw.choice(ways)([self._draw.choice(sorted(files))])

    def _scramble(self, files: list[Path]) -> None:
        """Flips bits in the second half, which holds values."""
        for path in files:
            content = path.read_bytes()
            half = len(content) // 2
            noise = self._draw.randbytes(len(content) - half)
            path.write_bytes(content[:half] + noise)


@dataclass
class Flaky:
    """Lets a store's calls fail now and then.

    Attributes:
        num_failures: Calls that failed.
    """

    seed: int
    probability: float
    num_failures: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, failing now and then."""

        def failing(*args: Any, **options: Any) -> Any:
            if self._draw.random() < self.probability:
                self.num_failures += 1
                errors = (StoreError("no"), OSError("no"), RuntimeError("a bug"))
                raise self._draw.choice(errors)
            return call(*args, **options)

        return failing
