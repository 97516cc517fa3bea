"""Tiny seeded float32 checkpoints that transformers and vLLM both load.

One kind per thing that can go wrong with stored keys and values: how heads share
keys, biases, query/key norms, head sizes unlike hidden/heads, which elements of a head
turn and in which pairs, and every way of scaling RoPE that a position-independent cache
can support.

The weights are random but not small. With an ordinary initialisation attention is
almost uniform and logits almost flat, so that a test passes whatever the cache holds.
Here attention picks few tokens, a changed document changes the continuation, and
greedy choices win by a clear margin.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    Glm4Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from tests.reference.tiny_tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    build_tokenizer,
)

MAX_POSITION = 4096
_ROPE_DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}

# Standard deviations, tuned by trial: larger query and key weights make attention so
# sharp that rounding differences grow past 1e-4 in log-probabilities; smaller ones,
# larger embeddings or larger biases make greedy output repeat one token. Weights are
# divided by sqrt(fan-in), so that with a normalised input the output's standard
# deviation is the number given here.
_UNIT_STD: Mapping[str, float] = {
    "q_proj": 1.4,
    "k_proj": 1.4,
    "v_proj": 1.5,
    "o_proj": 2.5,
    "gate_proj": 1.0,
    "up_proj": 1.0,
    "gate_up_proj": 1.0,
    "down_proj": 1.0,
    "gate": 3.0,
    "lm_head": 3.0,
}
_EMBED_STD = 0.2
_BIAS_STD = 0.15
_QK_NORM_GAIN = 1.4


def _common(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": dict(_ROPE_DEFAULT),
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    return fields | changes


def _llama(**changes: Any) -> PretrainedConfig:
    return LlamaConfig(**_common(**changes))


def _rope(rope_type: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **fields}


def _qwen3_moe() -> PretrainedConfig:
    return Qwen3MoeConfig(
        **_common(
            head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
        )
    )


_CONFIGS: Mapping[str, Callable[[], PretrainedConfig]] = {
    "llama-gqa-tied": lambda: _llama(tie_word_embeddings=True, num_hidden_layers=4),
    "llama-mha": lambda: _llama(num_key_value_heads=4),
    "llama-mqa": lambda: _llama(num_key_value_heads=1),
    "qwen2": lambda: Qwen2Config(**_common()),
    "qwen3": lambda: Qwen3Config(**_common(head_dim=64)),
    "llama-rope-llama3": lambda: _llama(
        rope_parameters=_rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=512,
        )
    ),
    "llama-rope-linear": lambda: _llama(rope_parameters=_rope("linear", factor=2.0)),
    "llama-rope-yarn": lambda: _llama(
        rope_parameters=_rope(
            "yarn", factor=4.0, original_max_position_embeddings=MAX_POSITION // 4
        )
    ),
    # Pairs (2 i, 2 i + 1) rather than halves.
    "ernie-interleaved": lambda: Ernie4_5Config(**_common(head_dim=64)),
    # Such pairs in the first half of a head; a norm after attention and MLP, too.
    "glm4-interleaved-partial": lambda: Glm4Config(
        **_common(
            head_dim=64,
            rope_parameters=_rope("default", partial_rotary_factor=0.5),
        )
    ),
    # The first half of a head turns; LayerNorm with biases.
    "stablelm-partial": lambda: StableLmConfig(
        **_common(
            rope_parameters=_rope("default", partial_rotary_factor=0.5),
            use_qkv_bias=True,
        )
    ),
    "qwen3-moe": _qwen3_moe,
}

DENSE_KINDS: tuple[str, ...] = tuple(kind for kind in _CONFIGS if kind != "qwen3-moe")
"""Kinds without routing, where a rounding difference stays a rounding difference."""

KINDS: tuple[str, ...] = tuple(_CONFIGS)
"""All kinds. `qwen3-moe` routes tokens, so two engines may part at a near tie."""


def build(kind: str, root: Path, seed: int = 0) -> Path:
    """Writes the checkpoint of one kind, with tokenizer, unless it is there already.

    Args:
        kind: One of `KINDS`.
        root: Folder that holds the checkpoints; created if missing.
        seed: Seed of the weights.

    Returns:
        The checkpoint's folder, `root/<kind>-seed<seed>`.

    Raises:
        KeyError: `kind` is unknown.
    """
    config = _CONFIGS[kind]()
    target = root / f"{kind}-seed{seed}"
    if target.exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=root))
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model, torch.Generator().manual_seed(seed))
        model.save_pretrained(scratch)
        build_tokenizer().save_pretrained(scratch)
        # A complete checkpoint appears at once: parallel test workers share `root`.
        scratch.rename(target)
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Overwrites every parameter of `model` from `generator`."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        owner, _, leaf = name.rpartition(".")
        module = owner.rpartition(".")[2]
        if module in ("q_norm", "k_norm"):
            value = _QK_NORM_GAIN * (1.0 + 0.1 * noise)
        elif leaf == "bias":
            value = _BIAS_STD * noise
        elif module.endswith("norm"):
            value = 1.0 + 0.1 * noise
        elif module == "embed_tokens":
            value = _EMBED_STD * noise
        else:
            # Experts are bare parameters: their own name says which kind they are.
            unit = _UNIT_STD[module if leaf == "weight" else leaf]
            value = unit / parameter.shape[-1] ** 0.5 * noise
        with torch.no_grad():
            parameter.copy_(value)
