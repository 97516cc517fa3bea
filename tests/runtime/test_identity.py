"""A model's identity changes with every byte of its weights, and with nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daric_rag.errors import UnsupportedModelError
from daric_rag.runtime import identity
from daric_rag.runtime.identity import model_fields, weights_identity

pytestmark = pytest.mark.engine  # the module belongs to vLLM's side


def folder(path: Path, weights: bytes = bytes(1 << 20)) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").write_text("{}")
    return path


def test_a_copy_is_the_same(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a"), folder(tmp_path / "b")
    (second / "README.md").write_text("moved")
    assert weights_identity(first) == weights_identity(second)


@pytest.mark.parametrize("position", [0, 77, 300_001, 777_777, (1 << 20) - 1])
def test_one_byte_makes_another_model(tmp_path: Path, position: int) -> None:
    """An edited matrix, or a merged adapter, anywhere in the file."""
    weights = bytearray(1 << 20)
    weights[position] = 1
    changed = folder(tmp_path / "b", bytes(weights))
    assert weights_identity(folder(tmp_path / "a")) != weights_identity(changed)


def test_a_file_changed_in_place_is_noticed(tmp_path: Path) -> None:
    model = folder(tmp_path / "a")
    before = weights_identity(model)
    (model / "model.safetensors").write_bytes(b"x" * (1 << 20))
    assert weights_identity(model) != before


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    model = folder(tmp_path / "a")
    (model / "model.safetensors").rename(model / "model.tensors")
    with pytest.raises(UnsupportedModelError, match="no weight files"):
        weights_identity(model)


def hub_config(commit: str | None = None, revision: str | None = None) -> Any:
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format="auto"),
        model_config=SimpleNamespace(
            model="org/model",
            revision=revision,
            dtype="bfloat16",
            quantization=None,
            seed=0,
            hf_config=SimpleNamespace(_commit_hash=commit),
            hf_text_config=SimpleNamespace(to_dict=dict),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def test_a_hub_model_is_known_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = "a" * 40, "b" * 40
    by_commit = model_fields(hub_config(commit=first))["weights"]
    assert by_commit == model_fields(hub_config(revision=first))["weights"]
    assert by_commit != model_fields(hub_config(commit=second))["weights"]
    # Without one, by what was downloaded.
    snapshot = folder(tmp_path / "snapshot")
    monkeypatch.setattr(
        identity,
        "try_to_load_from_cache",
        lambda *_, **__: str(snapshot / "config.json"),
    )
    fields = model_fields(hub_config(revision="main"))
    assert fields["weights"] == weights_identity(snapshot)
    # Or it is refused: a branch's name may stand for other weights tomorrow.
    monkeypatch.setattr(identity, "try_to_load_from_cache", lambda *_, **__: None)
    with pytest.raises(UnsupportedModelError, match="revision="):
        model_fields(hub_config(revision="main"))


def test_shards_are_told_apart(tmp_path: Path) -> None:
    """The same bytes under another name are other shards."""
    model, renamed = folder(tmp_path / "a"), folder(tmp_path / "b")
    (renamed / "model.safetensors").rename(renamed / "other.safetensors")
    assert weights_identity(model) != weights_identity(renamed)
