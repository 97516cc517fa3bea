"""What a storm's answers must be: the dense reference's, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from daric_rag import TokenPrompt
from daric_rag.layout import PromptLayout
from daric_rag.selection import Span
from tests.reference.dense import DenseReference
from tests.reference.outputs import Continuation, KVCache
from tests.reference.prompts import TokenIds
from tests.runtime.harness import Harness, Tolerance
from tests.runtime.soak import Answer

# A near tie of the reference's own two best tokens may fall either way.
TIE_NATS = 1e-3


class MemoReference(DenseReference):
    """Computes each chunk's independent cache once."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._chunks: dict[TokenIds, KVCache] = {}

    def chunk_kv(self, token_ids: Sequence[int]) -> KVCache:
        key = tuple(token_ids)
        if key not in self._chunks:
            self._chunks[key] = super().chunk_kv(key)
        return self._chunks[key]


class Blocks:
    """What a conversation's turns left in the prefix cache, by all tokens up to there.

    A block is what the last turn that computed it made of it. That turn need not be
    the one before: a conversation that shrank may come to the same documents again.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[TokenIds, KVCache] = {}

    def prefix(self, token_ids: TokenIds, prefix_len: int) -> KVCache:
        """The leading blocks of a prompt; all of them must have been left."""
        assert prefix_len % self._block_size == 0, f"{prefix_len} tokens: half a block"
        ends = range(self._block_size, prefix_len + 1, self._block_size)
        known = [token_ids[:end] in self._blocks for end in ends]
        assert all(known), f"nobody left a prefix of {prefix_len} tokens"
        return reduce(KVCache.then, (self._blocks[token_ids[:end]] for end in ends))

    def leave(self, token_ids: TokenIds, cache: KVCache, prefix_len: int) -> None:
        """A turn computed what is beyond its prefix."""
        size = self._block_size
        for end in range(prefix_len + size, len(token_ids) + 1, size):
            self._blocks[token_ids[:end]] = cache.between(end - size, end)


class Oracle:
    """Holds answers against the dense reference, each under its own output.

    A conversation's turn depends on what earlier ones left in the prefix cache, of
    which it takes as many whole blocks as it reports.

    Attributes:
        num_ties: Answers with a near tie that fell the other way.
        num_prefixed: Turns that took blocks of earlier ones.
    """

    def __init__(self, reference: DenseReference, harness: Harness) -> None:
        self._reference = MemoReference(reference.model)
        self._engine = harness.engine
        self._talks: dict[str, Blocks] = {}
        self._known: dict[tuple[Any, ...], Continuation] = {}
        self.num_ties = self.num_prefixed = 0

    def check(self, answer: Answer) -> None:
        """Every token is the reference's best one, with its log-probability."""
        completion = answer.completion
        num_tokens = len(completion.token_ids)
        assert num_tokens == answer.ask.max_tokens, f"{num_tokens} tokens came"
        layout = self._engine.layout(TokenPrompt(answer.chunks))
        if answer.talk is not None:
            expected = self._turn(answer, layout)
        else:
            expected = self._alone(answer, layout)
        assert completion.logprobs is not None
        rows = expected.logprobs[: answer.num_certain]
        best = rows.max(dim=-1).values
        is_tie = False
        for step in range(len(rows)):
            token = completion.token_ids[step]
            right = float(rows[step, token])
            lead = float(best[step]) - right
            assert lead < TIE_NATS, f"token {step} is {lead:.2e} nats behind the best"
            error = abs(completion.logprobs[step][token] - right)
            assert error <= Tolerance().logprob, f"token {step} is off by {error:.2e}"
            is_tie |= lead > 0
        self.num_ties += is_tie

    def _alone(self, answer: Answer, layout: PromptLayout) -> Continuation:
        key = (answer.chunks, answer.ask.reuse)
        token_ids = answer.completion.token_ids
        known = self._known.get(key)
        if known is None or known.token_ids[: len(token_ids)] != token_ids:
            prefill = self._reference.daric_prefill(
                layout.token_ids, layout.spans, _windows(answer, layout)
            )
            known, _ = self._reference.follow(prefill, token_ids)
            self._known[key] = known
        return known

    def _turn(self, answer: Answer, layout: PromptLayout) -> Continuation:
        assert answer.talk is not None
        blocks = self._talks.setdefault(answer.talk, Blocks(self._engine.block_size))
        prefix_len, prefix = answer.completion.reuse.gpu_prefix_tokens, None
        if prefix_len:
            prefix = blocks.prefix(layout.token_ids, prefix_len)
            self.num_prefixed += 1
        prefill = self._reference.daric_prefill(
            layout.token_ids, layout.spans, _windows(answer, layout), prefix
        )
        token_ids = answer.completion.token_ids
        expected, cache = self._reference.follow(prefill, token_ids)
        # The last token of an answer is never computed.
        blocks.leave((*layout.token_ids, *token_ids[:-1]), cache, prefix_len)
        return expected


def _windows(answer: Answer, layout: PromptLayout) -> Sequence[Span]:
    return {
        "daric": layout.windows,
        "full_reuse": [layout.spans[-1]],
        "off": [(0, layout.prompt_len)],
    }[answer.ask.reuse]
