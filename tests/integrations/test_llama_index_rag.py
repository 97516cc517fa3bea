"""Synthesizer, query engine and pre-warming of LlamaIndex, on a fake engine."""

import asyncio
import pickle
from dataclasses import replace

import pytest
from llama_index.core import SummaryIndex
from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import ImageNode, NodeWithScore, QueryBundle, TextNode
from pydantic import BaseModel

from daric_rag import PromptBuilder
from daric_rag.engine import ChatPrompt, ChunkedPrompt, DocumentPart
from daric_rag.errors import ConfigError, EngineError, PromptTooLongError
from daric_rag.integrations.llama_index import (
    DaricLLM,
    DaricPrewarmPostprocessor,
    DaricPrewarmTransform,
    DaricQueryEngine,
    DaricSynthesizer,
)
from tests.integrations import fake_engine
from tests.integrations.fake_engine import DONE, FakeEngine

BUILDER = PromptBuilder(system="Be brief.", document_template="{title}\n{text}")


def node(name, score=None, text=None, **metadata):
    text = f"Text of {name}." if text is None else text
    metadata = {"title": f"Title {name}", "file_path": "/a", **metadata}
    return NodeWithScore(
        node=TextNode(id_=name, text=text, metadata=metadata), score=score
    )


NODES = [node("a", 0.9, last_accessed="today"), node("b", 0.3), node("c", 0.5)]


@pytest.fixture
def fake():
    return FakeEngine()


@pytest.fixture
def llm(fake):
    return DaricLLM(engine=fake, max_tokens=20)


@pytest.fixture
def index():
    return SummaryIndex([scored.node for scored in NODES])


def user_parts(fake, call=-1):
    return fake.asked[call][0].messages[-1].parts()


def tokens_of(prompt):
    """What a prompt says, in the form of a conversation."""
    messages = (
        prompt.messages() if isinstance(prompt, ChunkedPrompt) else prompt.messages
    )
    return [(message.role, message.parts()) for message in messages]


class Events(BaseEventHandler):
    seen: list

    def handle(self, event, **_):
        self.seen.append(event)


@pytest.fixture
def events():
    handler, root = Events(seen=[]), get_dispatcher()
    root.add_event_handler(handler)
    yield handler.seen
    root.event_handlers.remove(handler)


# ---------------------------------------------------------------------- synthesizer


async def test_the_prompt_is_the_builders(llm, fake):
    synthesizer = DaricSynthesizer(llm, builder=BUILDER)
    synthesizer.synthesize("Why?", NODES)
    await synthesizer.asynthesize(QueryBundle("Why?"), NODES)
    built = BUILDER.build(NODES, "Why?").prompt
    assert [tokens_of(prompt) for prompt, _ in fake.asked] == [tokens_of(built)] * 2
    assert isinstance(fake.asked[0][0], ChatPrompt)


def test_scores_and_metadata_stay_out_of_a_chunk(llm, fake):
    synthesizer = DaricSynthesizer(llm)
    for score, seen in ((0.9, "today"), (0.1, "tomorrow")):
        nodes = [node("a", score, last_accessed=seen, relevance=score)]
        synthesizer.synthesize("Why?", nodes)
    expected = (DocumentPart("Text of a.", "Title a"), "Why?")
    assert user_parts(fake, 0) == user_parts(fake, 1) == expected


@pytest.mark.parametrize(
    ("of_llm", "of_builder", "used"),
    [("L", None, "L"), ("L", "B", "B"), (None, "B", "B"), (None, None, None)],
)
def test_the_system_text(fake, of_llm, of_builder, used):
    llm = DaricLLM(engine=fake, system_prompt=of_llm)
    synthesizer = DaricSynthesizer(llm, builder=PromptBuilder(system=of_builder))
    assert synthesizer.builder.system == used
    synthesizer.synthesize("Why?", NODES)
    messages = tokens_of(fake.asked[0][0])
    assert messages[:-1] == ([] if used is None else [("system", (used,))])


async def test_nodes_that_do_not_fit_are_dropped_and_told(llm, fake):
    fake.max_model_len = 30  # 15 for the answer, 1 for the question, 3 a node
    nodes = [
        *NODES,
        node("d", 0.4),
        node("e", 0.8),
        node("a", 0.7),
        node("f", text=" "),
    ]
    nodes.append(node("g", 0.1))
    synthesizer = DaricSynthesizer(llm)
    for response in (
        synthesizer.synthesize("Why?", nodes),
        await synthesizer.asynthesize("Why?", nodes),
    ):
        report = response.metadata["daric"]
        assert report["kept"] == ["a", "c", "d", "e"]
        assert report["dropped"] == [
            {"node": "b", "title": "Title b", "reason": "max_prompt_tokens"},
            {"node": "a", "title": "Title a", "reason": "duplicate"},
            {"node": "f", "title": "Title f", "reason": "empty"},
            {"node": "g", "title": "Title g", "reason": "max_prompt_tokens"},
        ]
        assert response.source_nodes == nodes
    assert len(user_parts(fake)) == 5


def test_a_question_that_does_not_fit_is_refused(llm, fake):
    with pytest.raises(PromptTooLongError):
        DaricSynthesizer(llm).synthesize("word " * 90, NODES)
    assert fake.asked == []


async def test_responses(llm):
    plain = DaricSynthesizer(llm)
    streaming = DaricSynthesizer(llm, streaming=True)
    extra = [node("z")]
    found = [
        plain.synthesize("Why?", NODES, extra),
        await plain.asynthesize("Why?", NODES, extra),
        streaming.synthesize("Why?", NODES, extra),
        await streaming.asynthesize("Why?", NODES, extra),
    ]
    kinds = [Response, Response, StreamingResponse, AsyncStreamingResponse]
    assert [type(response) for response in found] == kinds
    assert [r.response for r in found[:2]] == [DONE.text] * 2
    # Before a stream is read there is nothing to tell of its answer.
    assert "usage" not in found[2].metadata["daric"]
    assert list(found[2].response_gen) == ["Two ", "words."]
    assert [text async for text in found[3].response_gen] == ["Two ", "words."]
    for response in found:
        assert response.source_nodes == NODES + extra
        assert response.metadata["a"]["title"] == "Title a"
        report = response.metadata["daric"]
        assert report["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
        assert report["reuse"]["hit_tokens"] == 4
        assert (report["finish_reason"], report["ttft_s"]) == ("stop", 0.5)


async def test_concurrent_calls_keep_their_reports_apart(fake):
    class Slow(FakeEngine):
        async def agenerate(self, prompt, **options):
            await asyncio.sleep(0.01)
            return self.generate(prompt, **options)

    synthesizer = DaricSynthesizer(DaricLLM(engine=Slow()))
    calls = [synthesizer.asynthesize("Why?", [node(str(i))]) for i in range(8)]
    for number, response in enumerate(await asyncio.gather(*calls)):
        assert response.metadata["daric"]["kept"] == [str(number)]


def test_without_nodes_nothing_is_asked(llm, fake):
    response = DaricSynthesizer(llm, empty_response="None.").synthesize("Why?", [])
    assert (response.response, fake.asked) == ("None.", [])


async def test_texts_may_be_given_directly(llm, fake):
    synthesizer = DaricSynthesizer(llm)
    assert synthesizer.get_response("Why?", ["One.", "Two."]) == DONE.text
    assert await synthesizer.aget_response("Why?", ["One.", "Two."]) == DONE.text
    expected = (DocumentPart("One.", "One."), DocumentPart("Two.", "Two."), "Why?")
    assert user_parts(fake, 0) == user_parts(fake, 1) == expected


def test_nodes_without_text_are_dropped(llm):
    image = NodeWithScore(node=ImageNode(id_="i", image="aGk="))
    response = DaricSynthesizer(llm).synthesize("Why?", [image, *NODES])
    (dropped,) = response.metadata["daric"]["dropped"]
    assert (dropped["node"], dropped["reason"]) == ("i", "empty")


def test_options_go_to_the_model(llm, fake):
    DaricSynthesizer(llm).synthesize("Why?", NODES, max_tokens=3, reuse="off")
    assert (fake.asked[0][1]["max_tokens"], fake.asked[0][1]["reuse"]) == (3, "off")
    for option in ({"top_q": 3}, {"max_tokens": "many"}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            DaricSynthesizer(llm).synthesize("Why?", NODES, **option)


class Town(BaseModel):
    name: str
    founded: int


async def test_answers_may_be_objects(llm, fake, index, monkeypatch):
    town = Town(name="Skerrow", founded=1204)
    monkeypatch.setattr(fake_engine, "DONE", replace(DONE, text=town.model_dump_json()))
    query_engine = DaricQueryEngine.from_index(index, llm, output_cls=Town)
    for response in (query_engine.query("Why?"), await query_engine.aquery("Why?")):
        assert isinstance(response, PydanticResponse)
        assert response.response == town
        assert response.metadata["daric"]["kept"] == ["a", "b", "c"]
        assert fake.asked[-1][1]["json_schema"] == Town.model_json_schema()


@pytest.mark.parametrize(
    ("finish_reason", "mend"), [("length", "raise max_tokens"), ("stop", "another way")]
)
def test_an_answer_that_is_no_object(llm, monkeypatch, finish_reason, mend):
    cut = replace(DONE, text='{"name": "Sk', finish_reason=finish_reason)
    monkeypatch.setattr(fake_engine, "DONE", cut)
    with pytest.raises(EngineError, match=f"is no Town .*{mend}"):
        DaricSynthesizer(llm, output_cls=Town).synthesize("Why?", NODES)


def test_objects_do_not_stream(llm):
    with pytest.raises(ConfigError, match="output_cls with streaming"):
        DaricSynthesizer(llm, output_cls=Town, streaming=True)


def test_another_model_or_template_is_refused(llm):
    with pytest.raises(ConfigError, match="needs a DaricLLM"):
        DaricSynthesizer(MockLLM())
    with pytest.raises(ConfigError, match="text_qa_template"):
        DaricSynthesizer(llm).update_prompts({"text_qa_template": None})


def test_making_one_opens_nothing():
    DaricSynthesizer(DaricLLM("no such model"))


def test_synthesis_events_have_the_report(llm, events):
    told = []

    class Told(BaseEventHandler):
        def handle(self, event, **_):
            if event.class_name() == "SynthesizeEndEvent":
                told.append(dict(event.response.metadata["daric"]))

    root = get_dispatcher()
    root.add_event_handler(Told())
    DaricSynthesizer(llm).synthesize("Why?", NODES)
    root.event_handlers.pop()
    assert told[0]["kept"] == ["a", "b", "c"]
    assert "usage" in told[0]
    names = ["SynthesizeStartEvent", "LLMChatStartEvent", "LLMChatEndEvent"]
    assert [e.class_name() for e in events] == [*names, "SynthesizeEndEvent"]


# --------------------------------------------------------------------- query engine


async def test_query_engines_of_every_form(llm, fake, index):
    synthesizer = DaricSynthesizer(llm, builder=BUILDER)
    forms = [
        index.as_query_engine(llm=llm, response_synthesizer=synthesizer),
        DaricQueryEngine(index.as_retriever(), synthesizer),
        DaricQueryEngine.from_retriever(index.as_retriever(), llm, builder=BUILDER),
        DaricQueryEngine.from_index(index, llm, builder=BUILDER),
    ]
    expected = tokens_of(BUILDER.build(NODES, "Why?").prompt)
    for form in forms:
        assert isinstance(form, RetrieverQueryEngine)
        for response in (form.query("Why?"), await form.aquery("Why?")):
            assert response.response == DONE.text
            assert [n.node_id for n in response.source_nodes] == ["a", "b", "c"]
            assert response.metadata["daric"]["kept"] == ["a", "b", "c"]
            assert tokens_of(fake.asked[-1][0]) == expected


async def test_query_engines_stream(llm, index):
    query_engine = DaricQueryEngine.from_index(index, llm, streaming=True)
    assert str(query_engine.query("Why?")) == DONE.text
    response = await query_engine.aquery("Why?")
    assert [text async for text in response.async_response_gen()] == ["Two ", "words."]


def test_postprocessors_of_a_query_engine(llm, index):
    only_good = SimilarityPostprocessor(similarity_cutoff=0.4)
    query_engine = DaricQueryEngine.from_index(
        index, llm, node_postprocessors=[only_good]
    )
    # A summary index gives no scores, so that none is good.
    assert query_engine.query("Why?").source_nodes == []


def test_a_query_engine_with_another_synthesizer_is_refused(llm, index):
    with pytest.raises(ConfigError, match="CompactAndRefine, which joins nodes"):
        DaricQueryEngine.from_args(index.as_retriever(), llm=llm)
    with pytest.raises(ConfigError, match="from_retriever"):
        DaricQueryEngine(index.as_retriever())


def test_query_events(llm, index, events):
    DaricQueryEngine.from_index(index, llm).query("Why?")
    names = [event.class_name() for event in events]
    assert names[0] == "QueryStartEvent"
    assert names[-1] == "QueryEndEvent"
    assert {"RetrievalStartEvent", "SynthesizeEndEvent", "LLMChatEndEvent"} <= {*names}


# ------------------------------------------------------------------------- pre-warm


def test_retrieved_nodes_are_cached_in_the_background(fake, index):
    llm = DaricLLM(engine=fake, namespace="tenant")
    prewarm = DaricPrewarmPostprocessor(llm=llm, builder=BUILDER)
    query_engine = DaricQueryEngine.from_index(
        index, llm, builder=BUILDER, node_postprocessors=[prewarm]
    )
    query_engine.query("Why?")
    query_engine.query("How?")
    assert prewarm.flush(10)
    assert {namespace for _, namespace in fake.warmed} == {"tenant"}
    # What is cached is what prompts hold.
    parts = [part for batch, _ in fake.warmed for part in batch]
    assert (*parts, "How?") == user_parts(fake)
    assert (prewarm.stats.num_computed, prewarm.stats.num_known) == (3, 3)
    prewarm.close()


async def test_pre_warming_never_fails_a_query(index):
    class Failing(FakeEngine):
        def prewarm(self, documents, **_):
            raise EngineError("broken")

    llm = DaricLLM(engine=Failing())
    prewarm = DaricPrewarmPostprocessor(llm=llm)
    query_engine = DaricQueryEngine.from_index(
        index, llm, node_postprocessors=[prewarm]
    )
    assert (await query_engine.aquery("Why?")).response == DONE.text
    assert prewarm.flush(10)
    assert prewarm.stats.num_failed == 3


async def test_nodes_are_cached_while_they_are_indexed(llm, fake):
    transform = DaricPrewarmTransform(llm=llm, builder=BUILDER)
    pipeline = IngestionPipeline(transformations=[transform])
    nodes = [scored.node for scored in NODES]
    assert pipeline.run(nodes=nodes) == nodes
    assert await transform.acall(nodes, show_progress=True) == nodes
    expected = BUILDER.document_parts(NODES)
    assert [parts for parts, _ in fake.warmed] == [expected] * 2


def test_many_nodes_are_cached_in_batches(llm, fake):
    nodes = [TextNode(text=f"Number {number}.") for number in range(150)]
    DaricPrewarmTransform(llm=llm)(nodes)
    assert [len(parts) for parts, _ in fake.warmed] == [64, 64, 22]


def test_a_pipelines_cache_tells_templates_and_stores_apart(llm):
    told = [
        DaricPrewarmTransform(llm=llm).to_dict(),
        DaricPrewarmTransform(llm=llm, builder=BUILDER).to_dict(),
        DaricPrewarmTransform(llm=DaricLLM("m", store="kv")).to_dict(),
    ]
    assert told[0] == DaricPrewarmTransform(llm=llm).to_dict()
    assert told[0] != told[1]
    assert told[0] != told[2]


def test_a_transform_stays_in_its_process(llm):
    with pytest.raises(TypeError, match="num_workers=1"):
        pickle.dumps(DaricPrewarmTransform(llm=llm))
