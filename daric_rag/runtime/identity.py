"""What a model's KV cache depends on, as the fields of its `ModelFingerprint`.

Weights are identified by content, so that a fine-tuned copy under an old name never
meets the old copy's records, and a renamed folder keeps its own. Files are sampled
rather than read whole: training changes practically every weight, and reading a hundred
gigabytes at start would cost more than the first documents.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from daric_rag.keys import ModelFingerprint, Scalar, model_fingerprint
from daric_rag.runtime.vllm_api import VllmConfig
from daric_rag.storage.format import FORMAT_VERSION

__all__ = ["model_fields", "namespace_root", "weights_identity"]

_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 64
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Facts about the folder or the library, not about the model.
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "use_cache")


def model_fields(config: VllmConfig, *, rank: int = 0) -> dict[str, Scalar]:
    """Return everything that decides the bytes of this engine's KV.

    Args:
        config: The engine's configuration.
        rank: Tensor-parallel rank whose heads the KV holds.
    """
    model = config.model_config
    return {
        "weights": _model_identity(model),
        "config": _config_identity(model.hf_text_config),
        "dtype": str(model.dtype),
        "kv_dtype": str(config.cache_config.cache_dtype),
        "quantization": str(model.quantization),
        "tp_size": config.parallel_config.tensor_parallel_size,
        "tp_rank": rank,
        "record_format": FORMAT_VERSION,
    }


def namespace_root(fields: dict[str, Scalar], namespace: str) -> ModelFingerprint:
    """Return the index root of one tenant: parent of all its segment keys."""
    return model_fingerprint(fields | {"namespace": namespace})


def weights_identity(folder: Path) -> str:
    """Digest the weight files of a folder: names, sizes and sampled bytes."""
    digest = hashlib.blake2b(digest_size=32)
    for path in sorted(folder.iterdir()):
        if path.suffix not in _WEIGHT_SUFFIXES:
            continue
        num_bytes = path.stat().st_size
        digest.update(f"{path.name}\0{num_bytes}\0".encode())
        with path.open("rb") as file:
            for offset in _sample_offsets(num_bytes):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _sample_offsets(num_bytes: int) -> list[int]:
    # The first sample holds the tensors' names and shapes, the last the end.
    if num_bytes <= _SAMPLE_BYTES * _NUM_SAMPLES:
        return list(range(0, num_bytes, _SAMPLE_BYTES))
    last = num_bytes - _SAMPLE_BYTES
    return [last * index // (_NUM_SAMPLES - 1) for index in range(_NUM_SAMPLES)]


def _model_identity(model: Any) -> str:
    folder = Path(model.model)
    if folder.is_dir():
        return weights_identity(folder)
    commit = getattr(model.hf_config, "_commit_hash", None)
    return f"hub:{model.model}@{commit or model.revision or 'main'}"


def _config_identity(hf_config: Any) -> str:
    values = {k: v for k, v in hf_config.to_dict().items() if k not in _VOLATILE_CONFIG}
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
