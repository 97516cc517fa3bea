"""How vLLM names requests. Pure."""

from __future__ import annotations

__all__ = ["answer_request_id", "client_request_id", "served_request_id"]


def served_request_id(header: str) -> str:
    """Return what a server calls the request of a completion.

    Args:
        header: Its ``X-Request-Id``.
    """
    return f"cmpl-{header}-0"


def answer_request_id(request_id: str, index: int, num_answers: int) -> str:
    """Return the id of the request that draws one of several answers.

    Args:
        request_id: Of the request that asks for them.
        index: Which answer, counted from 0.
        num_answers: How many there are; a single one has the request's id.
    """
    return request_id if num_answers == 1 else f"{index}_{request_id}"


def client_request_id(request_id: str) -> str:
    """Return a request's id without the tail that vLLM makes it unique by."""
    return request_id.rpartition("-")[0]
