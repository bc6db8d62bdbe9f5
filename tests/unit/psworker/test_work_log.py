"""What a script does and logs, as others read it."""

import math
import threading
from collections.abc import Iterator

import pytest
import torch

from pswire.activity import Activity
from pswire.limits import METRIC_COUNT_MAX, NUMBER_MAX
from psworker import LocalConnection
from psworker.errors import ClosedError, ConfigurationError
from psworker.work_log import KINDS, WorkLog
from tests.doubles.manual_clock import ManualClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    made = ManualClock()
    monkeypatch.setattr("psworker.work_log.time.perf_counter", made)
    return made


def test_each_second_counts_for_what_the_script_did_in_it(clock: ManualClock) -> None:
    work = WorkLog()
    assert work.read().activity is Activity.UNKNOWN
    clock.now_s += 50
    work.start()
    clock.now_s += 1
    before = work.enter(Activity.LOADING)
    clock.now_s += 2
    work.enter(before)
    clock.now_s += 4
    did = work.begin_step()
    clock.now_s += 8
    work.enter(Activity.WAITING)
    clock.now_s += 16
    done = work.read()
    assert done.seconds == (0, 1 + 4, 2, 8, 16, 0)
    assert (done.activity, done.activity_s) == (Activity.WAITING, 16)
    work.note_step(32)
    work.enter(did)
    clock.now_s += 32
    done = work.read()
    assert done.seconds == (0, 1 + 4 + 32, 2, 8, 16, 0)
    assert (done.step_count, done.sample_count) == (1, 32)
    work.restart()
    clock.now_s += 3
    assert work.read().seconds == (0, 35, 0, 0, 0, 0)
    assert work.read().step_count == 0


def test_what_the_coordinator_takes_to_deal_data_is_not_the_loader_s(
    clock: ManualClock,
) -> None:
    work = WorkLog()
    work.start()

    def answer() -> str:
        clock.now_s += 2
        return "dealt"

    def batches() -> Iterator[str]:
        clock.now_s += 1
        yield work.idle(answer)

    assert list(work.loading(batches())) == ["dealt"]
    assert work.seconds == (0, 0, 1, 0, 0, 2)


def test_a_thread_that_draws_ahead_is_not_the_script(clock: ManualClock) -> None:
    work = WorkLog()
    work.start()
    other = threading.Thread(target=work.enter, args=(Activity.LOADING,))
    other.start()
    other.join()
    assert work.activity is Activity.COMPUTING


def test_who_waits_for_others_is_idle_whatever_it_sends_meanwhile(
    clock: ManualClock,
) -> None:
    work = WorkLog()
    work.start()
    before = work.enter(Activity.IDLE)
    clock.now_s += 3
    within = work.enter(Activity.WAITING)  # a push without data
    clock.now_s += 4
    work.enter(within)
    work.enter(before)
    clock.now_s += 5
    assert work.read().seconds == (0, 5, 0, 0, 0, 7)


def test_a_step_goes_on_after_the_wait_for_others(clock: ManualClock) -> None:
    """As in a group, whose leader pushes once all have offered their parts."""
    work = WorkLog()
    work.start()
    did = work.begin_step()
    before = work.enter(Activity.IDLE)
    clock.now_s += 3
    work.go_back(before)
    clock.now_s += 4
    sending = work.enter(Activity.WAITING)
    clock.now_s += 5
    work.enter(sending)
    work.enter(did)
    assert work.read().seconds == (0, 0, 0, 4, 5, 3)


def test_the_time_of_a_loader_is_that_until_each_batch_is_there(
    clock: ManualClock,
) -> None:
    def batches() -> Iterator[int]:
        for number in range(3):
            clock.now_s += 5
            yield number
        clock.now_s += 1

    work = WorkLog()
    work.start()
    for _ in work.loading(batches()):
        clock.now_s += 2
    assert work.read().seconds == (0, 3 * 2, 3 * 5 + 1, 0, 0, 0)


def test_what_is_logged_is_the_mean_since_it_was_read_last() -> None:
    work = WorkLog()
    work.log({"loss": 1.0, "accuracy": torch.tensor([[0.5]], requires_grad=True)})
    work.note_step(0)
    work.log({"loss": torch.tensor(2.0, dtype=torch.float16)})
    assert work.read().metrics == {"loss": (1.5, 1), "accuracy": (0.5, 0)}
    assert work.read().metrics == {"loss": (1.5, 1), "accuracy": (0.5, 0)}
    work.log({"loss": float("nan")})
    loss, step = work.read().metrics["loss"]
    assert math.isnan(loss)
    assert step == 1


def test_no_tensor_is_read_when_it_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    work = WorkLog()

    def refuse(*_: object) -> float:
        raise AssertionError("the step would wait for its device")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "__float__", "__bool__", "numpy"):
            patch.setattr(torch.Tensor, name, refuse)
        for _ in range(3):
            work.log({"loss": torch.tensor(0.25)})
    assert work.read().metrics["loss"] == (0.25, 0)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"": 1.0}, "under the name '': it is empty"),
        ({"x" * 65: 1.0}, "65 characters, of at most 64"),
        ({"val loss": 1.0}, "contains more than letters, digits"),
        ({"l\u00f6ss": 1.0}, "contains more than letters, digits"),
        ({"loss\n": 1.0}, "contains more than letters, digits"),
        ({"loss": torch.zeros(2)}, r"tensor of shape \(2,\)"),
        ({"loss": "high"}, "got a str: it is logged as a number"),
        ({"loss": None}, "got a NoneType"),
        ({"loss": 10**400}, "got a int"),
        ({"loss": torch.empty((), device="meta")}, "meta device"),
        (
            {f"n{number}": 0.0 for number in range(METRIC_COUNT_MAX)},
            "takes 16 names in all, and these are 17",
        ),
    ],
)
def test_what_can_not_be_logged_is_refused_whole(
    values: dict[str, object], text: str
) -> None:
    work = WorkLog()
    with pytest.raises(ConfigurationError, match=text):
        work.log({"good": 1.0, **values})
    assert not work.read().metrics


def test_without_a_job_logging_is_checked_and_shown_nowhere() -> None:
    ps = LocalConnection()
    ps.log(loss=torch.tensor(1.0), accuracy=1)
    with pytest.raises(ConfigurationError):
        ps.log(**{"not a name": 1.0})
    ps.close()
    with pytest.raises(ClosedError):
        ps.log(loss=1.0)


def test_every_activity_but_the_unknown_one_has_a_kind_in_traces() -> None:
    assert KINDS.keys() == {*Activity} - {Activity.UNKNOWN}


def test_a_weight_that_no_count_holds_is_the_largest_one() -> None:
    log = WorkLog()
    for weight in (32, 1.5e28, 7):
        log.note_step(weight)
    assert (log.step_count, log.read().sample_count) == (3, NUMBER_MAX)
