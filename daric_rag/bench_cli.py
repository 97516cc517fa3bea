"""``daric bench``: measurements; the last line of standard output is JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from daric_rag.errors import ConfigError

if TYPE_CHECKING:
    from daric_rag.engine import Reuse
    from daric_rag.evaluation.terminal import Bar
    from daric_rag.evaluation.ttft_bench import BenchEngine
    from daric_rag.evaluation.workloads import TtftShape
    from daric_rag.runtime.embedded import EmbeddedEngine

__all__ = ["bench_app"]

Repeats = Annotated[
    int, typer.Option(min=1, help="Rounds; figures are medians over them.")
]

bench_app = typer.Typer(help="Measure.", no_args_is_help=True)


@bench_app.command()
def ttft(
    model: Model = "smollm2-135m",
    sizes: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, comma-separated.")
    ] = "1.3k,2.6k,5.2k,7.7k",
    repeats: Repeats = 5,
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
    repeats: Repeats = 9,
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


@bench_app.command()
def load(
    model: Model = "smollm2-135m",
    rates: Annotated[
        str, typer.Option(help="Requests a second, comma-separated.")
    ] = "0.1,0.2,0.4",
    requests: Annotated[
        int, typer.Option(min=5, help="Replayed per run; a fifth is warm-up.")
    ] = 40,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 16,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of async_requests.jsonl and async_chunks.jsonl.",
            show_default="the shipped sets, documents in random order",
        ),
    ] = None,
    full_reuse: Annotated[
        bool, typer.Option("--full-reuse", help="Run full reuse as well.")
    ] = False,
    prewarmed: Annotated[
        bool, typer.Option("--prewarmed", help="DARIC begins with all documents.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals and documents.")] = 1,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Answers when requests come at random: vLLM's prefix cache against DARIC."""
    from daric_rag.evaluation.load_bench import LoadBench
    from daric_rag.evaluation.replay import demo_replay, load_replay, parse_rates
    from daric_rag.evaluation.serving_view import load_table

    rate_list = parse_rates(rates)
    modes: list[Reuse] = ["off", "daric"]
    if full_reuse:
        modes.append("full_reuse")
    replayed = demo_replay(requests, seed)
    if data is not None:
        replayed = load_replay(data, requests)
    with _serving(model, verbose) as (engine, bar):
        bar.expect(len(rate_list) * len(modes) * len(replayed))
        bench = LoadBench(
            engine,
            replayed,
            max_tokens=max_tokens,
            seed=seed,
            prewarmed=prewarmed,
            on_request=bar.step,
        )
        rows = [bench.measure(rate, mode) for rate in rate_list for mode in modes]
    make_console(stderr=as_json).print(load_table(rows))
    options = {"max_tokens": max_tokens, "seed": seed, "data": data and data.name}
    options["prewarmed"] = prewarmed
    _print_json({"rows": rows, **options, **_facts(model)})


@bench_app.command()
def stall(
    model: Model = "smollm2-135m",
    streams: Annotated[
        int, typer.Option(min=1, help="Requests that decode meanwhile.")
    ] = 4,
    size: Annotated[str, typer.Option(help="Tokens of the cold prompt.")] = "5k",
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=64, help="vLLM's budget of tokens per step.")
    ] = 2048,
    repeats: Repeats = 5,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Tokens of others while a cold prompt comes in, ordinary against DARIC."""
    from daric_rag.evaluation.serving_view import stall_table
    from daric_rag.evaluation.stall_bench import RUNS_PER_ROUND, StallBench
    from daric_rag.evaluation.workloads import TtftShape, parse_sizes

    shape = TtftShape.of_size(parse_sizes(size)[0])
    vllm_options: dict[str, Any] = {"max_num_batched_tokens": max_num_batched_tokens}
    with _serving(model, verbose, **vllm_options) as (engine, bar):
        bar.expect((1 + repeats) * RUNS_PER_ROUND)
        bench = StallBench(engine, streams=streams, shape=shape, on_run=bar.step)
        row = vllm_options | bench.measure(repeats)
    make_console(stderr=as_json).print(stall_table([row]))
    _print_json({"rows": [row], "repeats": repeats, **_facts(model)})


@bench_app.command()
def cold(
    model: Model = "smollm2-135m",
    documents: Annotated[
        str, typer.Option(help="Numbers of documents, comma-separated.")
    ] = "5,10,15,20",
    document_tokens: Annotated[
        int, typer.Option(min=48, help="Tokens of each document.")
    ] = 256,
    repeats: Repeats = 5,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Time to first token of cold prompts over their number of documents."""
    from daric_rag.evaluation.cold_bench import NUM_FIRST_RUNS, run_cold_bench
    from daric_rag.evaluation.serving_view import cold_table
    from daric_rag.evaluation.workloads import TtftShape, parse_sizes

    numbers = sorted(set(parse_sizes(documents)))
    if len(numbers) < 2:
        raise ConfigError("a line needs two numbers of documents; write 5,10,15,20")
    shapes = [TtftShape(number, document_tokens) for number in numbers]
    with _serving(model, verbose) as (engine, bar):
        bar.expect(NUM_FIRST_RUNS + repeats * len(shapes))
        report = run_cold_bench(engine, shapes, repeats=repeats, on_run=bar.step)
    make_console(stderr=as_json).print(cold_table(report))
    _print_json({**report, "repeats": repeats, **_facts(model)})


@bench_app.command("prewarm")
def prewarm_bench(
    model: Model = "smollm2-135m",
    passages: Annotated[
        int, typer.Option(min=1, help="How many passages, each in one round.")
    ] = 40,
    repeats: Repeats = 4,
    data: Data = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Tokens per second of pre-warming against the engine's own prefill."""
    from daric_rag.evaluation.prewarm_bench import (
        RUNS_PER_PART,
        passages_of,
        run_prewarm_bench,
    )
    from daric_rag.evaluation.workloads import load_questions
    from daric_rag.prewarm_settings import PREWARM_CONFIG

    texts = passages_of(load_questions(data or []), passages)
    with (
        _serving(model, verbose, PREWARM_CONFIG) as (engine, bar),
        store_folder(None) as (folder, _),
    ):
        bar.expect(1 + repeats * RUNS_PER_PART)
        row = run_prewarm_bench(
            engine, texts, Path(folder), parts=repeats, on_run=bar.step
        )
    make_console(stderr=as_json).print(
        f"prefill {row['prefill_tokens_per_s']:,.0f} tokens/s, pre-warming "
        f"{row['prewarm_tokens_per_s']:,.0f}: {row['ratio']:.3f} of it"
    )
    _print_json({"rows": [row], **_facts(model)})


@contextmanager
def _serving(
    model: str, verbose: bool, config: DaricConfig | None = None, **vllm_options: Any
) -> Iterator[tuple[EmbeddedEngine, Bar]]:
    """Yield an engine and a bar; standard output is kept for JSON meanwhile."""
    from daric_rag.evaluation.terminal import json_has_stdout

    path, console = resolved(model), make_console(stderr=True)
    with (
        json_has_stdout(True),
        store_folder(None) as (folder, _),
        started(
            console, path, folder, config or DaricConfig(), verbose, **vllm_options
        ) as both,
    ):
        yield both


def _facts(model: str) -> dict[str, Any]:
    from daric_rag.evaluation.machine import machine_facts

    return {"model": model, "machine": machine_facts()}


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
