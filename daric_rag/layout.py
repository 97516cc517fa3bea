"""From chunks of token ids to a prompt layout (section 3.3.1).

A prompt of M chunks over token positions [0, L)::

    chunk 1            chunk 2                        chunk M (the question)
    [0, e1)            [e1, e2)           ...         [e(M-1), L)
    exact prefix       head window first              always recomputed

The spans partition [0, L). With ``alignment="block"`` a chunk's trailing padding lies
inside its own span, so that the next chunk starts on a block boundary::

    [start ............ end - pad_len | padding ....... end)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from daric_rag.config import DaricConfig
from daric_rag.errors import ConfigError, PromptError
from daric_rag.selection import Span, recompute_set, total_len

__all__ = [
    "MAX_TITLE_LEN",
    "Chunk",
    "PromptLayout",
    "Segment",
    "Span",
    "build_layout",
    "cut_segments",
    "split_delimited",
]


MAX_TITLE_LEN = 80
"""Characters of a chunk's title, which is for people and decides nothing."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One position-independent unit of a prompt, at [start, end).

    Attributes:
        start: First token's position in the prompt.
        end: Position after the last token, trailing padding included.
        reusable: Whether its KV may be loaded from and saved to the store.
        pad_len: Trailing padding tokens inside [start, end). They are part of the
            chunk's stored KV, because the chunks behind it attend to them.
        title: What the store's listing calls it, at most `MAX_TITLE_LEN` characters.
    """

    start: int
    end: int
    reusable: bool
    pad_len: int = 0
    title: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """A unit of index and storage: absolute prompt positions [start, end)."""

    start: int
    end: int


@dataclass(frozen=True)
class PromptLayout:
    """A whole prompt: its tokens, its chunks, and what will be recomputed.

    Attributes:
        token_ids: The prompt, padding included, [prompt_len].
        chunks: In order; their spans partition [0, prompt_len).
        windows: The recompute set: sorted, disjoint, non-touching half-open windows.
        block_size: Tokens per block that chunk starts are aligned to; None when the
            caller's token ids were kept exactly.

    Raises:
        PromptError: The chunks do not partition the prompt, or a window is out of
            order or out of range.
    """

    token_ids: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    windows: tuple[Span, ...]
    block_size: int | None

    def __post_init__(self) -> None:
        """Check the partition: layouts also come from other processes."""
        edges = [0, *(chunk.end for chunk in self.chunks)]
        starts = [chunk.start for chunk in self.chunks]
        if not starts or starts != edges[:-1] or edges[-1] != len(self.token_ids):
            raise PromptError(
                f"chunks {self.spans} do not partition a prompt of "
                f"{len(self.token_ids)} tokens; build layouts with build_layout"
            )
        if any(c.end - c.start <= c.pad_len or c.pad_len < 0 for c in self.chunks):
            raise PromptError(
                "a chunk has no token beside its padding; drop empty chunks first"
            )
        bounds = [(-1, -1), *self.windows]
        in_order = all(
            left[1] < right[0] < right[1] for left, right in pairwise(bounds)
        )
        if not in_order or bounds[-1][1] > len(self.token_ids):
            raise PromptError(
                f"windows {self.windows} must be sorted, disjoint and inside the "
                f"prompt; build them with selection.recompute_set"
            )

    @property
    def spans(self) -> tuple[Span, ...]:
        """Every chunk's [start, end)."""
        return tuple((chunk.start, chunk.end) for chunk in self.chunks)

    @property
    def padding_len(self) -> int:
        """Padding tokens in the whole prompt."""
        return sum(chunk.pad_len for chunk in self.chunks)

    @property
    def num_chunks(self) -> int:
        """M of the paper, the question included."""
        return len(self.chunks)

    @property
    def recompute_len(self) -> int:
        """Tokens in the recompute set."""
        return total_len(self.windows)

    @property
    def prompt_len(self) -> int:
        """Tokens in the prompt, padding included."""
        return len(self.token_ids)


def build_layout(
    chunk_token_ids: Sequence[Sequence[int]],
    *,
    config: DaricConfig,
    block_size: int,
    pad_token_id: int,
    reusable: Sequence[bool] | None = None,
    titles: Sequence[str] | None = None,
) -> PromptLayout:
    """Lay chunks out in a prompt and select the tokens to recompute.

    With ``config.alignment == "exact"`` the prompt is the chunks' concatenation. With
    ``"block"`` chunk i >= 2 is preceded by ``p_i = (b - t_i mod b) mod b`` padding
    tokens (section 3.3.1), which belong to the span of the chunk before it.

    Args:
        chunk_token_ids: One sequence of ids per chunk; the last one is the question.
        config: Alignment and selection policy.
        block_size: Tokens per KV block of the engine. Unused with exact alignment.
        pad_token_id: The padding token. Unused with exact alignment.
        reusable: Whether each chunk may be cached; by default all but the last. With
            several chunks the last is never reusable, whatever is said here. A lone
            chunk is an exact prefix, so ``[True]`` gives plain prefix matching.
        titles: Of every chunk, for the store's listing; by default none has one.

    Raises:
        PromptError: There is no chunk, a chunk is empty, an id is not an int in
            [0, 2**32), or `reusable` has another length.
        ConfigError: `block_size` is below 1.
    """
    if block_size < 1:
        raise ConfigError(
            f"block_size is {block_size}; it must be at least 1 token: pass the "
            f"engine's KV block size"
        )
    pieces = [_checked_ids(index, ids) for index, ids in enumerate(chunk_token_ids)]
    flags = _checked_flags(reusable, len(pieces))
    aligned = config.alignment == "block"
    pad = _checked_ids("padding", [pad_token_id]) if aligned else ()

    token_ids: list[int] = []
    chunks: list[Chunk] = []
    names = titles if titles is not None else [""] * len(pieces)
    for index, (piece, flag) in enumerate(zip(pieces, flags, strict=True)):
        start = len(token_ids)
        token_ids.extend(piece)
        is_last = index == len(pieces) - 1
        # t_i = len(token_ids) is where the next chunk would start without padding.
        pad_len = -len(token_ids) % block_size if aligned and not is_last else 0
        token_ids.extend(pad * pad_len)
        title = names[index][:MAX_TITLE_LEN]
        chunks.append(Chunk(start, len(token_ids), flag, pad_len, title))

    windows = recompute_set([(c.start, c.end) for c in chunks], flags, config)
    return PromptLayout(
        token_ids=tuple(token_ids),
        chunks=tuple(chunks),
        windows=windows,
        block_size=block_size if aligned else None,
    )


def cut_segments(chunk: Chunk, max_segment_len: int) -> tuple[Segment, ...]:
    """Cut [chunk.start, chunk.end) into segments; only the last may be shorter.

    Args:
        chunk: Its trailing padding is cut along with it.
        max_segment_len: Longest segment, in tokens.

    Raises:
        ConfigError: `max_segment_len` is below 1.
    """
    if max_segment_len < 1:
        raise ConfigError(f"max_segment_len is {max_segment_len}; it must be >= 1")
    return tuple(
        Segment(start, min(start + max_segment_len, chunk.end))
        for start in range(chunk.start, chunk.end, max_segment_len)
    )


def split_delimited(text: str, delimiter: str) -> list[str]:
    """Split a delimited prompt into its chunks' texts, before tokenisation.

    Each piece is tokenised alone afterwards, so that its ids do not depend on its
    neighbours and the delimiter never reaches the model. Empty pieces are dropped;
    pieces of white space are kept, because they are text the caller wrote.

    Raises:
        ConfigError: The delimiter is empty.
    """
    if not delimiter:
        raise ConfigError("the delimiter is empty; set DaricConfig.delimiter to a str")
    return [piece for piece in text.split(delimiter) if piece]


def _checked_ids(name: int | str, ids: Iterable[int]) -> tuple[int, ...]:
    try:
        # operator.index takes numpy integers too and refuses floats and strings.
        checked = tuple(map(operator.index, ids))
    except TypeError as error:
        raise PromptError(
            f"chunk {name} holds something other than token ids ({error}); pass the "
            f"tokenizer's ids, not its text"
        ) from error
    if not checked:
        raise PromptError(
            f"chunk {name} is empty; drop empty documents before laying out the "
            f"prompt, and give the question at least one token"
        )
    if min(checked) < 0 or max(checked) >= 2**32:
        raise PromptError(
            f"chunk {name} has a token id outside [0, 2**32); pass the tokenizer's ids"
        )
    return checked


def _checked_flags(reusable: Sequence[bool] | None, num_chunks: int) -> list[bool]:
    if num_chunks == 0:
        raise PromptError("the prompt has no chunk; pass at least the question")
    if reusable is None:
        return [True] * (num_chunks - 1) + [False]
    if len(reusable) != num_chunks:
        raise PromptError(
            f"reusable has {len(reusable)} values for {num_chunks} chunks; give one "
            f"per chunk"
        )
    flags = [bool(flag) for flag in reusable]
    if num_chunks > 1:
        # The question attends to every document, and is new in every request.
        flags[-1] = False
    return flags
