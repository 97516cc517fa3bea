"""What the dense reference returns: caches, prefills, continuations."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVCache:
    """Keys after RoPE, and values, of a run of tokens.

    Attributes:
        keys: `[num_layers, num_tokens, num_kv_heads, head_dim]`.
        values: Same shape.
    """

    keys: Tensor
    values: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return int(self.keys.shape[1])

    def between(self, start: int, end: int) -> "KVCache":
        """The tokens at `[start, end)`; shares memory."""
        return KVCache(self.keys[:, start:end], self.values[:, start:end])

    def then(self, behind: "KVCache") -> "KVCache":
        """These tokens and those behind them, in new memory."""
        return KVCache(
            torch.cat((self.keys, behind.keys), dim=1),
            torch.cat((self.values, behind.values), dim=1),
        )


@dataclass(frozen=True)
class Prefill:
    """A prompt's final cache and what the model says at its last position.

    Attributes:
        cache: All L positions.
        logits: `[vocab_size]`.
    """

    cache: KVCache
    logits: Tensor

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities (nats) of the first output token, `[vocab_size]`."""
        return torch.log_softmax(self.logits, dim=-1)


@dataclass(frozen=True)
class Continuation:
    """Output tokens and the distributions they were drawn from.

    Attributes:
        token_ids: The n output tokens. End-of-sequence does not stop the reference:
            compare with an engine that ignores it too.
        logprobs: `[n, vocab_size]` in nats; row i is what token i was chosen from.
    """

    token_ids: tuple[int, ...]
    logprobs: Tensor

    @property
    def chosen_logprobs(self) -> Tensor:
        """Log-probability of each output token, `[n]`."""
        index = torch.tensor(self.token_ids).unsqueeze(-1)
        return self.logprobs.gather(-1, index).squeeze(-1)

    @property
    def margins(self) -> Tensor:
        """Lead of the best token over the second, in nats, `[n]`."""
        best = self.logprobs.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]
