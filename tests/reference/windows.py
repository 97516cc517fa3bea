"""Recompute sets as positions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.prompts import Span


def window_positions(windows: Sequence[Span], prompt_len: int) -> Tensor:
    """The positions inside half-open windows, ascending and each once.

    Args:
        windows: Half-open, in any order; overlaps are allowed.
        prompt_len: Tokens of the prompt.

    Returns:
        `[num_positions]`, int64.

    Raises:
        ValueError: A window lies outside the prompt.
    """
    for start, end in windows:
        if not 0 <= start <= end <= prompt_len:
            raise ValueError(f"window [{start}, {end}) is outside [0, {prompt_len})")
    return torch.tensor(
        sorted({p for start, end in windows for p in range(start, end)}),
        dtype=torch.int64,
    )
