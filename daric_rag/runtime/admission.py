"""Who may start in this step, so that steps stay short and nobody is overtaken."""

from __future__ import annotations

__all__ = ["Admission"]

# A step computes at most this part of a pass before vLLM's own one.
_STEP_SHARE = 4


class Admission:
    """Scheduler process. Counts what vLLM's token budget does not see.

    What a request needs before its last window is computed by the worker side, beside
    whatever vLLM scheduled. Little of it goes into the admitting step, which it makes
    longer for everybody. Requests that need more wait while it is done over several
    steps, and only about a pass's worth of them is let in: they hold blocks meanwhile.

    Args:
        pass_len: Most tokens of one forward pass.
    """

    def __init__(self, pass_len: int) -> None:
        self._pass_len = pass_len
        self._step_len = self._backlog_len = 0
        self.is_blocked = False
        """Whether a request had to wait in this step, so that those behind it in
        vLLM's queue do too. Reset by `end_planning`."""

    @property
    def has_backlog(self) -> bool:
        """Whether waiting requests have enough to compute for the next pass."""
        return self._backlog_len >= self._pass_len

    def fits_step(self, work_len: int) -> bool:
        """Whether so many tokens more may be computed within this step."""
        return self._step_len + work_len <= self._pass_len // _STEP_SHARE

    def admit(self, work_len: int, *, asynchronous: bool) -> None:
        """A request with so many tokens to compute was admitted."""
        if asynchronous:
            self._backlog_len += work_len
        else:
            self._step_len += work_len

    def end_planning(self) -> None:
        """The step is planned; the next one begins."""
        self._step_len, self.is_blocked = 0, False

    def learn_backlog(self, backlog_len: int) -> None:
        """The worker side says how many tokens waiting requests still need."""
        self._backlog_len = backlog_len
