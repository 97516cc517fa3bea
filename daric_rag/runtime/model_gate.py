"""The full gate, passed on first use of a model: does DARIC end in what prefill gives?

Two short chunks, and the steps of a request with reuse::

    (a)  one ordinary pass over the whole prompt
    (b)  each chunk on its own, in blocks of its own; read back, the second one
         re-encoded, both placed; then every position recomputed in place by windows

| Held against (a)        | Tokens | Layers | Why it must be equal                   |
|-------------------------|--------|--------|----------------------------------------|
| placed chunks, K and V  | varied | first  | made from token and position alone     |
| placed second chunk, K  | equal  | all    | equal tokens: see `gate`               |
| recomputed, K and V     | varied | all    | nothing of the approximation is left   |
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from daric_rag.errors import ConfigError
from daric_rag.runtime.gate_comparison import Comparison
from daric_rag.runtime.kv_layout import KvLayout
from daric_rag.runtime.step_builder import SubRequest
from daric_rag.steps import Limits

__all__ = ["GateEngine", "ModelGate"]

# More than a block, so that a chunk and a window lie across a block's boundary.
_TOKENS_BEYOND_BLOCK = 16
_MIN_TOKENS = 8
_SEED = 1
# vLLM's null block, which is nobody's.
_FIRST_BLOCK = 1


@dataclass(frozen=True, slots=True)
class GateEngine:
    """What the gate works on: an engine without any request.

    Attributes:
        run: Runs one pass of sub-requests.
        layout: Of the blocks.
        reencode: (keys, distance): `Reencoder.reencode_keys`.
        layers: The KV cache, ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``
            per layer; all blocks but the first may be overwritten.
        limits: Of one pass.
        max_model_len: Tokens that a sequence may have.
        vocab_size: Token ids are below it.
    """

    run: Callable[[Sequence[SubRequest]], None]
    layout: KvLayout
    reencode: Callable[[Tensor, int], Tensor]
    layers: Sequence[Tensor]
    limits: Limits
    max_model_len: int
    vocab_size: int


class ModelGate:
    """Worker process; for one use before the first request."""

    def __init__(self, engine: GateEngine) -> None:
        """Size the prompt to what the engine holds.

        Raises:
            ConfigError: It holds next to nothing.
        """
        self._engine = engine
        num_blocks, num_heads, self._block_size, width = engine.layers[0].shape
        self._heads = (num_heads, width // 2)
        self._num_blocks = num_blocks - _FIRST_BLOCK
        self._prompt_len = min(
            self._block_size + _TOKENS_BEYOND_BLOCK,
            engine.limits.max_num_tokens,
            engine.max_model_len - 1,  # a sub-request's prompt is one token longer
            self._num_blocks * self._block_size,
        )
        if self._prompt_len < _MIN_TOKENS:
            raise ConfigError(
                f"the engine can hold {max(0, self._prompt_len)} tokens, too few to "
                f"check the model with; give it a larger KV cache "
                f"(kv_cache_memory_bytes), max_model_len or max_num_batched_tokens"
            )
        # Neither at the middle nor at a block's boundary.
        self._cut = self._prompt_len * 2 // 5
        # Blocks before it have been used.
        self._used_end = _FIRST_BLOCK + self._blocks(self._prompt_len)

    def check(self) -> None:
        """Compare DARIC, everything recomputed, with ordinary prefill.

        All blocks that it used are zero afterwards.

        Raises:
            UnsupportedModelError: They differ; says where.
        """
        chosen = random.Random(_SEED)
        size = self._prompt_len
        varied = [chosen.randrange(self._engine.vocab_size) for _ in range(size)]
        equal = varied[:1] * size
        with torch.inference_mode():
            try:
                whole, whole_equal = self._prefill([varied, equal])
                first, second, equal_second = self._prefill(
                    [varied[: self._cut], varied[self._cut :], equal[self._cut :]]
                )
                moved = self._moved(equal_second, whole_equal[:, :, self._cut :])
                recomputed = self._recomputed(varied, first, second, whole)
            finally:
                self._clear()
            # Only after the last pass, for ranks that differ must not part before it.
            for comparison in (moved, *recomputed):
                comparison.hold()

    def _moved(self, chunk: Tensor, expected: Tensor) -> Comparison:
        """Place a chunk of equal tokens."""
        self._clear()
        self._place(chunk, self._cut)
        keys, _ = self._read(self._cut, chunk.shape[2])
        return Comparison(
            "keys of re-encoded equal tokens", keys, expected[0], before=chunk[0]
        )

    def _recomputed(
        self, token_ids: list[int], first: Tensor, second: Tensor, expected: Tensor
    ) -> list[Comparison]:
        """Place two chunks, then recompute them."""
        self._clear()
        self._place(first, 0)
        self._place(second, self._cut)
        alone = torch.cat((first, second), dim=2)
        placed = self._read(0, self._prompt_len)
        self._run(self._windows(token_ids))
        recomputed = self._read(0, self._prompt_len)
        names = ("keys", "values")
        return [
            Comparison(
                f"{what} of a chunk on its own, re-encoded,",
                placed[kind, :1],
                expected[kind, :1],
                before=alone[kind, :1],
            )
            for kind, what in enumerate(names)
        ] + [
            Comparison(
                f"{what} recomputed in place",
                recomputed[kind],
                expected[kind],
                before=placed[kind],
            )
            for kind, what in enumerate(names)
        ]

    def _windows(self, token_ids: list[int]) -> list[SubRequest]:
        """Windows over all positions; the middle one has the chunks' boundary inside.

        All of them in one pass, as in a request: each reads what the others write.
        """
        size = self._prompt_len
        bounds = [0, size // 4, size * 3 // 4, size]
        return [
            SubRequest(token_ids, start, end, self._table)
            for start, end in pairwise(bounds)
        ]

    def _prefill(self, sequences: Sequence[list[int]]) -> list[Tensor]:
        """Compute sequences, each on its own.

        Returns:
            K and V of each, ``[2, num_layers, num_tokens, num_kv_heads, head_dim]``.
        """
        found: list[Tensor] = []
        waiting = list(sequences)
        while waiting:
            subs: list[SubRequest] = []
            block = _FIRST_BLOCK
            for token_ids in waiting:
                after = block + self._blocks(len(token_ids))
                if after > _FIRST_BLOCK + self._num_blocks:
                    break
                table = list(range(block, after))
                subs.append(SubRequest(token_ids, 0, len(token_ids), table))
                block = after
            self._used_end = max(self._used_end, block)
            # Nothing of an earlier pass may stand in for what this one does not do.
            self._clear()
            self._run(subs)
            found += [self._gather(sub.block_ids, 0, sub.end) for sub in subs]
            waiting = waiting[len(subs) :]
        return found

    def _run(self, subs: Sequence[SubRequest]) -> None:
        for wave in _waves(subs, self._engine.limits):
            self._engine.run(wave)

    def _place(self, chunk: Tensor, start: int) -> None:
        keys, values = chunk
        turned = self._engine.reencode(keys, start)
        self._engine.layout.scatter(turned, values, self._table, start)

    def _read(self, start: int, num_tokens: int) -> Tensor:
        return self._gather(self._table, start, num_tokens)

    def _gather(self, block_ids: Sequence[int], start: int, num_tokens: int) -> Tensor:
        layers = self._engine.layers
        both = layers[0].new_empty((2, len(layers), num_tokens, *self._heads))
        self._engine.layout.gather(both[0], both[1], block_ids, start)
        return both

    def _clear(self) -> None:
        for layer in self._engine.layers:
            layer[_FIRST_BLOCK : self._used_end].zero_()

    @property
    def _table(self) -> list[int]:
        return list(range(_FIRST_BLOCK, _FIRST_BLOCK + self._blocks(self._prompt_len)))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _waves(
    subs: Sequence[SubRequest], limits: Limits
) -> Iterator[Sequence[SubRequest]]:
    """Cut sub-requests into passes, in order."""
    wave: list[SubRequest] = []
    num_tokens = 0
    for sub in subs:
        size = sub.end - sub.start
        if wave and (
            len(wave) == limits.max_num_seqs
            or num_tokens + size > limits.max_num_tokens
        ):
            yield wave
            wave, num_tokens = [], 0
        wave.append(sub)
        num_tokens += size
    yield wave
