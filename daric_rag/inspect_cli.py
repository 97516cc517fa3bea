"""``daric inspect``: one prompt, and what became of every part of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daric_rag.cli_common import (
    Json,
    Model,
    Store,
    Verbose,
    make_console,
    resolved,
    started,
    store_folder,
)
from daric_rag.config import DaricConfig
from daric_rag.engine import ChunkedPrompt, Completion
from daric_rag.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from rich.console import Console

    from daric_rag.evaluation.terminal import Bar
    from daric_rag.evaluation.ttft_bench import BenchEngine

__all__ = ["inspect"]


@dataclass(frozen=True, slots=True)
class _FileDocument:
    """A document with its file's name as title."""

    text: str
    metadata: Mapping[str, str] = field(default_factory=dict)


def inspect(
    documents: Annotated[
        list[Path] | None,
        typer.Argument(help="Text files, one document each, in prompt order."),
    ] = None,
    question: Annotated[
        str | None, typer.Option(help="The question after the documents.")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Take a shipped question's documents.")
    ] = False,
    model: Model = "smollm2-135m",
    store: Store = None,
    runs: Annotated[
        int,
        typer.Option(
            min=1,
            help="How often to run it; the last run is shown, and finds in the store "
            "what the ones before left there.",
        ),
    ] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 32,
    budget: Annotated[
        int, typer.Option(min=1, help="Tokens recomputed per document, on average.")
    ] = 32,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run one prompt and draw where its KV came from, and when what happened."""
    from daric_rag.evaluation.terminal import json_has_stdout

    prompt = _prompt(documents or [], question, demo=demo)
    path = resolved(model)
    console = make_console(stderr=as_json)
    config = DaricConfig(avg_chunk_budget=budget)
    with (
        json_has_stdout(as_json),
        store_folder(store) as (folder, described),
        started(console, path, folder, config, verbose) as (engine, bar),
    ):
        completion = _run(engine, bar, prompt, runs, max_tokens)
    if as_json:
        typer.echo(json.dumps(_report(completion, model, described), allow_nan=False))
    else:
        _show(console, completion)


def _prompt(
    files: Sequence[Path], question: str | None, *, demo: bool
) -> ChunkedPrompt:
    if demo == bool(files):
        raise ConfigError("give either files with documents, or --demo")
    if demo:
        from daric_rag.evaluation.workloads import load_questions

        record = load_questions([])[0]
        return ChunkedPrompt(
            system=record.system or None,
            documents=list(record.chunks),
            question=record.question if question is None else question,
        )
    if question is None:
        raise ConfigError("a prompt of files needs a --question")
    return ChunkedPrompt(
        documents=[_document(file) for file in files], question=question
    )


def _document(file: Path) -> _FileDocument:
    try:
        return _FileDocument(file.read_text("utf-8"), {"title": file.name})
    except UnicodeDecodeError as error:
        raise PromptError(f"{file} is no UTF-8 text; convert it first") from error
    except OSError as error:
        raise PromptError(f"{file} cannot be read: {error.strerror}") from error


def _run(
    engine: BenchEngine, bar: Bar, prompt: ChunkedPrompt, runs: int, max_tokens: int
) -> Completion:
    bar.expect(runs)
    for number in range(1, runs + 1):
        bar.step(f"run {number} of {runs}")
        # Or a second run would show nothing but vLLM's own reuse.
        engine.clear_prefix_cache()
        completion = engine.generate(
            prompt, max_tokens=max_tokens, reuse="daric", trace=True
        )
    return completion


def _report(completion: Completion, model: str, store: str) -> dict[str, Any]:
    trace = completion.trace
    return {
        "model": model,
        "store": store,
        "answer": completion.text,
        "ttft_s": completion.ttft_s,
        "reuse": asdict(completion.reuse),
        "trace": None if trace is None else trace.to_dict(),
    }


def _show(console: Console, completion: Completion) -> None:
    from rich.text import Text

    from daric_rag.evaluation.trace_view import show_no_trace, show_trace

    if completion.trace is None:
        show_no_trace(console)
    else:
        show_trace(console, completion.trace)
    reuse = completion.reuse
    console.print()
    console.print(
        Text(
            f"{completion.ttft_s * 1e3:,.0f} ms to the first token at the client; "
            f"{reuse.hit_tokens:,} tokens loaded, {reuse.generated_tokens:,} computed "
            f"alone, {reuse.recomputed_tokens:,} in full context"
        )
    )
    if reuse.reason:
        console.print(Text(f"Nothing was reused: {reuse.reason}", "yellow"))
    console.print(Text(" ".join(completion.text.split()), "dim"))
