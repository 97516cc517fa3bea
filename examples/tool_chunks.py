"""A chat with tools whose descriptions are cached, whichever of them are offered.

Every tool's description is a chunk of its own (the paper's figure 11b). So a question
that is offered other tools, or the same in another order, finds their KV in the store.
Run it with

    python examples/tool_chunks.py
"""

from __future__ import annotations

from collections.abc import Callable

from daric_rag.integrations.langchain import ChatDaric


def ferry_times(harbour: str, weekday: str) -> str:
    """Tell when ferries leave a harbour on a day of the week.

    Args:
        harbour: Name of the harbour, as it stands on the timetable.
        weekday: Day of the week, in English, such as Monday.
    """
    return f"From {harbour} on {weekday}: 7:15, 12:40, 18:05."


def weather(place: str) -> str:
    """Tell today's weather at a place: wind, rain and the height of the waves.

    Args:
        place: Name of a town, an island or a lighthouse.
    """
    return f"{place}: light wind from the west, no rain, waves of half a metre."


def tide(harbour: str) -> str:
    """Tell the times of high and low water in a harbour, for the next two days.

    Args:
        harbour: Name of the harbour, as it stands on the timetable.
    """
    return f"High water in {harbour}: 6:02 and 18:31."


def library_search(title: str) -> str:
    """Search the town library's catalogue for a book, and say whether it can be lent.

    Args:
        title: Title of the book, or the part of it that is known.
    """
    return f"{title}: one copy, on the shelf."


Tool = Callable[..., str]
QUESTIONS: tuple[tuple[str, list[Tool]], ...] = (
    ("When do ferries leave Skerrow on Friday?", [ferry_times, weather, tide]),
    ("What is the weather like in Gannet?", [tide, weather, library_search]),
    ("Is the book Moby Dick in the library?", [library_search, ferry_times, weather]),
)


def main() -> None:
    """Ask three questions with other tools each, and run what the model calls."""
    with ChatDaric(
        model="smollm2-135m",
        store=":memory:",
        config={"avg_chunk_budget": 8},
        max_tokens=64,
    ) as model:
        for question, tools in QUESTIONS:
            answer = model.bind_tools(tools, tool_choice="any").invoke(question)
            usage = answer.usage_metadata or {}
            print(
                f"{question}\n  {usage['input_token_details']['cache_read']} of "
                f"{usage['input_tokens']} tokens from the cache"
            )
            by_name = {tool.__name__: tool for tool in tools}
            for call in answer.tool_calls:
                arguments = ", ".join(f"{k}={v!r}" for k, v in call["args"].items())
                result = by_name[call["name"]](**call["args"])
                print(f"  {call['name']}({arguments}) -> {result}")


if __name__ == "__main__":
    main()
