"""A vLLM server as a subprocess, started by the command that is printed for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from typer.testing import CliRunner

from daric_rag import cli

KEY = "the-server-s-key"
_ROOT = Path(__file__).parents[2]
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 20.0


@contextmanager
def serving(
    model: Path, store: Path, log: Path, *options: str, command: Sequence[str] = ()
) -> Iterator[str]:
    """Yields the address of a server, which is ended afterwards.

    Args:
        model: Checkpoint.
        store: Folder of its KV store.
        log: File for what the server says.
        options: Further ones of ``vllm serve``.
        command: Further ones of ``daric serve-command``.
    """
    port = _free_port()
    arguments = [str(model), "--store", str(store), "--port", str(port), *command]
    told = CliRunner().invoke(
        cli.app, ["serve-command", "--json", *arguments, "--", *options]
    )
    command = json.loads(told.stdout)
    words = command["arguments"]
    if words[0] == "python":
        words[0] = sys.executable
    environment = os.environ | command["environment"] | {"VLLM_API_KEY": KEY}
    environment["PYTHONPATH"] = str(_ROOT)
    with (
        log.open("w") as output,
        subprocess.Popen(
            words,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as server,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(server, url, log)
            yield url
        finally:
            _end(server)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            httpx.get(f"{url}/health", timeout=1.0).raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-3000:]}")


def _end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        with suppress(subprocess.TimeoutExpired):
            server.wait(_END_TIMEOUT_S)
    finally:
        # Its engine is a process of its own, which must not outlive the test.
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
