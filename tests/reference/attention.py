"""Rotation and causal attention, spelled out in plain torch."""

import torch
from torch import Tensor

_QUERY_ROWS = 512
"""Queries per attention matrix: bounds memory at long prompts, changes nothing."""


def apply_rotation(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Rotates the first `2 * num_pairs` elements of each head, pair by pair.

    Args:
        x: `[num_tokens, num_heads, head_dim]`.
        cos: `[num_tokens, num_pairs]` (or `[1, ...]`), likewise `sin`.
        sin: See `cos`.
        interleaved: Pairs are `(2 j, 2 j + 1)`, as in ERNIE, rather than
            `(j, j + num_pairs)`, as in Llama and Qwen.

    Returns:
        A new tensor of the shape of `x`.
    """
    num_pairs = cos.shape[-1]
    pairs = torch.arange(num_pairs)
    first, second = (
        (2 * pairs, 2 * pairs + 1) if interleaved else (pairs, pairs + num_pairs)
    )
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Causal attention of scattered queries over a whole cache.

    Args:
        query: `[num_queries, num_heads, head_dim]`.
        keys: `[num_tokens, num_kv_heads, head_dim]`, the token's place its position.
        values: Same shape.
        positions: `[num_queries]` ascending; query i sees keys `[0, positions[i]]`.

    Returns:
        `[num_queries, num_heads, head_dim]`.
    """
    # Query heads h * group_len .. share key head h: [num_queries, h, g, head_dim].
    grouped = query.unflatten(1, (keys.shape[1], -1)) / query.shape[-1] ** 0.5
    out = torch.empty_like(grouped)
    for row in range(0, len(query), _QUERY_ROWS):
        rows = slice(row, row + _QUERY_ROWS)
        # Keys after the last query of these rows are masked anyway: leave them out.
        end = int(positions[rows][-1]) + 1
        scores = torch.einsum("qhgd,khd->hgqk", grouped[rows], keys[:end])
        unseen = torch.arange(end) > positions[rows].unsqueeze(-1)
        weights = scores.masked_fill_(unseen, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hgqk,khd->qhgd", weights, values[:end])
    return out.flatten(1, 2)
