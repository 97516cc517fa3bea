"""The examples in Python run as they are, with the real model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from daric_rag.data import load_demo_sets

EXAMPLES = Path(__file__).parents[2] / "examples" / "prewarm"

pytestmark = [pytest.mark.engine, pytest.mark.real_model]


def run(name: str, module: str) -> list[str]:
    """What an example prints; `real_model` has seen to the model's conversion."""
    pytest.importorskip(module)
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_langchain_indexes_is_hit(real_model: Path) -> None:
    first, second = run("langchain_indexing.py", "langchain_core")
    number = len(load_demo_sets()["town_archive"][0].chunks)
    assert first == f"{number} documents pre-warmed"
    assert second == "4 retrieved; 0 tokens missed"


def test_what_llama_index_ingests_is_computed_once(real_model: Path) -> None:
    first, second, last = run("llama_index_ingestion.py", "llama_index.core")
    number = int(first.split()[0])
    assert first == f"{number} nodes pre-warmed, 0 known"
    assert second == f"0 nodes pre-warmed, {number} known"
    assert last == f"{number} nodes"
    assert number > 1
