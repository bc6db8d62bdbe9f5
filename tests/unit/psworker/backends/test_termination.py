"""Who is told to end leaves first, and is then ended as before."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pswire.end_signals import EndWish
from psworker.backends import termination
from psworker.errors import UnavailableError


class Worker:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.left: list[str] = []

    def leave_at_once(self, signal_name: str) -> None:
        self.left.append(signal_name)
        if self.error is not None:
            raise self.error


@pytest.fixture(name="ended")
def sent_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Signals by which this process would have ended."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    found: list[int] = []

    def kill(process_id: int, number: int) -> None:
        assert process_id == os.getpid()
        assert signal.getsignal(number) == signal.SIG_DFL
        found.append(number)

    monkeypatch.setattr(os, "kill", kill)
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "error", [None, UnavailableError("gone"), TimeoutError("too late")]
)
def test_every_worker_leaves_and_the_process_ends_by_the_same_signal(
    ended: list[int], number: signal.Signals, error: Exception | None
) -> None:
    workers = [Worker(error), Worker()]
    for worker in workers:
        termination.watch(worker)
    signal.raise_signal(number)
    assert [worker.left for worker in workers] == [[number.name]] * 2
    assert ended == [number]
    for worker in workers:
        termination.unwatch(worker)


class InterruptedWorker(Worker):
    """Is told to end again while it leaves."""

    def __init__(self, clock: list[float], later_s: float) -> None:
        super().__init__()
        self.clock, self.later_s = clock, later_s
        self.has_left = False

    def leave_at_once(self, signal_name: str) -> None:
        super().leave_at_once(signal_name)
        self.clock[0] += self.later_s
        signal.raise_signal(signal.SIGTERM)
        self.has_left = True


@pytest.mark.parametrize(("later_s", "ends"), [(0.0, 1), (0.4, 1), (0.5, 2), (9.0, 2)])
def test_a_second_signal_ends_who_leaves_unless_it_is_the_first_again(
    ended: list[int], monkeypatch: pytest.MonkeyPatch, later_s: float, ends: int
) -> None:
    clock = [100.0]
    wish = EndWish(lambda: clock[0])
    monkeypatch.setattr(termination, "_wish", wish)
    worker = InterruptedWorker(clock, later_s)
    termination.watch(worker)
    signal.raise_signal(signal.SIGTERM)
    assert worker.left == ["SIGTERM"], "left once"
    assert ended == [signal.SIGTERM] * ends, "a real one ends with the first of them"
    termination.unwatch(worker)


def test_a_handler_of_the_script_is_left_alone(ended: list[int]) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    worker = Worker()
    termination.watch(worker)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGHUP)
    assert heard == [signal.SIGTERM]
    termination.unwatch(worker)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert not worker.left + ended


def test_a_handler_that_the_script_sets_later_stays(ended: list[int]) -> None:
    worker = Worker()
    termination.watch(worker)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    termination.unwatch(worker)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    assert not ended


def test_without_a_worker_signals_do_what_they_did(ended: list[int]) -> None:
    first, second = Worker(), Worker()
    termination.watch(first)
    termination.watch(second)
    termination.unwatch(first)
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    termination.unwatch(second)
    termination.unwatch(second)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not ended


SCRIPT = """
import os, signal, sys, time
from pswire import end_signals
from pswire.end_signals import SAME_WISH_S
from psworker.backends import termination

if "twice" in sys.argv:
    end_signals.SAME_WISH_S = 600.0  # however late a busy machine brings the second

class Worker:
    def leave_at_once(self, name):
        print("leaves", flush=True)
        if "once" not in sys.argv:
            time.sleep(SAME_WISH_S if "later" in sys.argv else 0)
            os.kill(os.getpid(), signal.SIGTERM)
            print("has left", flush=True)

termination.watch(Worker())
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    print("child still here", flush=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("still here", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "said"), [("once", ""), ("twice", "has left\n"), ("later", "")]
)
def test_a_second_signal_and_one_to_a_child_end_at_once(how: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{-signal.SIGTERM}\nleaves\n{said}", done.stderr
    assert done.returncode == -signal.SIGTERM
