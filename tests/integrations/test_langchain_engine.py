"""ChatDaric on the real small model: what is reused, and the same answers remotely."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel

from daric_rag.data import load_demo_sets
from daric_rag.integrations.langchain import (
    ChatDaric,
    DaricPromptTemplate,
    PromptBuilder,
    create_daric_chain,
    document_block,
)
from tests.runtime.served import KEY, serving

pytestmark = [pytest.mark.engine, pytest.mark.real_model, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
RECORD = load_demo_sets()["town_archive"][0]
DOCUMENTS = [Document(text) for text in RECORD.chunks]
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 4096}
SERVER = ("--dtype=float32", "--max-model-len=4096", "--max-num-seqs=16")


class Weather(BaseModel):
    """Tells the weather at a place."""

    place: str


BLOCKS: list[Any] = [document_block(RECORD.chunks[0]), RECORD.question]
ASKED: dict[str, Any] = {
    "a chat": [
        SystemMessage("Be brief."),
        HumanMessage("Hello."),
        AIMessage("Hello!"),
        HumanMessage("What is the capital of France?"),
    ],
    "a document": [HumanMessage(BLOCKS)],
    "a tool": [HumanMessage("What is the weather in Paris?")],
    "a schema": [HumanMessage("What is the weather in Paris? Say the place.")],
}


def answers(chat: ChatDaric) -> dict[str, tuple[Any, ...]]:
    """What is to be equal, of every question and of one of them streamed."""
    told: dict[str, tuple[Any, ...]] = {}
    for name, messages in ASKED.items():
        asked: Any = chat.bind(stop=["\n\n"])
        if name == "a tool":
            asked = chat.bind_tools([Weather], tool_choice="any")
        elif name == "a schema":
            asked = chat.bind(json_schema=Weather.model_json_schema())
        answer = asked.invoke(messages)
        usage = answer.usage_metadata
        told[name] = (
            answer.text,
            [(call["name"], call["args"]) for call in answer.tool_calls],
            usage["input_tokens"],
            usage["output_tokens"],
            answer.response_metadata["finish_reason"],
        )
    told["a stream"] = tuple(chunk.text for chunk in chat.stream(ASKED["a chat"]))
    return told


@pytest.fixture
def embedded(real_model: Path) -> Iterator[ChatDaric]:
    fields: dict[str, Any] = {"store": ":memory:", "engine_options": ENGINE}
    with ChatDaric(model=str(real_model), max_tokens=48, **fields) as chat:
        yield chat


def test_three_questions_over_overlapping_documents(embedded: ChatDaric) -> None:
    """From the second one on, > 80 % of the documents' tokens are not computed."""
    builder = PromptBuilder(system=RECORD.system)
    orders = ([0, 1, 2, 3, 4, 5], [4, 2, 5, 0], [3, 5, 1, 2, 0])
    found = iter([[DOCUMENTS[index] for index in order] for order in orders])
    retriever = RunnableLambda(lambda question: next(found))
    prompt = DaricPromptTemplate(builder=builder)
    chain = create_daric_chain(retriever, embedded, prompt)
    shares = []
    for question in (RECORD.question, "Who kept the light?", "When was it built?"):
        done = chain.invoke(question)
        usage = done["answer"].usage_metadata
        bare = prompt.format_messages(documents=[], question=question)
        num_others = embedded.get_num_tokens_from_messages(bare)
        num_documents = usage["input_tokens"] - num_others
        # Whatever else was reused is not a document's.
        reused = usage["input_token_details"]["cache_read"] - num_others
        shares.append(reused / num_documents)
    print(f"reused shares of document tokens: {shares}")
    assert shares[0] < 0.2
    assert min(shares[1:]) > 0.8


def test_pre_warmed_documents_are_hits(embedded: ChatDaric) -> None:
    queue = embedded.background_prewarm()
    queue.submit(DOCUMENTS[:2])
    assert queue.flush(60)
    assert queue.stats.num_computed == 2
    message = DaricPromptTemplate().format_messages(
        documents=DOCUMENTS[1::-1], question="Who?"
    )
    reuse = embedded.invoke(message).response_metadata["reuse"]
    assert reuse["generated_tokens"] == 0
    assert reuse["contiguous_hit_tokens"] + reuse["disjoint_hit_tokens"] > 200


def test_a_server_gives_the_same_answers(
    real_model: Path, embedded: ChatDaric, tmp_path: Path
) -> None:
    expected = answers(embedded)
    embedded.close()
    assert expected["a tool"][1][0][0] == "Weather"
    memory = f"--kv-cache-memory-bytes={512 << 20}"
    with (
        serving(
            real_model, tmp_path / "store", tmp_path / "log", *SERVER, memory
        ) as url,
        ChatDaric(base_url=url, api_key=KEY, max_tokens=48) as remote,  # type: ignore[arg-type]
    ):
        assert answers(remote) == expected


@pytest.mark.parametrize("name", ["langchain_rag.py", "tool_chunks.py"])
def test_examples_run(name: str, real_model: Path) -> None:
    """As they are; `real_model` has seen to the model's conversion."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if "from the cache" in line]
    cached = [int(line.split()[0]) for line in told]
    assert len(cached) == 3
    assert cached[1] > 0
    assert cached[2] > 0
