"""A remote engine on a real server, held against an embedded engine on the same store.

The server is started once for all tests here, by the command that is printed for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from daric_rag import (
    AuthenticationError,
    ChatMessage,
    ChatPrompt,
    ChunkedPrompt,
    Completion,
    ConfigError,
    DocumentPart,
    EmbeddedEngine,
    RemoteEngine,
    TokenPrompt,
    cli,
)
from daric_rag.engine import Prompt
from daric_rag.layout import PromptLayout
from tests.runtime.harness import QUESTION
from tests.runtime.served import KEY, serving

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

KIND = "llama-gqa-tied"
A, B, C, D = (list(range(first, first + 96)) for first in (20, 120, 220, 320))
TEXTS = ["The mill <|im_end|> was built. " * 4, "日本 é 😀 " * 9]

PROMPTS: dict[str, Prompt] = {
    "in order": TokenPrompt([A, B, C, list(QUESTION)]),
    "reordered": TokenPrompt([C, A, B, list(QUESTION)]),
    "a hole": TokenPrompt([B, D, A, list(QUESTION)]),
    "texts": ChunkedPrompt(system="Be brief.", documents=TEXTS, question="Whose?"),
    "a conversation": ChatPrompt(
        [
            ChatMessage("system", "Be brief."),
            ChatMessage("user", [DocumentPart(TEXTS[1]), "What <|im_start|> is it?"]),
            ChatMessage("assistant", "A mill. " * 8),
            ChatMessage("user", "Whose?"),
        ]
    ),
}
OPTIONS: dict[str, Any] = {"max_tokens": 12, "logprobs": 3, "ignore_eos": True}


@dataclass(frozen=True)
class Expected:
    """What an embedded engine made of every prompt."""

    layouts: dict[str, PromptLayout]
    answers: dict[str, Completion]


@dataclass(frozen=True)
class Served:
    """A running server and what to expect of it."""

    url: str
    expected: Expected

    def open(self, **options: Any) -> RemoteEngine:
        return RemoteEngine(self.url, **{"api_key": KEY} | options)

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def embedded_answers(model: Path, store: Path) -> Expected:
    """Answers from a store that has A, B, C and the texts, and not D.

    The store is left without D for the server, which then finds what this process
    computed.
    """
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024}
    layouts, answers = {}, {}
    with EmbeddedEngine(str(model), store=store, **options) as engine:
        for chunk in (A, B, C):
            engine.generate(TokenPrompt([chunk, list(QUESTION)]), max_tokens=1)
        for name in ("texts", "a conversation"):
            engine.generate(PROMPTS[name], max_tokens=1)
        for name, prompt in PROMPTS.items():
            engine.clear_prefix_cache()
            layouts[name] = engine.layout(prompt)
            if name != "a hole":
                answers[name] = engine.generate(prompt, **OPTIONS)
        engine.flush()
    with EmbeddedEngine(str(model), store=":memory:", **options) as engine:
        for chunk in (A, B):
            engine.generate(TokenPrompt([chunk, list(QUESTION)]), max_tokens=1)
        answers["a hole"] = engine.generate(PROMPTS["a hole"], **OPTIONS)
    return Expected(layouts, answers)


@pytest.fixture(scope="module")
def served(
    tiny_model: Callable[[str | Path], Path],
    harness_of: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    harness_of.close()
    folder = tmp_path_factory.mktemp("served")
    model = tiny_model(KIND)
    expected = embedded_answers(model, folder / "store")
    options = ("--dtype=float32", "--max-model-len=1024")
    memory = f"--kv-cache-memory-bytes={64 << 20}"
    with serving(
        model, folder / "store", folder / "log", *options, memory, "--max-num-seqs=16"
    ) as url:
        yield Served(url, expected)


@pytest.fixture(scope="module")
def engine(served: Served) -> Iterator[RemoteEngine]:
    with served.open() as engine:
        yield engine


@pytest.mark.parametrize("name", PROMPTS)
def test_answers_and_counts_are_an_embedded_engine_s(
    served: Served, engine: RemoteEngine, name: str
) -> None:
    """The first request of every prompt: nothing is in the prefix cache yet."""
    expected = served.expected.answers[name]
    assert engine.layout(PROMPTS[name]) == served.expected.layouts[name]
    done = engine.generate(PROMPTS[name], **OPTIONS)
    assert done.token_ids == expected.token_ids
    assert (done.text, done.finish_reason) == (expected.text, expected.finish_reason)
    assert done.logprobs is not None
    assert expected.logprobs is not None
    for mine, theirs in zip(done.logprobs, expected.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    counts, wanted = asdict(done.reuse), asdict(expected.reuse)
    times = ("load_s", "generation_s", "recompute_s")
    assert [counts.pop(time) > 0 for time in times] == [
        wanted.pop(time) > 0 for time in times
    ]
    assert counts == wanted
    assert done.reuse.hit_tokens > 0


def test_streams_stops_and_traces(served: Served, engine: RemoteEngine) -> None:
    prompt = PROMPTS["in order"]
    whole = served.expected.answers["in order"]
    deltas = list(engine.stream(prompt, **OPTIONS))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert sum((delta.token_ids for delta in deltas), ()) == whole.token_ids
    assert len(deltas) > 3
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 2]
    stopped = engine.generate(prompt, **OPTIONS, stop=stop, trace=True)
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(stop)]
    # The front end saw the stop string, and the engine alone knows the counts.
    assert stopped.reuse.prompt_tokens == whole.reuse.prompt_tokens
    assert stopped.reuse.gpu_prefix_tokens > 0
    assert stopped.trace is not None
    assert [chunk.end for chunk in stopped.trace.chunks] == [96, 192, 288, 293]


def test_several_answers_are_drawn_as_single_ones_would_be(
    engine: RemoteEngine,
) -> None:
    options = OPTIONS | {"temperature": 1.5}
    prompt = PROMPTS["reordered"]
    done = engine.generate(prompt, n=3, seed=4, **options)
    assert [answer.token_ids for answer in done.answers] == [
        engine.generate(prompt, seed=seed, **options).token_ids for seed in (4, 5, 6)
    ]
    for answer in done.answers:
        assert answer.reuse.reason == ""
        assert answer.reuse.prompt_tokens == 293
    with pytest.raises(ConfigError, match="--scheduling-policy=priority"):
        engine.generate(prompt, priority=1)


def test_ordinary_requests_share_the_prefix_cache(engine: RemoteEngine) -> None:
    prompt = PROMPTS["in order"]
    first, second = (engine.generate(prompt, reuse="off", **OPTIONS) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.reuse.gpu_prefix_tokens == 0
    assert second.reuse.gpu_prefix_tokens == 288  # whole blocks of 32


async def test_concurrent_requests_have_their_own_answers(
    served: Served, engine: RemoteEngine
) -> None:
    async def tokens(name: str) -> tuple[int, ...]:
        ids: tuple[int, ...] = ()
        async for delta in engine.astream(PROMPTS[name], **OPTIONS):
            ids += delta.token_ids
        return ids

    names = [*PROMPTS] * 3
    answers = await asyncio.gather(*map(tokens, names))
    assert [served.expected.answers[name].token_ids for name in names] == answers


def test_prewarming_computes_what_is_new(engine: RemoteEngine) -> None:
    documents = ["A text of its own. " * 6, TEXTS[0]]
    assert engine.prewarm(documents) == 1
    assert engine.prewarm(documents) == 0
    prompt = ChunkedPrompt(documents=documents[::-1], question="Whose?")
    assert engine.generate(prompt, max_tokens=1).reuse.generated_tokens == 0


def test_a_prewarm_job_has_the_server_compute(
    served: Served, engine: RemoteEngine, tmp_path: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    texts = [f"Report {n} of the harbour. " * 5 for n in range(6)]
    for number, text in enumerate(texts):
        (tmp_path / "corpus" / f"{number}.txt").write_text(text)
    manifest = tmp_path / "m.jsonl"
    options = ["--url", served.url, "--manifest", str(manifest), "--json"]
    arguments = ["prewarm", str(tmp_path / "corpus"), *options]
    environment = {"VLLM_API_KEY": KEY}
    for computed, known in ((6, 0), (0, 6)):
        done = CliRunner().invoke(cli.app, arguments, env=environment)
        assert done.exit_code == 0, done.output
        totals = json.loads(done.stdout)
        assert (totals["computed"], totals["known"]) == (computed, known)
    prompt = ChunkedPrompt(documents=texts[::-1], question="Whose?")
    reuse = engine.generate(prompt, max_tokens=1).reuse
    assert reuse.generated_tokens == 0
    assert reuse.hit_tokens > 0.8 * reuse.prompt_tokens


def test_frameworks_answer_as_their_engine_does(
    served: Served, engine: RemoteEngine
) -> None:
    langchain = pytest.importorskip("daric_rag.integrations.langchain")
    llama_index = pytest.importorskip("daric_rag.integrations.llama_index")
    blocks = pytest.importorskip("llama_index.core.llms")
    own = ChatPrompt([ChatMessage("user", [DocumentPart(TEXTS[1]), "Whose?"])])
    expected = engine.generate(own, max_tokens=12, ignore_eos=True).text
    options = {"max_tokens": 12, "base_url": served.url, "api_key": KEY}
    with langchain.ChatDaric(**options) as chat:
        message = ("user", [langchain.document_block(TEXTS[1]), "Whose?"])
        assert chat.invoke([message], ignore_eos=True).text == expected
    with llama_index.DaricLLM(**options) as llm:
        document = blocks.DocumentBlock(data=TEXTS[1].encode(), title="")
        text = blocks.TextBlock(text="Whose?")
        messages = [blocks.ChatMessage(role="user", blocks=[document, text])]
        assert llm.chat(messages, ignore_eos=True).message.content == expected
        pieces = llm.stream_chat(messages, ignore_eos=True)
        assert "".join(piece.delta for piece in pieces) == expected


def test_an_abandoned_answer_is_aborted(served: Served, engine: RemoteEngine) -> None:
    generated = "vllm:generation_tokens_total"
    before = served.metric(generated)
    stream = engine.stream(PROMPTS["in order"], max_tokens=700, ignore_eos=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    last = -1.0
    while last != (last := served.metric(generated)):
        time.sleep(0.5)
    assert last - before < 400
    # The gauges are those of the last step.
    engine.generate(PROMPTS["in order"], max_tokens=1)
    assert served.metric("vllm:num_requests_running") == 0


def test_what_the_server_refuses(served: Served, engine: RemoteEngine) -> None:
    with pytest.raises(AuthenticationError, match="api_key="):
        served.open(api_key="another-key")
    with pytest.raises(ConfigError, match="logprobs"):
        engine.generate(PROMPTS["in order"], logprobs=400)
    assert engine.generate(PROMPTS["in order"], max_tokens=1).token_ids


def test_the_server_counts_for_prometheus(served: Served) -> None:
    assert served.metric("vllm:daric_requests_total") >= 4
    assert served.metric("vllm:daric_hit_tokens_total") > 0
    assert served.metric("vllm:daric_refused_requests_total") == 0
