"""Turns the GGUF file of SmolLM2 into a dense bfloat16 checkpoint for vLLM.

`python -m daric_rag._convert FILE.gguf FOLDER`; `models` runs it in a process of its
own. Needs torch, transformers, gguf and accelerate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def convert(weights: Path, folder: Path) -> None:
    """Writes the checkpoint, tokenizer and chat template of `weights` to `folder`.

    Args:
        weights: The quantized GGUF file.
        folder: An existing, empty folder.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {
        "pretrained_model_name_or_path": str(weights.parent),
        "gguf_file": weights.name,
    }
    model = AutoModelForCausalLM.from_pretrained(
        **source,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are dense now; a leftover entry would make vLLM look for GGUF.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    _split_digits(folder / "tokenizer.json")
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors makes private files


def _split_digits(path: Path) -> None:
    """Puts back the rule of SmolLM2's tokenizer that every digit stands alone.

    GGUF names the rule set ("smollm") and transformers reads all such files as GPT-2's,
    which tokenises blank lines before a digit differently.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [digits, content["pre_tokenizer"]],
    }
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
