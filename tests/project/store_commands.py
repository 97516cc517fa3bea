"""Running ``daric store`` in a test, and looking at what it left."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from daric_rag import cli
from daric_rag.storage import DiskTier
from tests.storage.archives import NUMBERS
from tests.storage.records import CAPACITY_BYTES, read


def invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(cli.app, ["store", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def answer(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def titles(folder: Path) -> set[str]:
    listed = answer("ls", "--store", str(folder))["documents"]
    return {document["title"] for document in listed}


def held(folder: Path) -> set[int]:
    with closing(DiskTier(folder, CAPACITY_BYTES)) as tier:
        return {number for number in NUMBERS if read(tier, number) is not None}
