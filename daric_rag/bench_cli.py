"""``daric bench``: measurements; the last line of standard output is JSON."""

from __future__ import annotations

import json
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
from daric_rag.errors import ConfigError

if TYPE_CHECKING:
    from daric_rag.evaluation.terminal import Bar
    from daric_rag.evaluation.ttft_bench import BenchEngine
    from daric_rag.evaluation.workloads import TtftShape

__all__ = ["bench_app"]

bench_app = typer.Typer(help="Measure.", no_args_is_help=True)


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
    kv_storage: Annotated[
        str, typer.Option(help="How records hold KV: model, fp8 or int8.")
    ] = "model",
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
    config = DaricConfig.from_dict({"kv_storage": kv_storage})
    path = resolved(model)
    console = make_console(stderr=True)
    with json_has_stdout(True), store_folder(store) as (folder, described):
        machine = machine_facts()
        with started(console, path, folder, config, verbose) as (engine, bar):
            # With torch loaded, its threads are known; the load is from before.
            machine = machine_facts() | {"load_average": machine["load_average"]}
            rows = _run_bench(engine, bar, shapes, repeats)
    report = {
        "rows": rows,
        "repeats": repeats,
        "model": model,
        "kv_storage": kv_storage,
        "store": described,
        "machine": machine,
    }
    # Beside the last line, stdout gets the whole table unless it is to be JSON alone.
    make_console(stderr=as_json).print(bench_table(rows, repeats=repeats))
    _print_json(report)


@bench_app.command("store")
def store_bench(
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds; figures are medians over them.")
    ] = 9,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Empty folder on the disk in question; takes half a gigabyte.",
            show_default="a temporary folder, deleted at the end",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """The store's speed as shares of what the machine can do; ends in JSON.

    Reads from memory and disk, writes, checksums and encryption, without an engine.
    """
    from daric_rag.evaluation.machine import machine_facts
    from daric_rag.evaluation.store_bench import run_store_bench
    from daric_rag.evaluation.store_bench_view import store_bench_table
    from daric_rag.evaluation.terminal import json_has_stdout, progress_bar

    path = None if folder is None else str(folder)
    with (
        json_has_stdout(True),
        store_folder(path) as (root, _),
        progress_bar(make_console(stderr=True), "making records") as bar,
    ):
        machine = machine_facts()
        rows = run_store_bench(Path(root) / "bench", repeats=repeats, on_step=bar.step)
    make_console(stderr=as_json).print(store_bench_table(rows, repeats=repeats))
    _print_json({"rows": rows, "repeats": repeats, "machine": machine})


@bench_app.command()
def index(
    sizes: Annotated[
        str, typer.Option(help="Numbers of segments, comma-separated.")
    ] = "10k,100k,1000k",
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture there (.svg or .png).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Memory and speed of the segment index as it grows; ends in JSON."""
    from daric_rag.evaluation import index_bench
    from daric_rag.evaluation.machine import machine_facts
    from daric_rag.evaluation.terminal import progress_bar
    from daric_rag.evaluation.workloads import parse_sizes

    with progress_bar(make_console(stderr=True), "growing") as bar:
        rows = index_bench.run_index_bench(parse_sizes(sizes), on_step=bar.step)
    make_console(stderr=as_json).print(index_bench.index_table(rows))
    if plot is not None:
        index_bench.plot(rows, plot)
    _print_json({"rows": rows, "machine": machine_facts()})


def _print_json(report: dict[str, Any]) -> None:
    typer.echo(json.dumps(report, allow_nan=False))


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
