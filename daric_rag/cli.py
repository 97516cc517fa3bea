"""``daric``: the demo, the benchmarks and the inspector on a command line.

Nothing heavy is imported before a command needs it, so that help is instant. What is
asked for goes to standard output; progress and complaints go to standard error
wherever the output is JSON.
"""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NoReturn, TextIO

import typer

from daric_rag.bench_cli import bench_app
from daric_rag.cli_common import (
    Data,
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
from daric_rag.errors import ConfigError, DaricError
from daric_rag.inspect_cli import inspect
from daric_rag.prewarm_cli import prewarm_app
from daric_rag.serve_cli import serve_command
from daric_rag.store_cli import store_app

if TYPE_CHECKING:
    from daric_rag.data import QuestionRecord
    from daric_rag.evaluation.demo import QuestionOutcome
    from daric_rag.evaluation.terminal import Bar
    from daric_rag.evaluation.ttft_bench import BenchEngine

__all__ = ["app", "main"]

app = typer.Typer(
    help="Reuse retrieved documents' KV caches at any position on an unmodified vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(prewarm_app, name="prewarm")
app.add_typer(store_app, name="store")
app.command()(inspect)
app.command()(serve_command)


@app.command()
def demo(
    model: Model = "smollm2-135m",
    data: Data = None,
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
    path = resolved(model)
    console = make_console(stderr=as_json)
    config = DaricConfig(avg_chunk_budget=budget)
    with json_has_stdout(as_json), store_folder(store) as (folder, described):
        if not as_json:
            show_intro(
                console, model=model, store=described, num_questions=len(records)
            )
        with started(console, path, folder, config, verbose) as (engine, bar):
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
        typer.echo(json.dumps(report, allow_nan=False))
    else:
        show_summary(console, outcomes)
    if any(o.broken_claim for outcome in outcomes for o in outcome.outcomes):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Show the versions of daric_rag and of what it runs on."""
    from daric_rag.evaluation.machine import machine_facts

    for name, number in machine_facts()["versions"].items():
        typer.echo(f"{name} {number}")


def main() -> None:
    """Run the command line; what goes wrong is one line, without a traceback."""
    try:
        _prepare_streams()
        app()
    except DaricError as error:
        _fail(str(error))
    except OSError as error:
        _fail(_described(error))


def _prepare_streams() -> None:
    """See that the three are open: the next file opened would take a free number."""
    _open_if_closed(0)
    if sys.stdout is None:
        raise ConfigError(
            "standard output is closed: send it to /dev/null if it is not wanted"
        )
    _open_if_closed(2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Titles are of any script, and the terminal may know ASCII only.
        sys.stdout.reconfigure(errors="backslashreplace")


def _open_if_closed(number: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        # The lowest free number, which this one is.
        os.open(os.devnull, os.O_RDWR)
        os.set_inheritable(number, True)


def _described(error: OSError) -> str:
    text = " ".join(str(error).split())
    if error.errno is None or error.filename is not None:
        return text
    return (
        f"reading or writing failed ({error.strerror}): see that standard output can "
        "be written and has room"
    )


def _fail(message: str) -> NoReturn:
    with suppress(OSError):
        typer.echo(f"daric: {message}", err=True)
    for stream in (sys.stdout, sys.stderr):
        _give_up_if_broken(stream)
    sys.exit(1)


def _give_up_if_broken(stream: TextIO | None) -> None:
    """Spare the interpreter's exit a complaint about what cannot be written."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


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


if __name__ == "__main__":
    main()
