"""The client's contract: what is refused, what streams, what is released."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daric_rag import ChunkedPrompt, DaricConfig, EmbeddedEngine, TokenPrompt
from daric_rag.errors import (
    ConfigError,
    DaricError,
    ModelNotFoundError,
    PromptError,
    PromptTooLongError,
    StoreError,
    UnsupportedModelError,
    VllmVersionError,
)
from daric_rag.selection import total_len
from tests.reference.prompts import random_prompt
from tests.runtime.conftest import HarnessPool
from tests.runtime.harness import Harness

pytestmark = pytest.mark.engine

KIND = "llama-gqa-tied"
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 4096}
LENS = (40, 170, 300, 133, 21)
DOCUMENTS = [
    "The ferry to the island leaves at nine in the morning. " * 5,
    "Tickets are sold at the pier, and children under six travel free. " * 6,
    "In winter the last boat returns at four. " * 5,
]


@pytest.fixture
def harness(harness_of: HarnessPool) -> Harness:
    return harness_of(KIND)


@pytest.fixture
def engine(harness: Harness) -> EmbeddedEngine:
    return harness.engine


def prompt_of(seed: int) -> TokenPrompt:
    return TokenPrompt([list(c) for c in random_prompt(seed, LENS).chunks])


# ------------------------------------------------------------ bad prompts and options

BAD_PROMPTS = {
    "no chunk": lambda: TokenPrompt([]),
    "empty chunk": lambda: TokenPrompt([[17, 18], [], [19]]),
    "empty question": lambda: TokenPrompt([[17, 18], []]),
    "no token ids": lambda: TokenPrompt([["a", "b"]]),  # type: ignore[list-item]
    "negative id": lambda: TokenPrompt([[17], [-1]]),
    "id beyond the vocabulary": lambda: TokenPrompt([[17], [512]]),
    "no documents and no question": lambda: ChunkedPrompt(documents=[], question=""),
    "blank everything": lambda: ChunkedPrompt(documents=["", " "], question="\n"),
    "not a prompt": lambda: 7,
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
@pytest.mark.parametrize("reuse", ["daric", "off"])
def test_a_bad_prompt_is_refused_before_any_work(
    harness: Harness, name: str, reuse: str
) -> None:
    steps = len(harness.spy.plans)
    with pytest.raises(PromptError) as caught:
        harness.engine.generate(BAD_PROMPTS[name](), reuse=reuse, max_tokens=1)
    assert str(caught.value)
    assert len(harness.spy.plans) == steps


def test_a_too_long_prompt_says_by_how_much(harness: Harness) -> None:
    steps = len(harness.spy.plans)
    for call in (harness.engine.generate, harness.engine.stream):
        with pytest.raises(PromptTooLongError, match="at least 42 tokens") as caught:
            call(TokenPrompt([[17] * 4000, [18] * 137]), max_tokens=1)
        assert caught.value.excess == 42
    assert len(harness.spy.plans) == steps


def test_one_bad_prompt_of_a_batch_runs_none(harness: Harness) -> None:
    steps = len(harness.spy.plans)
    with pytest.raises(PromptError):
        harness.engine.generate_batch([prompt_of(1), TokenPrompt([[]])], max_tokens=1)
    assert len(harness.spy.plans) == steps


def test_the_longest_prompt_runs_and_ends_with_the_context(
    engine: EmbeddedEngine,
) -> None:
    lens = (1000, 2000, 1094)
    prompt = TokenPrompt([list(c) for c in random_prompt(2, lens).chunks])
    answer = engine.generate(prompt, max_tokens=50, ignore_eos=True)
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 4096 - 4094


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_token": 3}, "'max_token' is not a generation option.*max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": 5.0}, "temperature"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"stop": [""]}, "stop is"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 1000}, "1000"),
        ({"reuse": "on"}, "reuse is 'on'.*daric, full_reuse, off"),
        ({"conversation": ""}, "conversation is ''"),
    ],
)
def test_a_bad_generation_option_is_refused_before_any_work(
    harness: Harness, options: dict[str, Any], text: str
) -> None:
    steps = len(harness.spy.plans)
    with pytest.raises(ConfigError, match=text):
        harness.engine.generate(prompt_of(3), **options)
    assert len(harness.spy.plans) == steps


# -------------------------------------------------------------------- bad engines


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_modle_len": 64}, "'max_modle_len'.*did you mean 'max_model_len'"),
        ({"worker_cls": "x"}, "worker_cls is set by EmbeddedEngine"),
        ({"config": {"policy": "daric"}}, "config is a dict; pass a DaricConfig"),
    ],
)
def test_a_bad_engine_option_is_refused(
    engine: EmbeddedEngine, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        EmbeddedEngine(str(engine.model_path), store=":memory:", **options)


def test_a_missing_model_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model at"):
        EmbeddedEngine(str(tmp_path / "absent"), store=":memory:")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        EmbeddedEngine(str(tmp_path), store=":memory:")


def test_a_second_engine_is_refused_while_one_is_open(engine: EmbeddedEngine) -> None:
    with pytest.raises(ConfigError, match="another EmbeddedEngine is open"):
        EmbeddedEngine(str(engine.model_path), store=":memory:", **OPTIONS)
    # The refusal must not have taken the open one down, nor unlocked the process.
    assert engine.generate(prompt_of(4), max_tokens=1).token_ids
    with pytest.raises(ConfigError, match="another EmbeddedEngine is open"):
        EmbeddedEngine(str(engine.model_path), store=":memory:", **OPTIONS)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0"])
def test_another_vllm_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    from daric_rag.runtime.vllm_api import check_version

    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(VllmVersionError, match=r"pip install .*==0\.32\.\*"):
        check_version()


def test_a_missing_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from daric_rag.runtime.vllm_api import check_version

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(VllmVersionError, match="pip install"):
        check_version()


ROPE = {"rope_theta": 10_000.0}
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "sliding-window": (
        {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": 128,
        },
        "sliding-window",
    ),
    "dynamic rope": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **ROPE}},
        "RoPE type 'dynamic'",
    ),
    "longrope": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 16,
                "long_factor": [4.0] * 16,
                "original_max_position_embeddings": 1024,
                "factor": 4.0,
                **ROPE,
            },
        },
        "RoPE type 'longrope'",
    ),
}


@pytest.mark.usefixtures("no_engine")
def test_unsupported_models_are_refused_and_another_engine_starts(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    for name, (changes, reason) in UNSUPPORTED.items():
        folder = tmp_path / name.replace(" ", "_")
        shutil.copytree(tiny_model(KIND), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UnsupportedModelError, match=reason):
            EmbeddedEngine(str(folder), store=":memory:", **OPTIONS)
    with EmbeddedEngine(str(tiny_model(KIND)), store=":memory:", **OPTIONS) as engine:
        assert engine.generate(prompt_of(5), max_tokens=1).token_ids


@pytest.mark.usefixtures("no_engine")
def test_an_unusable_store_is_refused_before_vllm_starts(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from daric_rag.runtime import launch

    def started(*_: object, **__: object) -> None:
        raise AssertionError("vLLM was started")

    monkeypatch.setattr(launch, "EngineArgs", started)
    monkeypatch.setattr(launch, "_check_options", lambda options: None)
    (tmp_path / "file").write_text("a file, no folder")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("somebody's work")
    for store in (tmp_path / "file" / "store", tmp_path / "foreign"):
        with pytest.raises(StoreError, match="choose a"):
            EmbeddedEngine(str(tiny_model(KIND)), store=store, **OPTIONS)
    assert (tmp_path / "foreign" / "thesis.txt").exists()


@pytest.mark.usefixtures("no_engine")
def test_a_failed_start_leaves_the_process_able_to_start(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Failures behind vLLM's start: a tokenizer that block alignment cannot use."""
    folder = tmp_path / "no_eos"
    shutil.copytree(tiny_model(KIND), folder)
    for path in folder.glob("*token*.json"):
        entries = json.loads(path.read_text())
        entries.pop("eos_token", None)
        path.write_text(json.dumps(entries))
    block = DaricConfig(alignment="block")
    with pytest.raises(DaricError, match="exact"):
        EmbeddedEngine(str(folder), store=":memory:", config=block, **OPTIONS)
    with EmbeddedEngine(str(folder), store=":memory:", **OPTIONS) as engine:
        assert engine.generate(prompt_of(6), max_tokens=1).token_ids


# ------------------------------------------------------------------------- answers


def test_deltas_concatenate_to_the_completion(engine: EmbeddedEngine) -> None:
    prompt = ChunkedPrompt(documents=DOCUMENTS, question="When does it leave?")
    deltas = list(engine.stream(prompt, max_tokens=16, logprobs=2, ignore_eos=True))
    *early, last = deltas
    answer = last.completion
    assert answer is not None
    assert all(delta.completion is None for delta in early)
    assert len(early) > 3
    assert answer.text == "".join(delta.text for delta in deltas)
    assert answer.token_ids == sum((delta.token_ids for delta in deltas), ())
    assert answer.logprobs == sum((delta.logprobs or () for delta in deltas), ())
    assert len(answer.token_ids) == 16
    assert answer.text == engine.tokenizer.decode(answer.token_ids)
    assert answer.finish_reason == "length"
    assert answer.ttft_s > 0


def test_stop_strings_end_the_answer_and_are_cut(engine: EmbeddedEngine) -> None:
    prompt = prompt_of(7)
    whole = engine.generate(prompt, max_tokens=24, ignore_eos=True)
    assert whole.finish_reason == "length"
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    at = whole.text.index(stop)
    for given in (stop, ["never in there", stop]):
        answer = engine.generate(prompt, max_tokens=24, ignore_eos=True, stop=given)
        assert answer.finish_reason == "stop"
        assert answer.text == whole.text[:at]
        assert len(answer.token_ids) < 24
    deltas = list(engine.stream(prompt, max_tokens=24, ignore_eos=True, stop=stop))
    assert "".join(delta.text for delta in deltas) == whole.text[:at]


def test_seeds_reproduce_and_differ(engine: EmbeddedEngine) -> None:
    def sample(seed: int) -> tuple[int, ...]:
        options = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
        return engine.generate(prompt_of(8), seed=seed, **options).token_ids

    sample(0)  # From here on all come from the same cached blocks.
    drawn = [sample(seed) for seed in (1, 2, 1, 2)]
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


def test_logprobs_are_what_was_asked_for(engine: EmbeddedEngine) -> None:
    prompt, options = prompt_of(9), {"max_tokens": 3, "ignore_eos": True}
    assert engine.generate(prompt, **options).logprobs is None
    chosen = engine.generate(prompt, logprobs=0, **options)
    assert chosen.logprobs is not None
    assert [list(entry) for entry in chosen.logprobs] == [
        [token] for token in chosen.token_ids
    ]
    five = engine.generate(prompt, logprobs=5, **options)
    assert five.logprobs is not None
    for token, entry in zip(five.token_ids, five.logprobs, strict=True):
        assert len(entry) == 5  # Greedy: the chosen one is among the likeliest.
        assert entry[token] == max(entry.values()) <= 0


def test_finish_reason_stop_at_the_end_token(
    engine: EmbeddedEngine,
) -> None:
    """Sampled hot until the end token comes up."""
    options: dict[str, Any] = {"temperature": 2.0, "max_tokens": 400}
    eos = engine.tokenizer.eos_token_id
    answers = engine.generate_batch([prompt_of(10)] * 8, **options)
    stopped = [answer for answer in answers if answer.finish_reason == "stop"]
    assert stopped, "no sample ended; choose another prompt"
    for answer in answers:
        if answer.finish_reason == "stop":
            assert answer.token_ids[-1] == eos
            assert len(answer.token_ids) <= 400
        else:
            assert answer.finish_reason == "length"
            assert eos not in answer.token_ids


def test_layout_agrees_with_what_ran(harness: Harness) -> None:
    """Warm, so that nothing beside the recompute set is computed."""
    prompt = random_prompt(11, LENS)
    harness.run(prompt.chunks, max_tokens=1)
    harness.engine.clear_prefix_cache()
    answer, layout = harness.run(prompt.chunks)
    assert layout.token_ids == prompt.token_ids
    assert layout.spans == prompt.spans
    assert layout.padding_len == answer.reuse.padding_tokens == 0
    assert answer.reuse.prompt_tokens == layout.prompt_len == sum(LENS)
    assert answer.reuse.num_chunks == layout.num_chunks == len(LENS)
    assert answer.reuse.recomputed_tokens == layout.recompute_len
    assert answer.reuse.generated_tokens == 0
    assert answer.reuse.gpu_prefix_tokens == 0
    request = next(p for p in reversed(harness.spy.plans) if p.requests).requests[-1]
    ran = [*request.early_windows, (request.hit_len, layout.prompt_len)]
    assert tuple(ran) == layout.windows
    assert total_len(ran) == layout.recompute_len


def test_reuse_counts_add_up(harness: Harness) -> None:
    prompt = random_prompt(12, LENS)
    cold, layout = harness.run(prompt.chunks)
    assert cold.reuse.hit_tokens == cold.reuse.gpu_prefix_tokens == 0
    assert cold.reuse.reason
    assert cold.reuse.generated_tokens == sum(LENS[1:-1])
    assert cold.reuse.saved_tokens == sum(LENS[:-1])
    assert cold.reuse.recomputed_tokens == layout.recompute_len + LENS[0]
    assert cold.reuse.generation_s > 0
    harness.engine.clear_prefix_cache()
    warm, _ = harness.run(prompt.chunks)
    assert warm.reuse.contiguous_hit_tokens == sum(LENS[:-1])
    assert warm.reuse.disjoint_hit_tokens == warm.reuse.generated_tokens == 0
    assert warm.reuse.saved_tokens == 0
    assert warm.reuse.reason == ""
    assert warm.reuse.load_s > 0
    assert warm.reuse.recompute_s > 0
    off, _ = harness.run(prompt.chunks, reuse="off")
    assert off.reuse.hit_tokens == off.reuse.gpu_prefix_tokens == 0
    assert off.reuse.recomputed_tokens == sum(LENS)
    assert off.reuse.reason == 'reuse="off"'


def test_objects_with_text_are_documents(engine: EmbeddedEngine) -> None:
    class Page:
        page_content = DOCUMENTS[0]

    class Node:
        text = DOCUMENTS[1]

    question = "Who travels free?"
    plain = ChunkedPrompt(documents=DOCUMENTS[:2], question=question)
    objects = ChunkedPrompt(documents=[Page(), Node(), ""], question=question)
    assert engine.layout(objects) == engine.layout(plain)


# ------------------------------------------------------------------------- pre-warming


@pytest.mark.parametrize("alignment", ["exact", "block"])
def test_prewarmed_documents_are_hits(harness_of: HarnessPool, alignment: Any) -> None:
    harness = harness_of(KIND, config=DaricConfig(alignment=alignment))
    engine = harness.engine
    marked = [f"{alignment}: {text}" for text in DOCUMENTS]
    assert engine.prewarm([*marked, marked[0], ""]) == len(marked)
    assert engine.prewarm(marked) == 0
    engine.clear_prefix_cache()
    assert engine.prewarm(marked) == 0
    prompt = ChunkedPrompt(
        system="Answer briefly.", documents=marked[::-1], question="When?"
    )
    layout = engine.layout(prompt)
    answer = engine.generate(prompt, max_tokens=21, logprobs=20, ignore_eos=True)
    assert answer.reuse.generated_tokens == 0
    documents = layout.chunks[1:-1]
    assert len(documents) == len(marked)
    assert answer.reuse.hit_tokens == sum(c.end - c.start for c in documents)
    harness.check(answer, layout)
    if alignment == "block":
        assert layout.padding_len == answer.reuse.padding_tokens > 0
        assert all(chunk.end % engine.block_size == 0 for chunk in layout.chunks[:-1])


def test_prewarming_is_for_one_tenant(harness: Harness) -> None:
    texts = [f"For one tenant: {text}" for text in DOCUMENTS]
    prewarm = harness.engine.prewarm
    assert prewarm(texts, namespace="one") == len(texts)
    assert prewarm(texts, namespace="one") == 0
    assert prewarm(texts) == len(texts)


def test_prewarming_a_too_long_document_is_refused_before_any_work(
    harness: Harness,
) -> None:
    steps = len(harness.spy.plans)
    with pytest.raises(PromptTooLongError):
        harness.engine.prewarm(["A short one.", "Q7" * 5000])
    assert len(harness.spy.plans) == steps


# ---------------------------------------------------------------------------- memory


def resident_bytes() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


@pytest.mark.usefixtures("no_engine")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_close_releases_the_memory(tiny_model: Callable[[str], Path]) -> None:
    """While the caller still holds the engine object, as after a with block."""
    mib = 2**20
    before = resident_bytes()
    engine = EmbeddedEngine(
        str(tiny_model(KIND)),
        store=":memory:",
        kv_cache_memory_bytes=600 * mib,
        **OPTIONS,
    )

    def touch(worker: Any) -> None:
        for layer in worker.model_runner.kv_caches:
            layer.fill_(1)

    engine._loop.call(lambda vllm: vllm.collective_rpc(touch))
    engine.generate(prompt_of(13), max_tokens=1)
    assert resident_bytes() - before > 550 * mib, "the test does not see the cache"
    engine.close()
    assert resident_bytes() - before < 200 * mib
    engine.close()


def test_half_a_character_is_refused(engine: EmbeddedEngine) -> None:
    """Text decoded with surrogateescape, as from some PDFs."""
    for prompt, place in (
        (ChunkedPrompt(documents=["fine", "a\ud800b"], question="q"), "document 1"),
        (ChunkedPrompt(documents=["fine"], question="\udcff?"), "question"),
        (ChunkedPrompt(system="\udcff", question="q"), "system"),
    ):
        with pytest.raises(PromptError, match=f"{place} holds a lone surrogate"):
            engine.generate(prompt)


def test_a_forked_child_is_told(engine: EmbeddedEngine) -> None:
    """The engine's thread stays in the parent: a child must not wait for it."""
    pid = os.fork()
    if pid == 0:
        try:
            engine.generate(prompt_of(1))
        except DaricError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_stop_string_keeps_the_reuse_counts(engine: EmbeddedEngine) -> None:
    """vLLM's front end ends such a request without hearing its core's last words."""
    prompt = prompt_of(55)
    engine.generate(prompt, max_tokens=1)
    engine.clear_prefix_cache()
    whole = engine.generate(prompt, max_tokens=12, ignore_eos=True)
    engine.clear_prefix_cache()
    stop = whole.text.strip()[:2]
    stopped = engine.generate(prompt, max_tokens=12, ignore_eos=True, stop=stop)
    assert stopped.finish_reason == "stop"
    assert stopped.reuse.hit_tokens == whole.reuse.hit_tokens > 0
    assert stopped.reuse.recomputed_tokens == whole.reuse.recomputed_tokens
    assert stopped.reuse.recompute_s > 0
    assert stopped.reuse.reason == ""


@pytest.mark.usefixtures("no_engine")
def test_options_that_cannot_work_are_refused_at_once(
    tiny_model: Callable[[str], Path],
) -> None:
    """And leave the process able to start."""
    model = str(tiny_model(KIND))
    options: list[tuple[dict[str, Any], str]] = [
        ({"skip_tokenizer_init": True}, "skip_tokenizer_init is set by"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 2}, "needs at least 16"),
    ]
    for option, reason in options:
        with pytest.raises(ConfigError, match=reason):
            EmbeddedEngine(model, store=":memory:", **OPTIONS, **option)
    EmbeddedEngine(model, store=":memory:", **OPTIONS).close()


@pytest.mark.usefixtures("no_engine")
def test_a_start_that_fails_at_the_very_end_leaves_nothing(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once vLLM runs it has to be taken down again."""
    model = str(tiny_model(KIND))

    def fail(engine: Any) -> Any:
        raise ValueError("no tokenizer")

    with monkeypatch.context() as patch:
        patch.setattr("daric_rag.runtime.launch._facts", fail)
        with pytest.raises(ConfigError, match="no tokenizer"):
            EmbeddedEngine(model, store=":memory:", **OPTIONS)
    EmbeddedEngine(model, store=":memory:", **OPTIONS).close()
