"""A request's trace on a terminal: its chunks, its windows, its time line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from daric_rag.selection import Span, total_len
from daric_rag.trace import ChunkKind, RequestTrace, TraceEvent

__all__ = ["chunk_bar", "is_plain", "show_no_trace", "show_trace", "window_bar"]


@dataclass(frozen=True, slots=True)
class _Look:
    """How a kind of chunk is drawn; glyphs tell kinds apart without colours too."""

    style: str
    glyph: str
    ascii_glyph: str
    meaning: str


_LOOKS: dict[ChunkKind, _Look] = {
    "gpu_prefix": _Look("blue", "═", "=", "vLLM's prefix cache"),
    "contiguous_hit": _Look("green", "█", "#", "loaded"),
    "disjoint_hit": _Look("cyan", "▓", "%", "loaded, behind a missing chunk"),
    "generated": _Look("yellow", "▒", "+", "computed alone"),
    "recomputed": _Look("red", "░", ".", "computed in full context"),
    "mixed": _Look("magenta", "▚", "~", "of several kinds"),
}
_EVENT_STYLES = {
    "wait": "dim",
    "read": "green",
    "load": "green",
    "place": "cyan",
    "generate": "yellow",
    "recompute": "red",
    "first_token": "bold",
}
_WINDOW = ("red", "▀", "^")
_LABEL_LEN = 12
_MIN_BAR_LEN, _MAX_BAR_LEN = 10, 160


def show_trace(console: Console, trace: RequestTrace) -> None:
    """Draw a trace as wide as the terminal."""
    plain = is_plain(console)
    width = max(_MIN_BAR_LEN, min(_MAX_BAR_LEN, console.width - _LABEL_LEN - 1))
    recomputed = total_len(trace.windows)
    head = f"{trace.prompt_len:,} tokens in {len(trace.chunks)} chunks"
    share = f"{recomputed:,} recomputed ({recomputed / trace.prompt_len:.0%})"
    console.print(Text(f"{head}, {share}", "bold"))
    _line(console, "", _numbers(trace, width))
    _line(console, "chunks", chunk_bar(trace, width, plain=plain))
    _line(console, "recomputed", window_bar(trace, width, plain=plain))
    console.print()
    _show_legend(console, trace, plain=plain)
    console.print()
    _show_chunks(console, trace)
    if trace.events:
        _show_time_line(console, trace, plain=plain)


def show_no_trace(console: Console) -> None:
    """Say that there is nothing to draw, and why that may be."""
    console.print(
        Text(
            "The engine sent no trace: it runs without daric_rag's connector, or with "
            "one that makes none; install the same daric_rag on client and server.",
            "yellow",
        )
    )


def is_plain(console: Console) -> bool:
    """Whether to draw in ASCII: no colours, or an encoding without block glyphs."""
    return (
        console.no_color or console.color_system is None or console.options.ascii_only
    )


def chunk_bar(trace: RequestTrace, width: int, *, plain: bool = False) -> Text:
    """Return the prompt as `width` cells, coloured by where each chunk came from."""
    bar = Text(no_wrap=True)
    position = 0
    for chunk in trace.chunks:
        start, end = _cells((chunk.start, chunk.end), trace.prompt_len, width)
        look = _LOOKS[chunk.kind]
        bar.append(" " * (start - position))
        bar.append(_glyph(look, plain) * (end - start), look.style)
        position = end
    bar.append(" " * (width - position))
    return bar


def window_bar(trace: RequestTrace, width: int, *, plain: bool = False) -> Text:
    """Return the recompute set on the same scale; a window of one token shows too."""
    style, glyph, ascii_glyph = _WINDOW
    marked = [False] * width
    for start, end in trace.windows:
        first = start * width // trace.prompt_len
        last = (end * width - 1) // trace.prompt_len
        marked[first : last + 1] = [True] * (last + 1 - first)
    mark = ascii_glyph if plain else glyph
    return Text("".join(mark if cell else " " for cell in marked), style, no_wrap=True)


def _numbers(trace: RequestTrace, width: int) -> Text:
    """Return each chunk's number above its first cell, where there is room."""
    row = ""
    for number, chunk in enumerate(trace.chunks, 1):
        start, _ = _cells((chunk.start, chunk.end), trace.prompt_len, width)
        if (not row or start > len(row)) and start + len(str(number)) <= width:
            row = row.ljust(start) + str(number)
    return Text(row, "dim", no_wrap=True)


def _show_legend(console: Console, trace: RequestTrace, *, plain: bool) -> None:
    present = {chunk.kind for chunk in trace.chunks}
    entries = [
        (_glyph(look, plain) * 2, look.style, look.meaning)
        for kind, look in _LOOKS.items()
        if kind in present
    ]
    if trace.windows:
        style, glyph, ascii_glyph = _WINDOW
        entries.append(((ascii_glyph if plain else glyph) * 2, style, "window"))
    line = Text()
    for glyphs, style, meaning in entries:
        entry = Text.assemble((glyphs, style), f" {meaning}   ")
        if len(line) and len(line) + len(entry) > console.width:
            _print(console, line)
            line = Text()
        line += entry
    _print(console, line)


def _show_chunks(console: Console, trace: RequestTrace) -> None:
    head = f"{'':>4} {'origin':<14} {'start':>8} {'tokens':>7} {'loaded':>7} "
    _print(console, Text(head + "recomputed  title", "dim"))
    for number, chunk in enumerate(trace.chunks, 1):
        recomputed = _overlap(trace.windows, (chunk.start, chunk.end))
        counts = (
            f" {chunk.start:>8,} {chunk.num_tokens:>7,} {chunk.hit_len:>7,} "
            f"{recomputed:>10,}  {chunk.title}"
        )
        kind = f"{chunk.kind.replace('_', ' '):<14}"
        style = _LOOKS[chunk.kind].style
        _print(console, Text.assemble(f"{number:>4} ", (kind, style), counts))


def _show_time_line(console: Console, trace: RequestTrace, *, plain: bool) -> None:
    events = trace.events
    times = [f"{(event.end_s - event.start_s) * 1e3:,.1f} ms" for event in events]
    times = [
        time if event.end_s > event.start_s else f"at {event.end_s * 1e3:,.1f} ms"
        for event, time in zip(events, times, strict=True)
    ]
    width = console.width - _LABEL_LEN - 2 - max(map(len, times))
    width = max(_MIN_BAR_LEN, min(_MAX_BAR_LEN, width))
    console.print()
    for event, time in zip(events, times, strict=True):
        bar = _event_bar(event, trace.last_s, width, plain=plain)
        _line(console, event.name, Text.assemble(bar, " ", time))


def _event_bar(event: TraceEvent, last_s: float, width: int, *, plain: bool) -> Text:
    scale = width / last_s if last_s > 0 else 0.0
    start = min(int(event.start_s * scale), width - 1)
    # Whatever took time is seen.
    end = max(start + 1, min(round(event.end_s * scale), width))
    is_instant = event.start_s == event.end_s
    glyph = ("|" if plain else "▏") if is_instant else ("#" if plain else "█")
    bar = " " * start + glyph * (end - start) + " " * (width - end)
    return Text(bar, _EVENT_STYLES.get(event.name, "magenta"))


def _line(console: Console, label: str, content: Text) -> None:
    head = (f"{_short(label):<{_LABEL_LEN}} ", "dim")
    _print(console, Text.assemble(head, content))


def _print(console: Console, line: Text) -> None:
    line.rstrip()
    console.print(line, no_wrap=True, overflow="crop")


def _short(name: str) -> str:
    return name.replace("_", " ")[:_LABEL_LEN]


def _cells(span: Span, prompt_len: int, width: int) -> Span:
    """Return the cells of a span; neighbours share no cell and leave none out."""
    start, end = span
    half = prompt_len // 2
    return (start * width + half) // prompt_len, (end * width + half) // prompt_len


def _overlap(windows: Sequence[Span], span: Span) -> int:
    return sum(_common(window, span) for window in windows)


def _common(one: Span, other: Span) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _glyph(look: _Look, plain: bool) -> str:
    return look.ascii_glyph if plain else look.glyph
