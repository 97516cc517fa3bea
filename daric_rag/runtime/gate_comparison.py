"""When the KV of a step of DARIC counts as equal to ordinary prefill's.

What may differ is rounding, and more of it the deeper the layer. So differences are
measured against what the step in question had to change: re-encoding turns keys, and
recomputation makes good what a chunk on its own is off by. A step that does not work
misses about the whole of that.

A router of experts may choose otherwise at a near tie, in a few tokens: it is the norm
over a layer's tokens that counts, not the worst element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from daric_rag.errors import UnsupportedModelError

__all__ = ["Comparison"]


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """How far a layer may be off, as norms.

    Attributes:
        share: Of what the step had to change.
        noise: Of the whole: what rounding may make of the same computation.
    """

    share: float
    noise: float


# Seen of bfloat16: 0.005 of the whole, by re-encoding. Kernels whose rounding depends
# on the size of the pass add to that.
_TOLERANCES = {
    torch.float32: _Tolerance(share=0.01, noise=1e-3),
    torch.float16: _Tolerance(share=0.05, noise=5e-3),
    torch.bfloat16: _Tolerance(share=0.1, noise=2e-2),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A step's result and ordinary prefill's.

    Attributes:
        what: The step, for the message.
        actual: ``[num_layers, num_tokens, num_kv_heads, head_dim]``.
        expected: Like `actual`.
        before: What the step started from.
    """

    what: str
    actual: Tensor
    expected: Tensor
    before: Tensor

    def hold(self) -> None:
        """Raise UnsupportedModelError for the first layer that differs."""
        tolerance = _TOLERANCES[self.actual.dtype]
        expected = self.expected.float()
        wrong = _norms(self.actual.float() - expected)
        changed = _norms(self.before.float() - expected)
        allowed = tolerance.share * changed + tolerance.noise * _norms(expected)
        # Written so that neither NaN nor a cache that stays empty passes.
        for layer, fits in enumerate((wrong < allowed).tolist()):
            if not fits:
                raise UnsupportedModelError(
                    f"{self.what} differ from ordinary prefill in layer {layer} "
                    f"({wrong[layer]:.3g} off, {allowed[layer]:.3g} allowed): "
                    f"documents reused with this model would be garbled. Try another "
                    f"attention_backend or dtype, or run this model with vLLM alone"
                )


def _norms(tensors: Tensor) -> Tensor:
    return tensors.flatten(1).norm(dim=1)
