"""``daric serve-command`` prints what a shell takes for the right command."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from daric_rag import DaricConfig, cli
from daric_rag.runtime import serving
from daric_rag.runtime.serving import (
    FIXED_OPTIONS,
    MIDDLEWARE,
    cpu_binding,
    default_options,
    transfer_fields,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(cli.app, ["serve-command", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def parts(*arguments: object) -> tuple[dict[str, str], list[str]]:
    told = json.loads(run("--json", *arguments).stdout)
    return told["environment"], told["arguments"]


def option(words: list[str], name: str) -> str | None:
    values = [w.removeprefix(f"--{name}=") for w in words if w.startswith(f"--{name}=")]
    return values[-1] if values else None


def test_a_shell_reads_what_json_says(model: Path) -> None:
    arguments = (model, "--store", "it's here", "--", "--max-model-len", "4096")
    variables, words = parts(*arguments)
    text = run(*arguments).stdout
    assert shlex.split(text.replace("\\\n", "")) == [
        *(f"{name}={value}" for name, value in variables.items()),
        *words,
    ]
    assert words[-2:] == ["--max-model-len", "4096"]


@pytest.mark.parametrize(
    ("device", "program", "expected"),
    [
        ("gpu", "vllm", ["", "serve", "MODEL"]),
        ("cpu", "python", ["0|1", "-m", "MODULE", "--model=MODEL"]),
    ],
)
def test_a_shell_sets_the_environment(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    program: str,
    expected: list[str],
) -> None:
    """The program itself replaced by one that prints what it was given."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    file = tmp_path / program
    file.write_text('#!/bin/sh\nprintf "%s\n" "$VLLM_CPU_OMP_THREADS_BIND" "$@"\n')
    file.chmod(0o755)
    done = subprocess.run(
        [
            "sh",
            "-c",
            run(model, "--device", device, "--tensor-parallel-size", 2).stdout,
        ],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    names = {"MODEL": str(model), "--model=MODEL": f"--model={model}"}
    names["MODULE"] = "vllm.entrypoints.launchers.api_server.entry"
    words = done.stdout.splitlines()
    assert words[: len(expected)] == [names.get(word, word) for word in expected]
    assert words[-1] == "--port=8000"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_server_gets_what_an_embedded_engine_gets(model: Path, device: str) -> None:
    _, words = parts(model, "--device", device, "--store", ":memory:")
    given = default_options(on_cpu=device == "cpu") | FIXED_OPTIONS
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            assert (f"--{flag}" if value else f"--no-{flag}") in words
        else:
            assert option(words, flag) == str(value)
    transfer = json.loads(option(words, "kv-transfer-config") or "")
    assert transfer == transfer_fields(":memory:", DaricConfig())
    assert option(words, "middleware") == MIDDLEWARE
    assert option(words, "served-model-name") == str(model)
    assert ("--block-size=32" in words) == (device == "cpu")


@pytest.mark.parametrize(
    ("cpuinfo", "is_fast"),
    [
        ("processor: 0\nflags\t\t: fpu avx avx2\n", False),
        ("processor: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("processor: 0\nFeatures\t: fp asimd bf16\n", True),
        (None, True),
    ],
)
def test_a_cpu_that_would_crawl_in_bfloat16_computes_in_float32(
    cpuinfo: str | None,
    is_fast: bool,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    assert serving.has_fast_bfloat16(path) == is_fast
    monkeypatch.setattr(serving, "has_fast_bfloat16", lambda: is_fast)
    _, words = parts(model, "--device", "cpu")
    assert ("--dtype=float32" in words) == (not is_fast)
    assert "--dtype=bfloat16" in parts(model, "--", "--dtype=bfloat16")[1]
    _, words = parts(model, "--device", "gpu")
    assert "--dtype=float32" not in words


def test_the_store_s_options_are_the_server_s(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ("--host-bytes", "1GiB", "--disk-bytes", "2GB")
    _, words = parts(model, "--store", "s", "--key-file", "k", *sizes)
    extra = json.loads(option(words, "kv-transfer-config") or "")[
        "kv_connector_extra_config"
    ]
    assert extra["daric_store"] == str(tmp_path / "s")
    assert DaricConfig.from_dict(extra["daric_config"]) == DaricConfig(
        host_bytes=1 << 30,
        disk_bytes=2 * 10**9,
        encryption_key_file=str(tmp_path / "k"),
    )
    monkeypatch.setenv("DARIC_STORE", str(tmp_path / "other"))
    _, words = parts(model)
    assert str(tmp_path / "other") in (option(words, "kv-transfer-config") or "")


def test_a_relative_model_is_found_from_anywhere(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    _, words = parts(f"./{model.name}", "--device", "gpu")
    assert words[:3] == ["vllm", "serve", str(model)]
    # Clients name it as it was named here.
    assert option(words, "served-model-name") == f"./{model.name}"


@pytest.mark.parametrize(
    ("device", "ranks", "expected"),
    [
        ("gpu", 2, {}),
        ("cpu", 1, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
        ("cpu", 2, {"VLLM_CPU_OMP_THREADS_BIND": cpu_binding(2)}),
    ],
)
def test_ranks_and_processes(
    model: Path, device: str, ranks: int, expected: dict[str, str]
) -> None:
    variables, words = parts(model, "--device", device, "--tensor-parallel-size", ranks)
    assert variables == {"VLLM_USE_V2_MODEL_RUNNER": "0"} | expected
    assert option(words, "tensor-parallel-size") == str(ranks)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--store", ""), "--store is empty"),
        (("--key-file", ""), "--key-file is empty"),
        (("--host-bytes", "much"), "is no size"),
    ],
)
def test_mistakes_are_refused(
    model: Path, arguments: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        run(model, *arguments)


def test_no_key_is_printed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "DARIC_STORE_KEY"):
        monkeypatch.setenv(name, "do-not-print-me")
    assert "do-not-print-me" not in run(model).stdout
    assert "do-not-print-me" not in run(model, "--json").stdout


def test_the_fewest_cpus_are_bound_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    assert cpu_binding(1) == "3,5,7"
    assert cpu_binding(2) == "3|5"
    assert cpu_binding(4) == "nobind"
