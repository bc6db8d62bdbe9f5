import os
import threading
from contextlib import suppress

import pytest

from psworker.errors import ClosedError, ConfigurationError, WaitTimeoutError
from psworker.optim.user_calls import UserCalls, in_turn
from tests.integration.interruptions import AtLine, Interrupted, text_of


class Worker:
    def __init__(self, wait_s: float = 60.0) -> None:
        self._calls = UserCalls(wait_s)

    @in_turn("worker.step()")
    def step(self, meanwhile: object = None) -> str:
        """A call, within which others are made."""
        if callable(meanwhile):
            meanwhile()
        return "stepped"

    @in_turn("worker.save()")
    def save(self) -> str:
        return "saved"


def test_calls_in_turn_are_done() -> None:
    worker = Worker()
    assert [worker.step(), worker.save(), worker.step()] == [
        "stepped",
        "saved",
        "stepped",
    ]
    assert not worker._calls.is_busy


def test_a_call_within_another_is_refused_by_both_names_and_the_other_goes_on() -> None:
    worker = Worker()
    refusals: list[str] = []

    def handle() -> None:
        with pytest.raises(ConfigurationError) as caught:
            worker.save()
        refusals.append(str(caught.value))

    assert worker.step(handle) == "stepped"
    assert "worker.save() was called while worker.step()" in refusals[0]
    assert "Set a flag in the handler" in refusals[0]
    assert worker.save() == "saved"


def test_an_error_that_leaves_a_call_ends_it() -> None:
    worker = Worker()

    def handle() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.step(handle)
    assert not worker._calls.is_within
    assert worker.save() == "saved"


def test_code_of_the_script_within_a_call_may_make_calls() -> None:
    worker = Worker()
    saved: list[str] = []

    def hook() -> None:
        worker._calls.lent(lambda: saved.append(worker.save()))
        with pytest.raises(ConfigurationError):
            worker.save()

    worker.step(hook)
    assert saved == ["saved"]


def test_another_thread_waits_for_the_call_that_is_under_way() -> None:
    worker = Worker()
    begun, may_end = threading.Event(), threading.Event()
    saved: list[str] = []

    def hold() -> None:
        begun.set()
        assert may_end.wait(10)

    stepping = threading.Thread(target=worker.step, args=(hold,))
    stepping.start()
    assert begun.wait(10)
    saving = threading.Thread(target=lambda: saved.append(worker.save()))
    saving.start()
    assert worker._calls.is_busy
    assert not saved
    may_end.set()
    saving.join(10)
    stepping.join(10)
    assert saved == ["saved"]


def test_a_wait_for_another_thread_ends_with_both_names() -> None:
    worker = Worker(wait_s=0.01)
    begun, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert may_end.wait(10)

    stepping = threading.Thread(target=worker.step, args=(hold,))
    stepping.start()
    assert begun.wait(10)
    with pytest.raises(WaitTimeoutError, match=r"save\(\) waited .* for worker.step"):
        worker.save()
    may_end.set()
    stepping.join(10)
    assert worker.save() == "saved"


def test_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ClosedError, match="forked"):
        worker.step()


def test_a_call_that_is_interrupted_at_any_line_leaves_none_under_way() -> None:
    with AtLine() as untouched:
        Worker().step()

    busy: list[bool] = []
    for line in untouched.lines:
        worker = Worker()

        with AtLine(line), suppress(Interrupted):
            worker.step()

        assert not worker._calls.is_busy, text_of(line)
        assert not worker._calls.is_within, text_of(line)
        worker.step(lambda worker=worker: busy.append(worker._calls.is_busy))

    assert all(busy)
    assert len(busy) == len(untouched.lines)
