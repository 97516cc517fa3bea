"""The API reference has a page for every public module, and a word on every name."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import daric_rag

MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text()


def documented() -> list[str]:
    (names,) = re.findall(r"^DOCUMENTED := (.*?[^\\])\n", MAKEFILE, re.M | re.S)
    return str(names).replace("\\\n", "").split()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` writes."""
    folder = tmp_path_factory.mktemp("docs")
    program = [sys.executable, "-W", "error", "-m", "pdoc", "--docformat", "google"]
    done = subprocess.run(
        [*program, "-o", str(folder), *documented()],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("module", documented())
def test_every_public_name_is_on_its_page(pages: Path, module: str) -> None:
    page = pages.joinpath(*module.split(".")).with_suffix(".html").read_text()
    for name in importlib.import_module(module).__all__:
        assert f'id="{name}"' in page


def test_what_the_package_offers_is_described(pages: Path) -> None:
    page = (pages / "daric_rag.html").read_text()
    for name in daric_rag.__all__:
        if name != "__version__":
            _, _, section = page.partition(f'<section id="{name}">')
            assert 'class="docstring"' in section.partition("</section>")[0], name
