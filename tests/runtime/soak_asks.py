"""What a seed draws: documents, requests, and the trouble between them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from daric_rag.engine import Reuse
from tests.reference.prompts import TokenIds, random_chunks

NUM_DOCUMENTS = 40
DOCUMENT_LENS = (8, 96)
QUESTION_LENS = (3, 12)
MAX_DOCUMENTS = 6  # of a prompt
MAX_TOKENS = 6
# Now and then a few answers are long, so that requests outgrow the blocks there are.
LONG_ANSWER = 40
NUM_TALKS = 4
MAX_IN_FLIGHT = (2, 4, 8, 12, 16, 16)
PHASE_LEN = 40

Ending = Literal["answered", "cancelled", "closed"]
Trouble = Literal["", "damage", "clear_host", "clear_prefix_cache"]


@dataclass(frozen=True)
class Ask:
    """One request, as the seed has it.

    Attributes:
        number: Its place in the storm.
        documents: Numbers of documents in the pool, in prompt order.
        question: Ids of the prompt's last chunk.
        reuse: Its mode.
        namespace: Its tenant; None is the engine's own.
        max_tokens: Of the answer.
        talk: Number of the conversation that it goes on with; None: of none.
        num_dropped: Chunks that are taken from the conversation's end before.
        ending: How it ends.
        ends_after: Seconds until it is cancelled, or deltas until it is closed.
        max_in_flight: Requests that may be under way with it, itself included.
        trouble: What happens before it is sent.
    """

    number: int
    documents: tuple[int, ...]
    question: TokenIds
    reuse: Reuse
    namespace: str | None
    max_tokens: int
    talk: int | None = None
    num_dropped: int = 0
    ending: Ending = "answered"
    ends_after: float = 0
    max_in_flight: int = 1
    trouble: Trouble = ""


def draw_documents(seed: int) -> tuple[TokenIds, ...]:
    """The pool; short documents are more frequent than long ones."""
    draw = random.Random(seed)
    shortest, longest = DOCUMENT_LENS
    lens = [
        round(shortest * (longest / shortest) ** draw.random())
        for _ in range(NUM_DOCUMENTS)
    ]
    return random_chunks(seed, lens, 512)


def draw_asks(seed: int, num_asks: int) -> list[Ask]:
    """The storm: single requests, repeated ones, several at once, conversations."""
    draw = random.Random(seed)
    num_phases = -(-num_asks // PHASE_LEN)
    limits = [draw.choice(MAX_IN_FLIGHT) for _ in range(num_phases)]
    asks: list[Ask] = []
    while len(asks) < num_asks:
        for drawn in _drawn(draw, asks)[: num_asks - len(asks)]:
            number = len(asks)
            limit = limits[number // PHASE_LEN]
            ask = replace(_ended(draw, drawn), number=number, max_in_flight=limit)
            asks.append(ask)
    return asks


def _drawn(draw: random.Random, asks: Sequence[Ask]) -> list[Ask]:
    kind = draw.random()
    earlier = [ask for ask in asks[-200:] if ask.talk is None]
    if kind < 0.2 and earlier:
        return [draw.choice(earlier)]
    ask = Ask(
        number=0,
        documents=_some_documents(draw, MAX_DOCUMENTS),
        question=_question(draw),
        reuse=draw.choices(get_args(Reuse), (65, 15, 20))[0],
        namespace=draw.choice((None, None, None, "tenant")),
        max_tokens=draw.randint(1, MAX_TOKENS),
    )
    if kind < 0.3:
        return [ask] * draw.randint(2, 4)
    if kind < 0.37:
        return _turns(draw, ask, draw.randint(2, 5))
    if kind < 0.41:
        long = replace(ask, max_tokens=LONG_ANSWER)
        return [replace(long, question=_question(draw)) for _ in range(8)]
    return [ask]


def _turns(draw: random.Random, ask: Ask, num_turns: int) -> list[Ask]:
    """A few turns of one conversation; it grows, or shrinks and is asked anew."""
    talk, turns = draw.randrange(NUM_TALKS), []
    for _ in range(num_turns):
        grows = draw.random() < 0.75
        turn = replace(
            ask,
            talk=talk,
            documents=_some_documents(draw, 2) if grows else (),
            question=_question(draw),
            num_dropped=0 if grows else draw.randint(2, 5),
            reuse="daric" if talk else "full_reuse",
            namespace=None,
        )
        turns.append(turn)
    return turns


def _some_documents(draw: random.Random, most: int) -> tuple[int, ...]:
    """A few of the pool; the first ones are the popular ones."""
    weights = [1 / (1 + rank) ** 0.5 for rank in range(NUM_DOCUMENTS)]
    number = min(draw.randint(1, most), draw.randint(1, most))
    return tuple(draw.choices(range(NUM_DOCUMENTS), weights, k=number))


def _question(draw: random.Random) -> TokenIds:
    return tuple(draw.randrange(16, 512) for _ in range(draw.randint(*QUESTION_LENS)))


def _ended(draw: random.Random, ask: Ask) -> Ask:
    troubles: tuple[Trouble, ...] = get_args(Trouble)
    trouble = draw.choices(troubles, (88, 10, 1, 1))[0]
    chance = draw.random()
    if chance < 0.06:
        after_s = draw.choice((0.0, 0.02, 0.1, 0.3)) * draw.random()
        return replace(ask, ending="cancelled", ends_after=after_s, trouble=trouble)
    if chance < 0.1:
        num_deltas = draw.randint(1, 4)
        return replace(ask, ending="closed", ends_after=num_deltas, trouble=trouble)
    return replace(ask, ending="answered", ends_after=0, trouble=trouble)
