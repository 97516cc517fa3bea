"""What the commands of ``daric`` share: options, consoles, an engine to run on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daric_rag.config import DaricConfig

if TYPE_CHECKING:
    from rich.console import Console

    from daric_rag.evaluation.terminal import Bar
    from daric_rag.runtime.embedded import EmbeddedEngine

__all__ = [
    "Json",
    "Model",
    "Store",
    "Verbose",
    "make_console",
    "resolved",
    "started",
    "store_folder",
]

Model = Annotated[
    str,
    typer.Option(help="A local folder, a hub name, or the short name smollm2-135m."),
]
Store = Annotated[
    str | None,
    typer.Option(
        help="Folder of the KV store, or :memory:.",
        show_default="a temporary folder, deleted at the end",
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        help="JSONL file of questions (see daric_rag/data); may be repeated.",
        show_default="the three shipped sets",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Nothing but JSON on stdout.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's own messages.")]


def resolved(model: str) -> str:
    """Return what vLLM is to load; a short name is converted on first use."""
    from daric_rag.models import resolve_model

    return os.fspath(resolve_model(model))


@contextmanager
def started(
    console: Console,
    model: str,
    store: str,
    config: DaricConfig,
    verbose: bool,
    **vllm_options: Any,
) -> Iterator[tuple[EmbeddedEngine, Bar]]:
    """Yield an engine and a bar to fill; close the engine at the end."""
    from daric_rag.evaluation.terminal import progress_bar, quiet_libraries

    quiet_libraries(verbose=verbose)
    with (
        progress_bar(console, "starting vLLM") as bar,
        closing(_start_engine(model, store, config, **vllm_options)) as engine,
    ):
        yield engine, bar


def _start_engine(
    model: str, store: str, config: DaricConfig, **vllm_options: Any
) -> EmbeddedEngine:
    from daric_rag.runtime.embedded import EmbeddedEngine

    return EmbeddedEngine(model, store=store, config=config, **vllm_options)


@contextmanager
def store_folder(store: str | None) -> Iterator[tuple[str, str]]:
    """Yield the store to open and how to call it."""
    if store is not None:
        yield store, store
        return
    with tempfile.TemporaryDirectory(prefix="daric-") as folder:
        yield folder, f"{folder} (temporary)"


def make_console(*, stderr: bool) -> Console:
    """Return where to print to: standard error where stdout is JSON."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)
