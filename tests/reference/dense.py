"""A naive dense reference of DARIC in float32.

Sections 2.1, 2.2 and 3.3.3 of the paper, written to be read and not to be fast: no
blocks, no segments, no store. A transformers model lends its weights, norms, MLPs and
inverse frequencies; attention, RoPE and everything about caches are spelled out here.

    chunk i alone          K_i, V_i at positions 0 .. l_i - 1          (2.1)
    re-encoding            K'_i = R(t_i) K_i, V_i unchanged            (2.2)
    recomputation          K^s, V^s overwrite K', V at the windows,
                           O = softmax(Q^s K^u / sqrt(d)) V^u          (equation 1)

The last two lines happen layer by layer: at each layer all windows first write their
keys and values, then attend to everything at or before their own position.

Keys are stored after RoPE. RoPE is R(p) times an attention scaling s (YaRN's
factor; 1 elsewhere), so s is in the stored key once and for all and re-encoding must be
the pure rotation R(delta).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.reference.attention import apply_rotation, attend
from tests.reference.outputs import Continuation, KVCache, Prefill
from tests.reference.prompts import Span
from tests.reference.windows import window_positions

_INTERLEAVED = ("ernie4_5", "glm4")


class DenseReference:
    """DARIC over one transformers decoder (Llama, Qwen, ERNIE, GLM-4, StableLM).

    Holds no cache: every call starts from token ids.
    """

    def __init__(self, model: Any) -> None:
        """Takes over `model` (a `...ForCausalLM`), which it does not change."""
        self.model = model
        self.dtype: torch.dtype = model.lm_head.weight.dtype
        self.decoder = model.model
        attention = self.decoder.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.num_kv_heads: int = attention.k_proj.out_features // self.head_dim
        self.num_layers: int = len(self.decoder.layers)
        self.inv_freq: Tensor = self.decoder.rotary_emb.inv_freq.float()
        self.attention_scaling = float(self.decoder.rotary_emb.attention_scaling)
        # No configuration says so: it is part of the architecture.
        self.interleaved: bool = model.config.model_type in _INTERLEAVED

    def chunk_kv(self, token_ids: Sequence[int]) -> KVCache:
        """The independent cache of one chunk, at positions 0 .. n - 1 (2.1)."""
        return self.full_prefill(token_ids).cache

    def reencode(
        self, keys: Tensor, delta: int, angle_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Moves keys by `delta` positions (section 2.2, position re-encoding).

        Args:
            keys: `[..., num_tokens, num_kv_heads, head_dim]` after RoPE.
            delta: Positions to move by; negative moves towards the start.
            angle_dtype: Precision of `delta * inv_freq`. Engines compute
                `position * inv_freq` in float32, where an angle of thousands of
                radians is off by about 1e-4; float64 shows how much of a difference
                that is.

        Returns:
            A new tensor of the shape of `keys`. Not multiplied by the attention
            scaling, which the keys carry already.
        """
        angles = delta * self.inv_freq.to(angle_dtype).unsqueeze(0)
        cos, sin = angles.cos().to(keys.dtype), angles.sin().to(keys.dtype)
        turned = apply_rotation(keys.flatten(0, -3), cos, sin, self.interleaved)
        return turned.view_as(keys)

    def full_prefill(self, token_ids: Sequence[int]) -> Prefill:
        """Ordinary prefill of the whole prompt: no reuse at all."""
        cache = self._empty(len(token_ids))
        return self._compute(token_ids, torch.arange(len(token_ids)), cache)

    def assemble(self, token_ids: Sequence[int], spans: Sequence[Span]) -> KVCache:
        """Concatenates the chunks' independent caches, re-encoded (2.1, 2.2).

        Args:
            token_ids: The prompt, L tokens.
            spans: Half-open chunk spans that partition `[0, L)` in order.

        Returns:
            K' and V of all L positions, before any recomputation.

        Raises:
            ValueError: `spans` is no partition into non-empty chunks.
        """
        bounds = [0, *(end for _, end in spans)]
        if bounds[-1] != len(token_ids) or any(
            start != before or end <= start
            for before, (start, end) in zip(bounds, spans, strict=False)
        ):
            raise ValueError(f"spans {spans} do not partition [0, {len(token_ids)})")
        chunks = [self.chunk_kv(token_ids[start:end]) for start, end in spans]
        keys = [
            self.reencode(chunk.keys, start)
            for chunk, (start, _) in zip(chunks, spans, strict=True)
        ]
        return KVCache(
            torch.cat(keys, dim=1), torch.cat([c.values for c in chunks], dim=1)
        )

    def daric_prefill(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        windows: Sequence[Span],
        prefix: KVCache | None = None,
    ) -> Prefill:
        """Position-independent reuse with partial recomputation (Algorithm 2).

        Args:
            token_ids: The prompt, L tokens, padding included if there is any.
            spans: Half-open chunk spans that partition `[0, L)` in order.
            windows: The recompute set, exactly: half-open, any order, overlaps
                allowed. Nothing is added, so it must hold the last position.
            prefix: The first tokens' cache, taken as it is (lazy acceptance).

        Returns:
            The cache of all L positions and the logits at the last one.

        Raises:
            ValueError: `spans` is no partition, a window lies outside the prompt, or
                the last position is in no window.
        """
        positions = window_positions(windows, len(token_ids))
        if len(positions) == 0 or int(positions[-1]) != len(token_ids) - 1:
            raise ValueError("the recompute set must hold the last prompt token")
        base = self.assemble(token_ids, spans)
        if prefix is not None:
            positions = positions[positions >= prefix.num_tokens]
            base = prefix.then(base.between(prefix.num_tokens, base.num_tokens))
        return self._compute(token_ids, positions, base)

    def greedy(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        windows: Sequence[Span],
        num_tokens: int,
    ) -> Continuation:
        """Greedy decoding over DARIC's cache; arguments as in `daric_prefill`."""
        prefill = self.daric_prefill(token_ids, spans, windows)
        return self.decode(prefill, num_tokens)

    def full_greedy(self, token_ids: Sequence[int], num_tokens: int) -> Continuation:
        """Greedy decoding after an ordinary prefill."""
        return self.decode(self.full_prefill(token_ids), num_tokens)

    def decode(
        self, prefill: Prefill, num_tokens: int, forced: Sequence[int] = ()
    ) -> Continuation:
        """Ordinary decoding over a finished prefill.

        Args:
            prefill: Where to go on from; not changed.
            num_tokens: Output tokens.
            forced: Output tokens given in advance, best ones after them. An engine's
                own output given here keeps distributions comparable past a near tie.

        Returns:
            The tokens and the distribution each came from.
        """
        token_ids: list[int] = []
        rows: list[Tensor] = []
        while len(token_ids) < num_tokens:
            step = len(token_ids)
            rows.append(prefill.logprobs)
            best = int(prefill.logits.argmax())
            token_ids.append(forced[step] if step < len(forced) else best)
            if len(token_ids) < num_tokens:
                cache, x = self._behind(prefill.cache, token_ids[-1:])
                prefill = Prefill(cache, self._logits(x[-1]))
        return Continuation(tuple(token_ids), torch.stack(rows))

    def follow(
        self, prefill: Prefill, token_ids: Sequence[int]
    ) -> tuple[Continuation, KVCache]:
        """As `decode` with all tokens forced, in one pass; and its last cache."""
        rows, cache = prefill.logits.unsqueeze(0), prefill.cache
        if len(token_ids) > 1:
            cache, x = self._behind(cache, token_ids[:-1])
            rows = torch.cat((rows, self._logits(x)))
        return Continuation(tuple(token_ids), rows.log_softmax(dim=-1)), cache

    def _behind(self, cache: KVCache, ids: Sequence[int]) -> tuple[KVCache, Tensor]:
        """Computes tokens behind a cache; returns what `_hidden` does."""
        start, end = cache.num_tokens, cache.num_tokens + len(ids)
        before = [0] * start  # not looked at
        grown = cache.then(self._empty(len(ids)))
        return self._hidden([*before, *ids], torch.arange(start, end), grown)

    def _empty(self, num_tokens: int) -> KVCache:
        """A cache of NaN: reading what nobody has written shows."""
        shape = (self.num_layers, num_tokens, self.num_kv_heads, self.head_dim)
        blank = torch.full(shape, torch.nan, dtype=self.dtype)
        return KVCache(blank, blank.clone())

    def _compute(
        self, token_ids: Sequence[int], positions: Tensor, base: KVCache
    ) -> Prefill:
        """Computes the tokens at `positions` in the context of `base`.

        The only forward pass here: `positions` is everything in a full prefill, the
        windows in DARIC, and one token in decoding.

        Args:
            token_ids: `[L]`.
            positions: `[num_positions]`, ascending, the last one L - 1.
            base: L positions; not changed.

        Returns:
            `base` with keys and values at `positions` overwritten, and the logits.
        """
        cache, x = self._hidden(token_ids, positions, base)
        return Prefill(cache, self._logits(x[-1]))

    def _logits(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model.lm_head(self.decoder.norm(x))

    def _hidden(
        self, token_ids: Sequence[int], positions: Tensor, base: KVCache
    ) -> tuple[KVCache, Tensor]:
        """As `_compute`, with the residual stream at `positions`."""
        keys, values = base.keys.clone(), base.values.clone()
        with torch.no_grad():
            x = self.decoder.embed_tokens(torch.tensor(token_ids)[positions])
            for index, layer in enumerate(self.decoder.layers):
                query, new_keys, new_values = self._project(layer, x, positions)
                keys[index, positions] = new_keys
                values[index, positions] = new_values
                out = attend(query, keys[index], values[index], positions)
                out = layer.self_attn.o_proj(out.flatten(1))
                if sandwiched := hasattr(layer, "post_self_attn_layernorm"):
                    out = layer.post_self_attn_layernorm(out)  # GLM-4
                x = x + out
                # The MLP wants a batch dimension when it routes between experts.
                hidden = layer.post_attention_layernorm(x).unsqueeze(0)
                out = layer.mlp(hidden).squeeze(0)
                x = x + (layer.post_mlp_layernorm(out) if sandwiched else out)
        return KVCache(keys, values), x

    def _project(
        self, layer: Any, x: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both after RoPE) and values of tokens at `positions`.

        Args:
            layer: A decoder layer.
            x: `[num_positions, hidden_size]`, the residual stream.
            positions: `[num_positions]`.

        Returns:
            `[num_positions, num_heads or num_kv_heads, head_dim]` each.
        """
        attention = layer.self_attn
        hidden = layer.input_layernorm(x)
        query = attention.q_proj(hidden).unflatten(-1, (-1, self.head_dim))
        keys = attention.k_proj(hidden).unflatten(-1, (-1, self.head_dim))
        values = attention.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        if hasattr(attention, "q_norm"):
            query, keys = attention.q_norm(query), attention.k_norm(keys)
        angles = positions.float().unsqueeze(-1) * self.inv_freq
        cos = (angles.cos() * self.attention_scaling).to(x.dtype)
        sin = (angles.sin() * self.attention_scaling).to(x.dtype)
        query = apply_rotation(query, cos, sin, self.interleaved)
        return query, apply_rotation(keys, cos, sin, self.interleaved), values


def load_reference(
    model_path: str | Path, dtype: torch.dtype = torch.float32
) -> DenseReference:
    """Loads a local checkpoint and wraps it.

    Args:
        model_path: Folder of a Hugging Face checkpoint, of any stored dtype.
        dtype: Precision to compute in; float32 is what tolerances are stated for.
            In float64, norms and angles stay float32, and experts do not run.

    Returns:
        The reference, on the CPU.
    """
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=dtype, local_files_only=True
    )
    return DenseReference(model.eval())
