"""How far a job is, in the last row of a terminal that scripts write to as well."""

import io
import os
import threading
from typing import Any

import pyte
import pytest

from psworker.pace import EpochProgress, Pace, duration_text
from psworker.status_row import StatusRow, has_row, row_text

WAIT_S = 30.0


def document(**changes: object) -> dict[str, Any]:
    found: dict[str, Any] = {
        "phase": "running",
        "metrics": {"loss": 0.25},
        "workers": [{"clock": 1204}, {"clock": 1205}, {"clock": None}],
        "diagnosis": {"cause": "training", "sentence": "it trains"},
        "epochs": [],
    }
    return {**found, **changes}


def epoch(never: int, number: int = 0, **changes: object) -> dict[str, Any]:
    found = {
        "loader": "loader",
        "epoch": number,
        "position_count": 1010,
        "left_out_count": 10,
        "never_count": never,
        "over": False,
    }
    return {"epochs": [{**found, **changes}]}


def test_time_is_shown_as_a_clock_shows_it() -> None:
    assert [duration_text(s) for s in (0, 12.4, 75, 3725)] == [
        "0:00",
        "0:12",
        "1:15",
        "1:02:05",
    ]


def test_an_epoch_takes_as_long_as_of_late() -> None:
    now_s = 0.0
    pace = Pace(lambda: now_s)
    assert pace.take(document()) is None
    first = pace.take(epoch(1000))
    assert first is not None
    assert (first.done_count, first.count, first.left_s) == (0, 1000, None)
    now_s = 10.0
    second = pace.take(epoch(900))
    assert second is not None
    assert second.done_count == 100
    assert second.left_s == pytest.approx(90.0)
    assert second.left_text == "1:30 left"
    # A minute later: what was fast at first says nothing any more.
    now_s = 70.0
    pace.take(epoch(899))
    now_s = 80.0
    third = pace.take(epoch(889))
    assert third is not None
    assert third.left_s == pytest.approx(889.0)


def test_another_epoch_begins_anew() -> None:
    now_s = 0.0
    pace = Pace(lambda: now_s)
    pace.take(epoch(500))
    now_s = 10.0
    found = pace.take(epoch(990, number=1))
    assert found is not None
    assert (found.epoch, found.left_s) == (1, None)
    over = pace.take(epoch(0, number=1, over=True))
    assert over is not None
    assert over.left_text == ""
    assert over.part == 1.0


def test_a_row_says_how_far_the_job_is_and_what_is_wrong() -> None:
    progress = EpochProgress("loader", 3, 610, 1000, 12.0, is_over=False)
    text = row_text(document(), progress, 79)
    assert text == "job running  epoch 3 61 % 0:12 left  clock 1,204  loss 0.25"
    slow = {"cause": "straggler", "sentence": "w1 holds up\x1b[2J the others"}
    text = row_text(document(diagnosis=slow), progress, 200)
    assert text.endswith("loss 0.25  w1 holds up\\x1b[2J the others")
    assert len(row_text(document(diagnosis=slow), progress, 40)) == 40


class Shown(io.StringIO):
    """A stream into a terminal, which tells when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.screen = pyte.Screen(40, 10)
        self._terminal = pyte.Stream(self.screen)
        self._lock = threading.Lock()
        self.wrote = threading.Semaphore(0)

    def write(self, text: str) -> int:
        with self._lock:  # as a terminal takes what one write has
            self._terminal.feed(text)
        self.wrote.release()
        return len(text)

    @property
    def rows(self) -> list[str]:
        return [row.rstrip() for row in self.screen.display]


def test_what_scripts_print_scrolls_above_the_row() -> None:
    shown = Shown()
    for number in range(9):
        shown.write(f"before {number}\r\n")
    answers = iter([document(), "job: no answer"])
    told = threading.Event()

    def ask() -> Any:  # noqa: ANN401, as of the class
        found = next(answers, None)
        if found is None:
            told.set()
            return "job: no answer"
        return found

    row = StatusRow(
        ask, stream=shown, interval_s=0.0, size=lambda: os.terminal_size((40, 10))
    )
    shown.wrote = threading.Semaphore(0)
    with row:
        assert shown.wrote.acquire(timeout=WAIT_S)
        for number in range(20):
            shown.write(f"line {number}\r\n")
        assert told.wait(WAIT_S)
    # Nothing of the script was lost, and the row is gone.
    assert shown.rows[-3:-1] == ["line 19", ""]
    assert shown.rows[-1] == ""
    assert shown.screen.margins is None
    shown.write("after\r\nthe end")
    assert "the end" in shown.rows


def test_the_row_stays_while_lines_scroll() -> None:
    shown = Shown()
    row = StatusRow(
        document,
        stream=shown,
        interval_s=WAIT_S,
        size=lambda: os.terminal_size((40, 10)),
    )
    with row:
        assert shown.wrote.acquire(timeout=WAIT_S)
        for number in range(20):
            shown.write(f"line {number}\r\n")
        assert shown.rows[-1] == "job running  clock 1,204  loss 0.25"
        assert shown.rows[-3] == "line 19"


def test_a_pipe_and_a_dumb_terminal_have_no_row() -> None:
    assert not has_row(io.StringIO(), {"TERM": "xterm"})

    class Dumb(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert not has_row(Dumb(), {"TERM": "dumb"})
