"""Which engines can be served, decided from their configuration before any loading.

What only the loaded model shows is checked by `rope`, `kv_probe` and `gate`.
"""

from __future__ import annotations

from typing import Any

from daric_rag.errors import ConfigError, UnsupportedModelError
from daric_rag.runtime.rope import check_rope_type
from daric_rag.runtime.vllm_api import FullAttentionSpec, VllmConfig

__all__ = ["check_vllm_config", "only_spec"]

# The gate that a model passes at start needs a few positions to turn keys at.
_MIN_TOKENS_PER_PASS = 16


def check_vllm_config(config: VllmConfig) -> None:
    """Refuse what the worker cannot serve; each reason names the way out.

    Raises:
        UnsupportedModelError: With the reason.
    """
    if config.use_v2_model_runner:
        raise UnsupportedModelError(
            "daric_rag needs vLLM's V1 model runner; set VLLM_USE_V2_MODEL_RUNNER=0 "
            "before vLLM is imported"
        )
    model, parallel = config.model_config, config.parallel_config
    refusals = {
        "asynchronous scheduling; pass async_scheduling=False": (
            config.scheduler_config.async_scheduling
        ),
        "speculative decoding; drop speculative_config": (
            config.speculative_config is not None
        ),
        "LoRA; drop enable_lora": config.lora_config is not None,
        "pipeline parallelism; use tensor_parallel_size instead": (
            parallel.pipeline_parallel_size > 1
        ),
        "engines spread over machines; drop nnodes": parallel.nnodes > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "a quantized KV cache; pass kv_cache_dtype='auto'": (
            config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16")
        ),
        "multimodal models": bool(model.is_multimodal_model),
        "encoder-decoder models": bool(model.is_encoder_decoder),
        "M-RoPE": bool(model.uses_mrope),
        "MLA attention": bool(model.use_mla),
        "models that vLLM runs through its Transformers backend, whose position "
        "encoding cannot be seen": bool(model.using_transformers_backend()),
        "pooling models": model.runner_type != "generate",
        "models without attention in every layer": bool(
            model.is_hybrid or model.is_attention_free
        ),
        "sliding-window attention; where the model allows it pass "
        "disable_sliding_window=True": _has_sliding_window(model),
    }
    for what, present in refusals.items():
        if present:
            raise UnsupportedModelError(f"daric_rag does not support {what}")
    check_rope_type(model.hf_text_config)
    per_pass = config.scheduler_config.max_num_batched_tokens
    if per_pass < _MIN_TOKENS_PER_PASS:
        raise ConfigError(
            f"max_num_batched_tokens is {per_pass}; daric_rag needs at least "
            f"{_MIN_TOKENS_PER_PASS}"
        )


def _has_sliding_window(model: Any) -> bool:
    wanted = getattr(model.hf_text_config, "use_sliding_window", True)
    window = getattr(model.hf_text_config, "sliding_window", None)
    return bool(wanted and window and not model.disable_sliding_window)


def only_spec(kv_cache_config: Any) -> Any:
    """Return the one specification of a model's KV cache.

    Raises:
        UnsupportedModelError: There are several, or it is not full attention.
    """
    groups = kv_cache_config.kv_cache_groups
    spec: Any = groups[0].kv_cache_spec if groups else None
    supported = (
        len(groups) == 1
        and type(spec) is FullAttentionSpec
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not kv_cache_config.needs_kv_cache_zeroing
    )
    if not supported:
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        raise UnsupportedModelError(
            f"the model's KV cache is {kinds}; daric_rag serves models with full "
            f"attention in every layer (no sliding window, no Mamba, no MLA). Run this "
            f"model with vLLM alone"
        )
    return spec
