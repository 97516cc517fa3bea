"""The examples run as they are, and reuse what they say they do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.engine, pytest.mark.real_model]


def output_of(name: str) -> str:
    """What an example prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def counts_of(output: str) -> list[tuple[int, int]]:
    """Tokens that were not computed, and tokens of the prompt, per prompt."""
    found = re.findall(r"(\d+) of (\d+) tokens", output)
    return [(int(cached), int(total)) for cached, total in found]


def test_questions_over_a_folder(real_model: Path) -> None:
    """Even the first one finds its documents, which were cached while indexed."""
    pytest.importorskip("bm25s")
    output = output_of("llama_index_rag.py")
    counts = counts_of(output)
    assert len(counts) == 3
    assert all(cached > 0.5 * total for cached, total in counts)
    sources = re.findall(r"from (\w+), \w+, \w+", output)
    assert sources == ["lighthouse", "bridge", "ferry"]


def test_an_agent_loop(real_model: Path) -> None:
    """What one step computed, the next one finds: all but the last messages."""
    first, *later = counts_of(output_of("agent_loop.py"))
    assert first[0] == 0
    before = first[1]
    for cached, total in later:
        assert 0.8 * before < cached < total
        before = total
