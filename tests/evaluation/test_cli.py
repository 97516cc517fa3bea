"""The command line: on a fake engine, and end to end on a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from daric_rag import cli, cli_common
from daric_rag.evaluation.situations import SITUATIONS
from tests.evaluation.fakes import FakeEngine

ROW_KEYS = {
    "prompt_tokens",
    "recomputed_tokens",
    "full_prefill_ms",
    "host_ms",
    "disk_ms",
    "cold_ms",
    "full_reuse_ms",
    "floor_ms",
    "tpot_ratio",
}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(cli_common, "_start_engine", lambda *_: engine)
    monkeypatch.setattr("daric_rag.models.resolve_model", lambda model: model)
    return engine


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, [*arguments])


def run_daric(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "daric_rag.cli", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )


def test_demo_shows_tables_and_closes_the_engine(engine: FakeEngine) -> None:
    result = invoke("demo", "--questions", "2")
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in SITUATIONS)
    assert engine.closed


def test_demo_json_is_one_document(engine: FakeEngine) -> None:
    result = invoke("demo", "--json", "--questions", "1", "--store", "somewhere")
    report = json.loads(result.stdout)
    assert report["store"] == "somewhere"
    assert len(report["questions"]) == 1
    assert report["machine"]["versions"]["daric-rag"]


def test_demo_that_did_not_reuse_fails(engine: FakeEngine) -> None:
    engine.wrong = {"contiguous_hit_tokens": 0}
    assert invoke("demo", "--questions", "1").exit_code == 1
    assert engine.closed


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_bench_ends_in_a_line_of_json(engine: FakeEngine, flags: list[str]) -> None:
    result = invoke("bench", "ttft", "--sizes", "600,1.3k", "--repeats", "1", *flags)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert (len(lines) == 1) == bool(flags)
    report = json.loads(lines[-1])
    assert [row["prompt_tokens"] for row in report["rows"]] == [604, 1304]
    assert all(set(row) >= ROW_KEYS for row in report["rows"])
    assert report["repeats"] == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bench", "ttft", "--sizes", "huge"], "'huge' is no prompt size"),
        (["bench", "ttft", "--store", ":memory:"], "reads from disk too"),
        (["demo", "--data", "gone.jsonl"], "cannot read gone.jsonl"),
        (["demo", "--model", "./gone"], "no model at './gone'"),
    ],
)
def test_errors_are_one_line_without_traceback(arguments: list[str], text: str) -> None:
    done = run_daric(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("daric: ")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from daric_rag import cli, cli_common
try:
    cli.app(["--help"])
except SystemExit:
    pass
heavy = {"torch", "vllm", "transformers", "numpy", "daric_rag.evaluation"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


def test_version_names_the_package() -> None:
    assert "daric-rag" in run_daric("version").stdout


@pytest.mark.engine
@pytest.mark.real_model
def test_demo_on_the_real_model(real_model: Path) -> None:
    done = run_daric("demo", "--json", "--questions", "1", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (question,) = report["questions"]
    assert [run["situation"] for run in question["situations"]] == [*SITUATIONS]
    assert not any(run["broken_claim"] for run in question["situations"])
    assert all(run["answer"] for run in question["situations"])


@pytest.mark.engine
@pytest.mark.real_model
def test_bench_on_the_real_model(real_model: Path) -> None:
    done = run_daric("bench", "ttft", "--sizes", "544", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    (row,) = report["rows"]
    assert set(row) >= ROW_KEYS
    assert all(row[key] > 0 for key in ROW_KEYS)
    assert row["floor_tokens"] == row["recomputed_tokens"]
    assert report["machine"]["torch_threads"] >= 1
