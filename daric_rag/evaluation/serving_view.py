"""The benchmarks of load, stalls and cold prompts on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

__all__ = ["cold_table", "load_table", "stall_table"]


def load_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows of `load_bench` as a table."""
    table = _table(
        "Under load (times in ms)",
        "hits: share of prompt tokens from the store, and from vLLM's prefix cache. "
        "keeps up: the queue did not grow while requests came.",
        "rate\n1/s|mode|TTFT\np50|p95|token\np50|p99|input\ntokens/s|store\nhits|"
        "prefix\nhits|keeps\nup",
    )
    for row in rows:
        table.add_row(
            f"{row['rate_per_s']:g}",
            row["mode"],
            *(_ms(row[f"ttft_{name}_ms"]) for name in ("p50", "p95")),
            *(_ms(row[f"inter_token_{name}_ms"]) for name in ("p50", "p99")),
            f"{row['input_tokens_per_s']:,.0f}",
            f"{row['store_hit_share']:.1%}",
            f"{row['prefix_hit_share']:.1%}",
            "yes" if row["sustained"] else "no",
        )
    return table


def stall_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows of `stall_bench` as a table."""
    table = _table(
        "Tokens of others while a cold prompt comes in (ms between tokens)",
        "Ratios: DARIC over ordinary, medians of the rounds' ratios. quiet: before "
        "the prompt came.",
        "batched\ntokens|admitted\nas|quiet\np50|p50|p99|max|prompt's\nTTFT|"
        "p50\nratio|p99\nratio|max\nratio",
    )
    for row in rows:
        for mode in ("off", "daric"):
            ratios = [f"{row[f'{name}_ratio']:.2f}" for name in ("p50", "p99", "max")]
            table.add_row(
                str(row["max_num_batched_tokens"]),
                mode,
                *(
                    _ms(row[f"{mode}_{name}_ms"])
                    for name in ("quiet_p50", "p50", "p99", "max", "ttft")
                ),
                *(ratios if mode == "daric" else [""] * 3),
            )
    return table


def cold_table(report: Mapping[str, Any]) -> Table:
    """Return the report of `cold_bench` as a table."""
    table = _table(
        "Time to first token of cold prompts",
        f"Line: {report['ms_per_document']:.1f} ms a document and "
        f"{report['intercept_ms']:.1f} ms, R^2 {report['r_squared']:.4f}. The first "
        f"run in the process took {report['first_over_second']:.2f} times the second.",
        "documents|tokens|ms",
    )
    for row in report["rows"]:
        table.add_row(
            str(row["num_documents"]), f"{row['prompt_tokens']:,}", _ms(row["cold_ms"])
        )
    return table


def _table(title: str, caption: str, columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        min_width=72,  # or a narrow table would fold its caption
        box=None,  # or it would not fit 80 columns
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    for column in columns.split("|"):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
