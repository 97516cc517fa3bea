"""What a model's KV cache depends on, as the fields of its `ModelFingerprint`.

Weights are identified by content, so that a fine-tuned copy under an old name never
meets the old copy's records, and a renamed folder keeps its own. Every byte counts:
an edit or a merged adapter may change a few matrices only. The hash runs faster than
any disk, so it costs about one more reading of files that are read at start anyway.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub import try_to_load_from_cache

from daric_rag.errors import UnsupportedModelError
from daric_rag.keys import ModelFingerprint, Scalar, model_fingerprint
from daric_rag.runtime.vllm_api import VllmConfig
from daric_rag.storage.format import FORMAT_VERSION

__all__ = ["model_fields", "namespace_root", "weights_identity"]

_PIECE_BYTES = 8 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Facts about the folder or the library, not about the model.
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "use_cache")


def model_fields(
    config: VllmConfig, *, kv_storage: str = "model", rank: int = 0
) -> dict[str, Scalar]:
    """Return everything that decides the bytes of this engine's KV.

    Args:
        config: The engine's configuration.
        kv_storage: How records hold the KV; see `DaricConfig`.
        rank: Tensor-parallel rank whose heads the KV holds; 0 for what all ranks share,
            such as the root of their segments' keys.
    """
    model = config.model_config
    return {
        "weights": _weights(config),
        "config": _config_identity(model.hf_text_config),
        "dtype": str(model.dtype),
        "kv_dtype": str(config.cache_config.cache_dtype),
        "kv_storage": kv_storage,
        "quantization": str(model.quantization),
        "load_format": _load_format(config),
        "tp_size": config.parallel_config.tensor_parallel_size,
        "tp_rank": rank,
        "record_format": FORMAT_VERSION,
    }


def namespace_root(fields: dict[str, Scalar], namespace: str) -> ModelFingerprint:
    """Return the index root of one tenant: parent of all its segment keys."""
    return model_fingerprint(fields | {"namespace": namespace})


def weights_identity(folder: Path) -> str:
    """Digest the weight files of a folder: their names and every byte.

    Raises:
        UnsupportedModelError: There is none, so that nothing tells two models apart.
    """
    names = [p for p in sorted(folder.iterdir()) if p.suffix in _WEIGHT_SUFFIXES]
    if not names:
        raise UnsupportedModelError(
            f"{folder} has no weight files ({', '.join(_WEIGHT_SUFFIXES)}), so its "
            f"cached documents could not be told from another model's; put the "
            f"weights into this folder itself"
        )
    parts = [f"{path.name}:{_file_digest(path, *_version(path))}" for path in names]
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def _version(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


@lru_cache(maxsize=1024)
def _file_digest(path: Path, size: int, mtime_ns: int, inode: int) -> str:
    """Digest a file; both halves of the connector ask for the same ones."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(memoryview(buffer)[:num_bytes])
    return digest.hexdigest()


def _weights(config: VllmConfig) -> str:
    if str(config.load_config.load_format) == "dummy":
        return "none"  # random ones; the load format says which
    return _model_identity(config.model_config)


def _load_format(config: VllmConfig) -> str:
    """Random weights are not those of the files, and depend on the seed."""
    load_format = str(config.load_config.load_format)
    if load_format == "dummy":
        return f"dummy:{config.model_config.seed}"
    return "files"


def _model_identity(model: Any) -> str:
    folder = Path(model.model)
    if folder.is_dir():
        return weights_identity(folder)
    for commit in (getattr(model.hf_config, "_commit_hash", None), model.revision):
        if _COMMIT.fullmatch(commit or ""):
            return f"hub:{model.model}@{commit}"
    # What the hub's client downloaded lies in a folder of its own per commit.
    config = try_to_load_from_cache(
        model.model, "config.json", revision=model.revision or "main"
    )
    if isinstance(config, str):
        return weights_identity(Path(config).parent)
    raise UnsupportedModelError(
        f"it cannot be told which version of {model.model} this is, and another "
        f"version's cached documents would be wrong; pass revision= with a commit "
        f"hash, or a local folder"
    )


def _config_identity(hf_config: Any) -> str:
    values = {k: v for k, v in hf_config.to_dict().items() if k not in _VOLATILE_CONFIG}
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
