"""A stream of questions over a common pool of documents, to be asked side by side."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daric_rag.data import load_demo_sets
from daric_rag.engine import ChunkedPrompt
from daric_rag.errors import ConfigError, PromptError

__all__ = ["ReplayRequest", "demo_replay", "load_replay", "parse_rates"]

_WARM_UP_SHARE = 0.2
_DOCUMENTS = 8


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request.

    Attributes:
        prompt: Documents and question.
        warm_up: It fills stores and caches and is not counted.
    """

    prompt: ChunkedPrompt
    warm_up: bool


def load_replay(folder: Path, num: int) -> list[ReplayRequest]:
    """Return at most `num` requests of a folder, a fifth of them warm-up.

    ``async_chunks.jsonl`` has ``chunk_id`` (one is ``system``) and ``text`` a line,
    ``async_requests.jsonl`` ``chunk_ids``, ``question`` and ``phase``.

    Raises:
        PromptError: A file is missing or not in that format.
    """
    chunks = _lines(folder / "async_chunks.jsonl")
    requests = _lines(folder / "async_requests.jsonl")
    try:
        texts = {chunk["chunk_id"]: chunk["text"] for chunk in chunks}
        system = texts["system"]
        every = [
            ReplayRequest(
                ChunkedPrompt(
                    system=system,
                    documents=[texts[name] for name in request["chunk_ids"]],
                    question=request["question"],
                ),
                request["phase"] == "warmup",
            )
            for request in requests
        ]
    except (KeyError, TypeError) as error:
        raise PromptError(
            f"{folder} does not hold requests to replay: {error} is missing; see "
            f"daric_rag.evaluation.replay for the format"
        ) from error
    num_warm_up = round(_WARM_UP_SHARE * num)
    warm_up = [request for request in every if request.warm_up][:num_warm_up]
    counted = [request for request in every if not request.warm_up]
    return warm_up + counted[: num - num_warm_up]


def demo_replay(num: int, seed: int) -> list[ReplayRequest]:
    """Return `num` requests over the shipped sets, a fifth of them warm-up.

    Each has a question of a set and eight of that set's documents, in random order.
    """
    rng = random.Random(seed)
    sets = list(load_demo_sets().values())
    requests = []
    for index in range(num):
        records = sets[index % len(sets)]
        pool = list(dict.fromkeys(text for one in records for text in one.chunks))
        record = rng.choice(records)
        prompt = ChunkedPrompt(
            system=record.system,
            documents=rng.sample(pool, _DOCUMENTS),
            question=record.question,
        )
        requests.append(ReplayRequest(prompt, index < round(_WARM_UP_SHARE * num)))
    return requests


def parse_rates(text: str) -> list[float]:
    """Return requests a second from text such as ``0.1,0.2``.

    Raises:
        ConfigError: A part is no positive number.
    """
    try:
        rates = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(f"{text!r} are no rates; write for instance 0.1,0.2,0.4")
    return rates


def _lines(file: Path) -> list[Any]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise PromptError(
            f"{file} cannot be read as lines of JSON: {error}; give --data a folder "
            f"with async_requests.jsonl and async_chunks.jsonl, or leave it out"
        ) from error
