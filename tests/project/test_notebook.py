"""The notebook runs as it is, and is shown with its pictures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

(NOTEBOOK,) = (Path(__file__).parents[2] / "examples").glob("*.ipynb")
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def loaded(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"(\d+) of \d+ tokens loaded", text)]


def test_it_is_shown_with_two_pictures() -> None:
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    texts = "".join("".join(output.get("text", ())) for output in outputs)
    first, *later = loaded(texts)
    assert first == 0
    assert all(later)
    assert "error" not in {output["output_type"] for output in outputs}


@pytest.mark.engine
@pytest.mark.real_model
def test_it_runs(real_model: Path) -> None:
    """Its cells in order, as a kernel would run them, but for the drawing surface."""
    code = "\n".join("".join(cell["source"]) for cell in CODE)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MPLBACKEND": "template"},
    )
    assert done.returncode == 0, done.stderr
    first, *later = loaded(done.stdout)
    assert first == 0
    assert all(later)
