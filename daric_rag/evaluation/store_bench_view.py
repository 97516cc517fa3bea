"""The store's benchmark on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

__all__ = ["store_bench_table"]


def store_bench_table(rows: Sequence[Mapping[str, Any]], *, repeats: int) -> Table:
    """Return rows of `store_bench` as a table; ratios that miss their mark are red."""
    table = Table(
        title=f"The store's speed, GB/s (medians of {repeats})",
        title_justify="left",
        title_style="bold",
        caption="Page cache warm. Ratio: speed over that of what it is set against.",
        caption_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("measure", no_wrap=True)
    table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("set against", no_wrap=True)
    table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", style="bold", no_wrap=True)
    table.add_column("at least", justify="right", no_wrap=True)
    for row in rows:
        required = row["required"]
        style = "red" if required and row["ratio"] < required else "green"
        table.add_row(
            row["measure"],
            f"{row['gb_per_s']:.2f}",
            row["baseline"],
            f"{row['baseline_gb_per_s']:.2f}",
            Text(f"{row['ratio']:.2f}", style=style),
            f"{required:.2f}" if required else "",
        )
    return table
