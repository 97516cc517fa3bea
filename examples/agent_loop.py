"""An agent that calls tools, turn by turn, over one growing conversation.

The descriptions of the tools, the tools' results and every earlier turn are chunks.
Each step of the loop sends the whole conversation again, as agents do, and computes
only what is new in it. Run it with

    python examples/agent_loop.py

The calls are scripted, because a model of 135M parameters cannot be relied upon to make
them, and they are written as text, because its chat template knows none: with a larger
model pass ``ChatPrompt(messages, tools=...)`` and ``ChatMessage(tool_calls=...)``.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from daric_rag import ChatMessage, ChatPrompt, DocumentPart, EmbeddedEngine

SYSTEM = "You plan trips to the island of Skerrow. Answer briefly. Your tools are:"
QUESTION = "Can I see seals on Saturday and be back in the evening?"

_REPORT = """Report of the warden of the northern beaches of Skerrow, {day}.
The hide on the cliff is open from nine to five. Wind from the west, four to five, sight
good. From the hide 212 grey seals were counted at low tide, most of them on the long
beach below the pines. Please keep to the marked path, take nothing with you from the
beach, and be back at the gate before the tide reaches the second post. The next report
follows at the same hour tomorrow."""

_TIMETABLE = """Timetable of the ferry Grey Heron, {day}.
From the mainland at 07:10, 09:30, 11:50, 14:10, 16:30 and 18:50. From Skerrow at 08:20,
10:40, 13:00, 15:20, 17:40 and 20:00. The crossing takes fifty minutes. Eighty
passengers and four cars are carried; tickets are sold on board. In storms above force
eight the ferry stays in harbour, and a bell is rung at noon."""


def seals(day: str) -> str:
    """Return the warden's report of a day: how many seals there are, and where."""
    return _REPORT.format(day=day)


def ferry(day: str) -> str:
    """Return the ferry's timetable of a day, in both directions."""
    return _TIMETABLE.format(day=day)


TOOLS: dict[str, Callable[[str], str]] = {"seals": seals, "ferry": ferry}
SCRIPT = (("seals", "Saturday"), ("ferry", "Saturday"))


def described(name: str) -> DocumentPart:
    """Return a tool's description, a chunk."""
    parameters = {"day": {"type": "string", "description": "A day of the week."}}
    tool = {"name": name, "description": TOOLS[name].__doc__, "parameters": parameters}
    return DocumentPart(json.dumps(tool), f"tool {name}")


def step(engine: EmbeddedEngine, messages: list[ChatMessage]) -> None:
    """Send the conversation, and say how much of it was not computed again."""
    prompt = ChatPrompt(messages)
    done = engine.generate(prompt, max_tokens=24, conversation="trip")
    print(
        f"{len(messages)} messages: {done.reuse.reused_tokens} of "
        f"{done.reuse.prompt_tokens} tokens reused, {done.ttft_s:.2f} s to the first "
        f"of the answer: {done.text.strip()!r}"
    )


def main() -> None:
    """Ask, call every tool of the script, and ask again behind each result."""
    messages = [
        ChatMessage("system", [SYSTEM, *(described(name) for name in TOOLS)]),
        ChatMessage("user", QUESTION),
    ]
    with EmbeddedEngine("smollm2-135m", store=":memory:") as engine:
        step(engine, messages)
        for name, day in SCRIPT:
            call = json.dumps({"name": name, "arguments": {"day": day}})
            result = DocumentPart(TOOLS[name](day), f"{name} on {day}")
            messages += [ChatMessage("assistant", call), ChatMessage("tool", [result])]
            step(engine, messages)


if __name__ == "__main__":
    main()
