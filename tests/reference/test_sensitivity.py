"""Wrong references must be told from the right one, on every tiny model.

If one of these tests fails, the tiny models no longer notice that kind of fault, and a
runtime test that passes on them says nothing.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.reference.dense import DenseReference
from tests.reference.outputs import KVCache, Prefill
from tests.reference.prompts import Prompt, head_windows, random_chunks, random_prompt
from tests.reference.tiny_models import KINDS, build
from tests.reference.tiny_tokenizer import EOS_ID, SPECIAL_TOKENS, VOCAB_SIZE

LENS = (19, 61, 35, 77, 23)
NOTICED = 0.02
"""Log-probability error (nats) of a fault; runtimes are held to 1e-4."""

Load = Callable[[str], DenseReference]


class WrongSign(DenseReference):
    """Re-encodes the wrong way."""

    def reencode(
        self, keys: Tensor, delta: int, angle_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Moves by `-delta`."""
        return super().reencode(keys, -delta, angle_dtype)


class OffByOne(DenseReference):
    """Re-encodes to the next position."""

    def reencode(
        self, keys: Tensor, delta: int, angle_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Moves by `delta + 1` unless the chunk stays where it is."""
        return super().reencode(keys, delta + (delta > 0), angle_dtype)


class ScaledTwice(DenseReference):
    """Applies the attention scaling again when re-encoding."""

    def reencode(
        self, keys: Tensor, delta: int, angle_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Rotates and scales."""
        return super().reencode(keys, delta, angle_dtype) * self.attention_scaling


class StaleWindows(DenseReference):
    """Recomputes only the last window over a cache whose windows stay stale."""

    def daric_prefill(
        self,
        token_ids: tuple[int, ...],  # type: ignore[override]
        spans: tuple[tuple[int, int], ...],  # type: ignore[override]
        windows: tuple[tuple[int, int], ...],  # type: ignore[override]
    ) -> Prefill:
        """Drops all windows but the last."""
        return super().daric_prefill(token_ids, spans, windows[-1:])


class SwappedLayers(DenseReference):
    """Loads the cached layers in the wrong order."""

    def chunk_kv(self, token_ids: tuple[int, ...]) -> KVCache:  # type: ignore[override]
        """Reverses the layers."""
        cache = super().chunk_kv(token_ids)
        return KVCache(cache.keys.flip(0), cache.values.flip(0))


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    """Five chunks, 215 tokens."""
    return random_prompt(11, LENS)


def error(actual: Prefill, expected: Prefill) -> float:
    """Largest difference in log-probability."""
    return float((actual.logprobs - expected.logprobs).abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [WrongSign, OffByOne, StaleWindows, SwappedLayers])
def test_faults_show(
    tiny_reference: Load, prompt: Prompt, kind: str, fault: type[DenseReference]
) -> None:
    right = tiny_reference(kind)
    args = prompt.token_ids, prompt.spans, head_windows(prompt, head_len=8)
    wrong = fault(right.model).daric_prefill(*args)
    assert error(wrong, right.daric_prefill(*args)) > NOTICED


def test_scaling_twice_shows(tiny_reference: Load, prompt: Prompt) -> None:
    right = tiny_reference("llama-rope-yarn")
    assert right.attention_scaling == pytest.approx(1.1386, abs=1e-4)
    args = prompt.token_ids, prompt.spans, head_windows(prompt, head_len=8)
    wrong = ScaledTwice(right.model).daric_prefill(*args)
    assert error(wrong, right.daric_prefill(*args)) > NOTICED


@pytest.mark.parametrize("kind", KINDS)
def test_reuse_is_not_full_prefill(
    tiny_reference: Load, prompt: Prompt, kind: str
) -> None:
    reference = tiny_reference(kind)
    windows = head_windows(prompt, head_len=0)
    reuse = reference.daric_prefill(prompt.token_ids, prompt.spans, windows)
    assert error(reuse, reference.full_prefill(prompt.token_ids)) > NOTICED


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_counts(tiny_reference: Load, prompt: Prompt, kind: str) -> None:
    """Another document, another distribution; and other words follow."""
    reference = tiny_reference(kind)
    expected = reference.full_greedy(prompt.token_ids, 8)
    continuations = {expected.token_ids}
    for index in range(1, len(LENS) - 1):
        (other,) = random_chunks(100 + index, LENS[index : index + 1], VOCAB_SIZE)
        changed = prompt.replaced(index, other)
        actual = reference.full_greedy(changed.token_ids, 8)
        assert (actual.logprobs[0] - expected.logprobs[0]).abs().max() > NOTICED
        continuations.add(actual.token_ids)
    assert len(continuations) == len(LENS) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_choices_are_clear(
    tiny_reference: Load, prompt: Prompt, kind: str
) -> None:
    greedy = tiny_reference(kind).greedy(
        prompt.token_ids, prompt.spans, head_windows(prompt, head_len=8), 16
    )
    assert greedy.margins.median() > 0.1
    assert greedy.margins.min() > 1e-3, "ten times the tolerance of log-probabilities"
    assert len(set(greedy.token_ids)) > 3
    entropy = -(greedy.logprobs.exp() * greedy.logprobs).sum(-1)
    assert entropy.max() < 0.85 * torch.log(torch.tensor(float(VOCAB_SIZE)))


def test_build_is_seeded_and_idempotent(tiny_root: Path, tmp_path: Path) -> None:
    first = build("qwen2", tiny_root)
    weights = (first / "model.safetensors").read_bytes()
    assert build("qwen2", tiny_root) == first
    assert (build("qwen2", tmp_path) / "model.safetensors").read_bytes() == weights
    other = build("qwen2", tmp_path, seed=1)
    assert (other / "model.safetensors").read_bytes() != weights
    with pytest.raises(KeyError):
        build("gpt2", tmp_path)


def test_tokenizer(tiny_root: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build("llama-mha", tiny_root))
    assert len(tokenizer) == VOCAB_SIZE
    text = "Where does the river rise?\n  Ünïcode, 東京 <|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == EOS_ID
    assert tokenizer.convert_ids_to_tokens([*range(5)]) == list(SPECIAL_TOKENS)
    joined = tokenizer.encode("the sun") + tokenizer.encode("set")
    assert joined != tokenizer.encode("the sunset"), "boundaries should matter"
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
