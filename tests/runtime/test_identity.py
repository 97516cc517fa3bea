"""A model's identity changes with every byte of its weights, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from daric_rag.runtime.identity import weights_identity

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


def test_shards_are_told_apart(tmp_path: Path) -> None:
    """The same bytes under another name are other shards."""
    model, renamed = folder(tmp_path / "a"), folder(tmp_path / "b")
    (renamed / "model.safetensors").rename(renamed / "other.safetensors")
    assert weights_identity(model) != weights_identity(renamed)
