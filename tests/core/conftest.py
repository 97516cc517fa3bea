"""Tokenizers that several tests share."""

import copy

import pytest


@pytest.fixture(scope="session")
def tiny_tokenizer():
    pytest.importorskip("transformers")
    from tests.reference.tiny_tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(
        {"extra_special_tokens": ["<|start|>", "<|end|>", "<|eot|>"]},
        replace_extra_special_tokens=False,
    )
    return tokenizer


@pytest.fixture(scope="session")
def thinking_tokenizer(tiny_tokenizer):
    """The tags of reasoning are tokens, but not special ones, as in many models."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["<think>", "</think>", "<call>", "</call>"])
    return tokenizer


@pytest.fixture(scope="session")
def real_tokenizer(real_model):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(real_model)
