"""A server whose scheduler and workers are processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from daric_rag import RemoteEngine, TokenPrompt
from tests.runtime.harness import QUESTION
from tests.runtime.served import KEY, serving

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("all_cpus"),
]

A, B = (list(range(first, first + 96)) for first in (20, 140))
PROMPT = TokenPrompt([A, B, list(QUESTION)])


def test_streamed_answers_have_their_counts(
    tiny_model: Callable[[str | Path], Path], tmp_path: Path, no_engine: None
) -> None:
    options = ("--dtype=float32", "--max-model-len=1024", "--max-num-seqs=8")
    memory = f"--kv-cache-memory-bytes={64 << 20}"
    store, log = tmp_path / "store", tmp_path / "log"
    ranks = ("--tensor-parallel-size", "2")
    model = tiny_model("llama-mha")
    with (
        serving(model, store, log, memory, *options, command=ranks) as url,
        RemoteEngine(url, api_key=KEY) as engine,
    ):
        cold = engine.generate(PROMPT, max_tokens=8, ignore_eos=True)
        warm = engine.generate(
            TokenPrompt([B, A, list(QUESTION)]), max_tokens=8, ignore_eos=True
        )
        stopped = engine.generate(
            PROMPT, max_tokens=8, ignore_eos=True, stop=cold.text[2:4]
        )
    assert (cold.reuse.generated_tokens, cold.reuse.saved_tokens) == (96, 192)
    assert (warm.reuse.hit_tokens, warm.reuse.generated_tokens) == (192, 0)
    assert stopped.finish_reason == "stop"
    assert stopped.reuse.reason == ""
    assert stopped.reuse.prompt_tokens == cold.reuse.prompt_tokens
