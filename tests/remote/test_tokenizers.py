"""Who makes ids of texts: the server, a file, or an object of the caller's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from daric_rag import (
    ChunkedPrompt,
    ConfigError,
    DaricConfig,
    PromptLayout,
    TokenPrompt,
)
from daric_rag.input_processor import InputProcessor
from tests.remote.fake_server import (
    FIRST_BYTE,
    MAX_MODEL_LEN,
    SPECIAL,
    TEXTS,
    FakeServer,
    LocalTokenizer,
    open_engine,
)

PROMPT = ChunkedPrompt(
    system="Be brief.",
    documents=["The mill <|bot|> was built.", "日本 é", "The mill <|bot|> was built."],
    question="When <|end|>?",
)


def tokenizer_file(folder: Path, first_id: int = FIRST_BYTE) -> Path:
    """The fake server's tokenizer as a file: byte-level BPE without merges."""
    tokenizers = pytest.importorskip("tokenizers")
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    vocab = {letter: first_id + byte for byte, letter in letters.items()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab | SPECIAL, []))
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([*SPECIAL])
    # As some models' files have it; prompts are longer.
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def expected() -> PromptLayout:
    """As an embedded engine lays the prompt out."""
    return InputProcessor(
        LocalTokenizer(),
        config=DaricConfig(),
        block_size=16,
        max_model_len=MAX_MODEL_LEN,
    ).layout(PROMPT)


def test_the_server_tokenises(server: FakeServer, expected: PromptLayout) -> None:
    with open_engine(server) as engine:
        assert engine.layout(PROMPT) == expected
        # No text of a prompt becomes a role marker.
        marks = [i for i in expected.token_ids if i in SPECIAL.values()]
        assert marks == [2, 1, 3]


def test_the_server_renders_what_is_given(server: FakeServer) -> None:
    with open_engine(server) as engine:
        render = engine.tokenizer.apply_chat_template
        given = {"tokenize": False, "add_generation_prompt": True}
        message = {"role": "user", "content": "hi"}
        assert render([message], **given) == "<|user|>hi<|end|><|bot|>"
        tools: Any = {"tools": ["a tool"]}
        assert render([message], **given, **tools) == "<|user|>hi<|end|>a tool<|bot|>"


def test_texts_are_tokenised_once(server: FakeServer) -> None:
    documents = ["The mill was built.", "It burned down."]
    with open_engine(server) as engine:
        engine.layout(ChunkedPrompt(documents=documents, question="When?"))
        num_asked = len(server.paths)
        engine.layout(ChunkedPrompt(documents=documents[::-1], question="When?"))
        assert len(server.paths) == num_asked


@pytest.mark.parametrize("kind", ["folder", "file", "str", "object"])
def test_a_local_tokenizer_spares_the_server(
    server: FakeServer, expected: PromptLayout, tmp_path: Path, kind: str
) -> None:
    tokenizer: Any = LocalTokenizer()
    if kind != "object":
        folder = tokenizer_file(tmp_path)
        tokenizer = {
            "folder": folder,
            "file": folder / "tokenizer.json",
            "str": str(folder),
        }[kind]
    with open_engine(server, tokenizer=tokenizer) as engine:
        num_asked = server.paths.count("/tokenize")
        assert engine.layout(PROMPT) == expected
        assert server.paths.count("/tokenize") == num_asked


def test_another_model_s_tokenizer_is_refused(
    server: FakeServer, tmp_path: Path
) -> None:
    for tokenizer in (LocalTokenizer(shift=1), tokenizer_file(tmp_path, 11)):
        with pytest.raises(ConfigError, match="other ids than the server's for tiny"):
            open_engine(server, tokenizer=tokenizer)


def test_files_that_are_no_tokenizer(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(ConfigError, match=r"\.json cannot be read"):
            open_engine(server, tokenizer=path)


def test_a_file_needs_its_package(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        open_engine(server, tokenizer=tmp_path)


# ----------------------------------------------------------- servers without daric_rag


def test_a_plain_vllm_server_answers_and_the_counts_say_why(
    server: FakeServer,
) -> None:
    server.daric = False
    prompt = TokenPrompt([[20] * 30, [21] * 40, [22, 23]])
    with open_engine(server, tokenizer=LocalTokenizer()) as engine:
        done = engine.generate(prompt, max_tokens=5)
    assert done.text == "".join(TEXTS)
    assert done.reuse.reason.startswith("the server runs without daric_rag")
    assert "daric serve-command" in done.reuse.reason
    assert (done.reuse.prompt_tokens, done.reuse.gpu_prefix_tokens) == (72, 7)
    # Its prefix cache is exact: a salt would only keep prompts apart.
    assert "cache_salt" not in server.bodies[0]
    assert "kv_transfer_params" not in server.bodies[0]
    assert "x-daric-reuse" not in server.headers[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "pass tokenizer="),
        ({"tokenizer": "a/folder"}, "as an object"),
        (
            {"tokenizer": LocalTokenizer(), "config": DaricConfig(alignment="block")},
            'alignment="exact"',
        ),
    ],
)
def test_a_plain_vllm_server_cannot_tell_everything(
    server: FakeServer, options: Any, text: str
) -> None:
    server.daric = False
    with pytest.raises(ConfigError, match=text):
        open_engine(server, **options)


@pytest.mark.real_model
def test_a_model_s_file_gives_the_ids_that_transformers_gives(real_model: Path) -> None:
    from transformers import AutoTokenizer

    from daric_rag.runtime.remote_tokenizer import file_encoder

    theirs = AutoTokenizer.from_pretrained(real_model)
    encode_file = file_encoder(real_model)
    for text in (
        "The mill was built in 1832.\n\n",
        " two  spaces\tand a tab",
        "日本語 é 😀 <|im_end|> ''\"",
        "<|im_start|>user\nhi<|im_end|>\n",
        "",
    ):
        for flag in (False, True):
            assert encode_file(text, flag) == theirs.encode(
                text, add_special_tokens=flag
            )
