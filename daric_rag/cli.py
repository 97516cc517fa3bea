"""``daric``: the demo and the benchmarks on a command line.

Nothing heavy is imported before a command needs it, so that help is instant. What is
asked for goes to standard output; progress and complaints go to standard error
wherever the output is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daric_rag.config import DaricConfig
from daric_rag.errors import ConfigError, DaricError

if TYPE_CHECKING:
    from rich.console import Console

    from daric_rag.data import QuestionRecord
    from daric_rag.evaluation.demo import QuestionOutcome
    from daric_rag.evaluation.terminal import Bar
    from daric_rag.evaluation.ttft_bench import BenchEngine
    from daric_rag.evaluation.workloads import TtftShape

__all__ = ["app", "main"]

app = typer.Typer(
    help="Reuse retrieved documents' KV caches at any position on an unmodified vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

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
Json = Annotated[bool, typer.Option("--json", help="Nothing but JSON on stdout.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's own messages.")]


@app.command()
def demo(
    model: Model = "smollm2-135m",
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSONL file of questions (see daric_rag/data); may be repeated.",
            show_default="the three shipped sets",
        ),
    ] = None,
    store: Store = None,
    questions: Annotated[int, typer.Option(min=1, help="How many questions.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 32,
    budget: Annotated[
        int, typer.Option(min=1, help="Tokens recomputed per document, on average.")
    ] = 32,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Ask questions over documents, with and without reuse, and compare.

    A larger --budget brings answers closer to full prefill's and takes longer.
    """
    from daric_rag.evaluation.demo_report import to_json
    from daric_rag.evaluation.demo_view import show_intro, show_summary
    from daric_rag.evaluation.machine import machine_facts
    from daric_rag.evaluation.terminal import json_has_stdout
    from daric_rag.evaluation.workloads import load_questions

    records = load_questions(data or [])[:questions]
    path = _resolved(model)
    console = _console(stderr=as_json)
    config = DaricConfig(avg_chunk_budget=budget)
    with json_has_stdout(as_json), _folder(store) as (folder, described):
        if not as_json:
            show_intro(
                console, model=model, store=described, num_questions=len(records)
            )
        with _started(console, path, folder, config, verbose) as (engine, bar):
            outcomes = _run_demo(engine, bar, records, max_tokens, show=not as_json)
        report = {
            "model": model,
            "store": described,
            "max_tokens": max_tokens,
            "avg_chunk_budget": budget,
            **to_json(outcomes),
            "machine": machine_facts(),
        }
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False, allow_nan=False))
    else:
        show_summary(console, outcomes)
    if any(o.broken_claim for outcome in outcomes for o in outcome.outcomes):
        raise typer.Exit(1)


@bench_app.command()
def ttft(
    model: Model = "smollm2-135m",
    sizes: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, comma-separated.")
    ] = "1.3k,2.6k,5.2k,7.7k",
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds; figures are medians over them.")
    ] = 5,
    store: Store = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Time to first token of every variant; the last line of stdout is JSON.

    Full prefill; documents in host memory, on disk, missing; full reuse; and the
    floor, which is vLLM's own prefix hit with as many new tokens.
    """
    from daric_rag.evaluation.bench_view import bench_table
    from daric_rag.evaluation.machine import machine_facts
    from daric_rag.evaluation.terminal import json_has_stdout
    from daric_rag.evaluation.workloads import TtftShape, parse_sizes

    shapes = [TtftShape.of_size(size) for size in parse_sizes(sizes)]
    if store == ":memory:":
        raise ConfigError(
            "the benchmark reads from disk too; give --store a folder, or leave it out"
        )
    path = _resolved(model)
    console = _console(stderr=True)
    with json_has_stdout(True), _folder(store) as (folder, described):
        machine = machine_facts()
        with _started(console, path, folder, DaricConfig(), verbose) as (engine, bar):
            # With torch loaded, its threads are known; the load is from before.
            machine = machine_facts() | {"load_average": machine["load_average"]}
            rows = _run_bench(engine, bar, shapes, repeats)
    report = {
        "rows": rows,
        "repeats": repeats,
        "model": model,
        "store": described,
        "machine": machine,
    }
    # Beside the last line, stdout gets the whole table unless it is to be JSON alone.
    _console(stderr=as_json).print(bench_table(rows, repeats=repeats))
    typer.echo(json.dumps(report, allow_nan=False))


@app.command()
def version() -> None:
    """Show the versions of daric_rag and of what it runs on."""
    from daric_rag.evaluation.machine import machine_facts

    for name, number in machine_facts()["versions"].items():
        typer.echo(f"{name} {number}")


def main() -> None:
    """Run the command line; errors of ours are one line, without a traceback."""
    try:
        app()
    except DaricError as error:
        typer.echo(f"daric: {error}", err=True)
        sys.exit(1)


def _run_demo(
    engine: BenchEngine,
    bar: Bar,
    records: list[QuestionRecord],
    max_tokens: int,
    *,
    show: bool,
) -> list[QuestionOutcome]:
    from daric_rag.evaluation.demo import Demo
    from daric_rag.evaluation.demo_view import show_question

    run = Demo(engine, records, max_tokens=max_tokens, on_run=bar.step)
    bar.expect(run.num_runs)
    run.warm_up()
    outcomes: list[QuestionOutcome] = []
    for outcome in run.run():
        outcomes.append(outcome)
        if show:
            show_question(bar.console, outcome, len(outcomes))
    return outcomes


def _run_bench(
    engine: BenchEngine, bar: Bar, shapes: list[TtftShape], repeats: int
) -> list[dict[str, Any]]:
    from daric_rag.evaluation.bench_view import bench_table
    from daric_rag.evaluation.ttft_bench import RUNS_PER_ROUND, TtftBench

    bench = TtftBench(engine, repeats=repeats, on_run=bar.step)
    for shape in shapes:
        bench.check(shape)
    bar.expect((1 + (1 + repeats) * RUNS_PER_ROUND) * len(shapes))
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        rows.append(bench.measure(shape))
        bar.console.print(bench_table(rows[-1:], repeats=repeats))
    return rows


def _resolved(model: str) -> str:
    """Return what vLLM is to load; a short name is converted on first use."""
    from daric_rag.models import resolve_model

    return os.fspath(resolve_model(model))


@contextmanager
def _started(
    console: Console, model: str, store: str, config: DaricConfig, verbose: bool
) -> Iterator[tuple[BenchEngine, Bar]]:
    """Yield an engine and a bar to fill; close the engine at the end."""
    from daric_rag.evaluation.terminal import progress_bar, quiet_libraries

    quiet_libraries(verbose=verbose)
    with (
        progress_bar(console, "starting vLLM") as bar,
        closing(_start_engine(model, store, config)) as engine,
    ):
        yield engine, bar


def _start_engine(model: str, store: str, config: DaricConfig) -> BenchEngine:
    from daric_rag.runtime.embedded import EmbeddedEngine

    return EmbeddedEngine(model, store=store, config=config)


@contextmanager
def _folder(store: str | None) -> Iterator[tuple[str, str]]:
    """Yield the store to open and how to call it."""
    if store is not None:
        yield store, store
        return
    with tempfile.TemporaryDirectory(prefix="daric-") as folder:
        yield folder, f"{folder} (temporary)"


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


if __name__ == "__main__":
    main()
