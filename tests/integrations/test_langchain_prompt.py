"""Documents through LCEL: prompt template, chain, and pre-warming on retrieval."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from pydantic import ValidationError

from daric_rag import PromptBuilder, PromptTooLongError
from daric_rag.integrations.langchain import (
    ChatDaric,
    DaricPromptTemplate,
    PrewarmRetriever,
    create_daric_chain,
)
from tests.integrations.fakes import FakeEngine

BUILDER = PromptBuilder(system="Be brief.", document_template="{title}: {text}")
DOCUMENTS = [
    Document("Built in 1820.", metadata={"title": "Mill", "score": 0.9}),
    Document("It leaves at nine.", metadata={"title": "Ferry"}),
]


class Fixed(BaseRetriever):
    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        return DOCUMENTS if "mill" in query else DOCUMENTS[::-1]


def test_a_chain_asks_exactly_what_the_builder_builds() -> None:
    engine = FakeEngine("1820.")
    prompt = DaricPromptTemplate(builder=BUILDER)
    model = ChatDaric(engine=engine)
    sources: Any = {"documents": Fixed(), "question": RunnablePassthrough()}
    chain = sources | prompt | model
    assert chain.invoke("When was the mill built?").text == "1820."
    built = BUILDER.build(DOCUMENTS, "When was the mill built?").prompt
    asked = [message.parts() for message in engine.requests[0][0].messages]
    assert asked == [message.parts() for message in built.messages()]  # type: ignore[union-attr]


async def test_the_helper_returns_documents_and_answer() -> None:
    engine = FakeEngine("Nine.")
    prompt = DaricPromptTemplate(builder=BUILDER)
    chain = create_daric_chain(Fixed(), ChatDaric(engine=engine), prompt)
    done = chain.invoke("When does it leave?")
    assert done["documents"] == DOCUMENTS[::-1]
    assert done["answer"].usage_metadata["input_token_details"]["cache_read"] == 12
    history = [("human", "Hello."), ("ai", "Hello!")]
    done = await chain.ainvoke({"question": "When?", "history": history})
    assert done["question"] == "When?"
    roles = [message.role for message in engine.requests[-1][0].messages]
    assert roles == ["system", "user", "assistant", "user"]


def test_a_history_s_system_text_takes_the_place_of_the_builder_s() -> None:
    call = {"name": "f", "args": {}, "id": "1", "type": "tool_call"}
    history = [
        SystemMessage("Own."),
        HumanMessage("a"),
        AIMessage("", tool_calls=[call]),
    ]
    messages = DaricPromptTemplate(builder=BUILDER).format_messages(
        documents=[], question="b", history=history
    )
    assert messages == [*history, HumanMessage("b")]


async def test_counting_does_not_hold_up_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def count(messages: list[BaseMessage]) -> int:
        threads.append(threading.current_thread())
        return 1

    prompt = DaricPromptTemplate(max_prompt_tokens=9, count_tokens=count)
    given: Any = {"documents": DOCUMENTS, "question": "When?"}
    assert await prompt.ainvoke(given) == prompt.invoke(given)
    assert threads[0] is not threading.current_thread()


def test_documents_that_do_not_fit_are_dropped_and_named() -> None:
    model = ChatDaric(engine=FakeEngine())
    count = model.get_num_tokens_from_messages
    question = [SystemMessage("Be brief."), HumanMessage("When?")]
    # Of this engine a token is a character; a document's blank lines have none.
    first = len("Mill: Built in 1820.")
    prompt = DaricPromptTemplate(
        builder=BUILDER, max_prompt_tokens=count(question) + first, count_tokens=count
    )
    message = prompt.format_messages(documents=DOCUMENTS, question="When?")[-1]
    (dropped,) = message.additional_kwargs["dropped_documents"]
    assert (dropped["title"], dropped["reason"]) == ("Ferry", "max_prompt_tokens")
    assert [block["text"] for block in message.content] == [  # type: ignore[index]
        "Mill: Built in 1820.",
        "When?",
    ]
    model.invoke([message])
    prompt.max_prompt_tokens = 3
    with pytest.raises(PromptTooLongError):
        prompt.format_messages(documents=DOCUMENTS, question="When?")


@pytest.mark.parametrize(
    "fields", [{"max_prompt_tokens": 9}, {"builder": "a"}, {"system": "Be brief."}]
)
def test_a_template_that_cannot_be_used_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DaricPromptTemplate(**fields)


async def test_retrieved_documents_are_cached_as_the_prompt_writes_them() -> None:
    engine = FakeEngine()
    model = ChatDaric(engine=engine)
    queue = model.background_prewarm(BUILDER)
    retriever = PrewarmRetriever(retriever=Fixed(), queue=queue)
    assert retriever.invoke("mill") == DOCUMENTS
    assert await retriever.ainvoke("ferry") == DOCUMENTS[::-1]
    assert queue.flush(10)
    texts = [part.text for part in engine.prewarmed]
    assert texts == ["Mill: Built in 1820.", "Ferry: It leaves at nine."]
    model.close()
    assert retriever.invoke("mill") == DOCUMENTS
    assert queue.stats.num_dropped + queue.stats.num_known == 4
