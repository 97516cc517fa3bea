"""The benchmark on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

__all__ = ["bench_table"]

_TIMES = (
    ("full_prefill_ms", "full\nprefill"),
    ("cold_ms", "cold"),
    ("disk_ms", "disk"),
    ("host_ms", "host"),
    ("floor_ms", "floor"),
    ("full_reuse_ms", "full\nreuse"),
)


def bench_table(rows: Sequence[Mapping[str, Any]], *, repeats: int) -> Table:
    """Return rows of `ttft_bench` as a table, with the ratios that matter."""
    table = Table(
        title=f"Time to first token, ms (medians of {repeats})",
        title_justify="left",
        title_style="bold",
        caption="floor: vLLM's own prefix hit with as many new tokens as DARIC "
        "recomputes. cold: no document stored yet. Decoding: time per output token, "
        "DARIC over ordinary.",
        caption_justify="left",
        box=None,  # or it would not fit 80 columns
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("re-\ncomp.", justify="right", no_wrap=True)
    for _, title in _TIMES:
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("full /\nhost", "host /\nfloor", "cold /\nfull", "decod-\ning"):
        table.add_column(title, justify="right", style="bold", no_wrap=True)
    for row in rows:
        full, host = row["full_prefill_ms"], row["host_ms"]
        table.add_row(
            f"{row['prompt_tokens']:,}",
            str(row["recomputed_tokens"]),
            *(f"{row[key]:.0f}" for key, _ in _TIMES),
            Text(f"{full / host:.1f}x", style="green"),
            f"{host / row['floor_ms']:.2f}",
            f"{row['cold_ms'] / full:.2f}",
            f"{row['tpot_ratio']:.3f}",
        )
    return table
