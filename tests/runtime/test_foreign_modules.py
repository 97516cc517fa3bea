"""What else a process has loaded does not keep an engine from starting."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

START = """
import llvmlite.binding
from daric_rag import EmbeddedEngine, TokenPrompt
with EmbeddedEngine({model!r}, store=":memory:", dtype="float32") as engine:
    engine.generate(TokenPrompt([[5, 6, 7]]), max_tokens=1)
"""


@pytest.mark.engine
def test_an_engine_starts_where_numba_is_loaded(
    tiny_model: Callable[[str | Path], Path], no_engine: None
) -> None:
    """In a process of its own, because there llvmlite comes before vLLM."""
    code = START.format(model=str(tiny_model("llama-mha")))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
