"""What a job says on standard error, whatever that is."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from daric_rag.prewarm_notices import notice


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_people_get_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    notice("run", "all is done", computed=3)
    assert sys.stderr.getvalue() == "all is done\n"


@pytest.mark.parametrize("values", [{"computed": 3}, {}])
def test_a_log_gets_a_line_of_json(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    notice("run", "all is\ndone", **values)
    (line,) = sys.stderr.getvalue().splitlines()
    assert json.loads(line) == {
        "event": "run",
        **(values or {"message": "all is\ndone"}),
    }


def test_a_process_without_standard_error_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    notice("run", "all is done")


def test_a_signal_in_the_middle_of_a_write_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Busy(io.StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    monkeypatch.setattr(sys, "stderr", Busy())
    notice("interrupted", "finishing")
    monkeypatch.undo()
    assert json.loads(capfd.readouterr().err)["event"] == "interrupted"
