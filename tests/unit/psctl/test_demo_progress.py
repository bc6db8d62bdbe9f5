import io

import pytest

from psctl.demo.display import LineDisplay, display_for_stderr
from psctl.demo.progress import Progress, StepReport, read_report
from psctl.failures import CommandError


def _report(worker_id: str, clock: int, *, loss: float, count: int = 2) -> StepReport:
    return StepReport(
        worker_id=worker_id,
        clock=clock,
        frontier=clock - 1,
        epoch=clock // 10,
        loss=loss,
        traffic_bytes=clock * 100,
        indices=list(range(count)),
    )


def test_figures_are_those_of_all_workers_together() -> None:
    progress = Progress(epoch_count=3)
    assert progress.ahead == "-"
    assert progress.steps_per_s == 0
    progress.take(_report("w0", 1, loss=2.0, count=1))
    progress.take(_report("w1", 1, loss=4.0, count=3))
    assert progress.loss == pytest.approx(3.5)
    assert progress.ahead == "all level"
    progress.take(_report("w0", 2, loss=1.0))
    assert (progress.clock, progress.ahead, progress.loss) == (2, "w0", 1.0)
    # A straggler's report of an older clock changes no newer loss.
    progress.take(_report("w2", 1, loss=9.0))
    assert progress.loss == 1.0
    assert progress.traffic_bytes == 200 + 100 + 100
    assert progress.frontier == 1
    assert progress.push_count == 4
    assert progress.batches[1].keys() == {"w0", "w1", "w2"}


def test_what_is_no_report_is_shown() -> None:
    with pytest.raises(CommandError, match="a worker printed 'hello'"):
        read_report("hello")


def test_lines_tell_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(epoch_count=3)
    progress.take(_report("w0", 4, loss=0.5))
    progress.accuracy = (0.75, 4)
    with LineDisplay() as display:
        display.show(progress)
        display.show(progress)  # too soon for another line
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    for figure in ("epoch 1/3", "step 4", "loss 0.5000", "accuracy 0.750", "400 B"):
        assert figure in lines[0]


def test_figures_that_stay_the_same_are_shown_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psctl.demo.display.LINE_INTERVAL_S", 0.0)
    progress = Progress(epoch_count=3)
    progress.take(_report("w0", 4, loss=0.5))
    with LineDisplay() as display:
        display.show(progress)
        display.show(progress)
        progress.accuracy = (0.75, 4)
        display.show(progress)
    assert len(capsys.readouterr().err.splitlines()) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "is_live"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
    ],
)
def test_the_table_is_live_only_where_it_can_be(
    environment: dict[str, str], is_live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    display = display_for_stderr(environment)
    assert isinstance(display, LineDisplay) is not is_live
    with display:
        display.note("a note")
        display.show(Progress(epoch_count=1))
