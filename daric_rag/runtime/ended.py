"""Requests that ended: their counts for the client, and for the statistics."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daric_rag.runtime.metadata import RequestReport
from daric_rag.runtime.metrics import DaricStats
from daric_rag.runtime.request_ids import client_request_id
from daric_rag.runtime.tracking import TrackedRequest, answer_params, reuse_stats

__all__ = ["EndedRequests", "KeptAnswers"]

# A client in another process asks for counts some steps later, or never.
_MAX_ANSWERS = 1024


@dataclass(slots=True)
class _Closing:
    """A request that ended in the running step, whose last report may still come.

    Attributes:
        tracked: What is known of it.
        params: What vLLM was given to send to its client.
        is_counted: Whether it is in the statistics.
    """

    tracked: TrackedRequest
    params: dict[str, Any]
    is_counted: bool = False


class KeptAnswers:
    """What clients in another process may ask for, once, of requests that ended."""

    def __init__(self) -> None:
        self._params: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def add(self, req_id: str, params: dict[str, Any]) -> None:
        """Keep what a request's client is told; the oldest is given up for it."""
        self._params[req_id] = params
        if len(self._params) > _MAX_ANSWERS:
            self._params.popitem(last=False)

    def take(self, req_id: str) -> dict[str, Any] | None:
        """Return what was kept, if it was not long ago.

        Args:
            req_id: vLLM's own id of the request, or the one that its client gave.
        """
        if req_id not in self._params:
            made = (own for own in self._params if client_request_id(own) == req_id)
            req_id = next(made, req_id)
        return self._params.pop(req_id, None)


class EndedRequests:
    """Scheduler process. Completes what clients are told while vLLM holds it.

    vLLM asks for a request's counts before it hands over the report of the very step
    that finished the request, and sends them after that.

    Args:
        stats: Ended requests are counted there.
    """

    def __init__(self, stats: DaricStats) -> None:
        self._stats = stats
        self._closing: dict[str, _Closing] = {}
        self._answers = KeptAnswers()

    def add(self, req_id: str, tracked: TrackedRequest) -> dict[str, Any]:
        """Return what to tell the client; `take_reports` completes it in place."""
        params = answer_params(tracked)
        self._closing[req_id] = _Closing(tracked, params)
        self._answers.add(req_id, params)
        return params

    def take_reports(self, reports: Mapping[str, RequestReport]) -> None:
        """Learn what the step really took for requests that it ended."""
        for req_id, closing in self._closing.items():
            if req_id in reports:
                closing.tracked.report.add(reports[req_id])
            closing.params.update(answer_params(closing.tracked))

    def count(self) -> None:
        """Count requests that are not counted yet: no report is to come for them."""
        for closing in self._closing.values():
            if closing.is_counted:
                continue
            closing.is_counted = True
            tracked = closing.tracked
            if tracked.wire is None or tracked.reason:
                self._stats.add("refused_requests", 1)
                continue
            self._stats.add_request(
                reuse_stats(tracked),
                unread_tokens=tracked.report.unread_tokens,
                wait_s=tracked.wait_s,
            )

    def begin_step(self) -> dict[str, dict[str, Any]]:
        """No report of an earlier step is to come any more.

        Returns:
            What the clients of requests that ended since the last step are told.
        """
        self.count()
        told = {req_id: closing.params for req_id, closing in self._closing.items()}
        self._closing.clear()
        return told

    def take_answer(self, req_id: str) -> dict[str, Any] | None:
        """Return what `add` returned; see `KeptAnswers.take`."""
        return self._answers.take(req_id)
