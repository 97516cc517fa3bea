"""Bytes of a server's stream to events."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.config import DaricConfig
from daric_rag.generation import GenerationOptions
from daric_rag.layout import build_layout
from daric_rag.runtime.remote_errors import ServerErrors
from daric_rag.runtime.remote_wire import AnswerReader, EventDecoder
from daric_rag.runtime.request_stream import Submission

TEXTS = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="\r\n")
)


@given(
    st.lists(TEXTS.filter(bool), max_size=5),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.data(),
)
def test_events_do_not_depend_on_where_the_stream_is_cut(
    texts: list[str], newline: bytes, spaced: bool, data: st.DataObject
) -> None:
    start = b"data: " if spaced else b"data:"
    # Without a space behind the colon a text's own one would be taken for it.
    texts = texts if spaced else [text.lstrip(" ") or "x" for text in texts]
    stream = b"".join(
        b": comment" + newline + start + text.encode() + newline * 2 for text in texts
    )
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=9).map(sorted))
    decoder = EventDecoder()
    seen: list[str] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        seen += decoder.feed(stream[begin:end])
    assert seen == texts


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b"event: x\nid: 5\ndata: a\n\n", ["a"]),
        (b"retry: 5\n\n: nothing\n\n", []),
        (b"data: a\n\ndata: cut off\n", ["a"]),
        (b"data: \xff\n\n", ["�"]),
    ],
)
def test_what_is_an_event(stream: bytes, events: list[str]) -> None:
    assert list(EventDecoder().feed(stream)) == events


def test_an_answer_ends_once() -> None:
    layout = build_layout(
        [[1, 2]], config=DaricConfig(), block_size=16, pad_token_id=0, reusable=[True]
    )
    submission = Submission(layout, None, GenerationOptions())
    reader = AnswerReader(submission, ServerErrors("http://server", 1.0), "unknown")
    choice = {"index": 0, "text": "a", "token_ids": [3], "finish_reason": "stop"}
    assert [o.finished for o in reader.take(json.dumps({"choices": [choice]}))] == [0]
    assert [output.finished for output in reader.take("[DONE]")] == [1]
    for late in ("[DONE]", "no JSON", json.dumps({"choices": [choice]})):
        assert list(reader.take(late)) == []
    assert list(reader.end()) == []


def test_a_client_needs_neither_torch_nor_vllm_nor_transformers() -> None:
    code = """
import sys
for name in ("torch", "vllm", "transformers", "tokenizers", "numpy", "diskcache",
             "jinja2", "fastapi", "starlette"):
    sys.modules[name] = None  # importing it raises ImportError
from daric_rag import ChunkedPrompt, RemoteEngine
from tests.remote.fake_server import KEY, FakeServer
with RemoteEngine("http://server", api_key=KEY, transport=FakeServer()) as engine:
    print(engine.generate(ChunkedPrompt(documents=["d"], question="q")).token_ids)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "(11, 12, 13, 14, 15)\n", done.stderr
