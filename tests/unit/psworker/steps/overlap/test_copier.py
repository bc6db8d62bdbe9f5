"""The thread that copies."""

import threading
from functools import partial

import pytest

from psworker.steps.overlap.copier import Copier


def test_work_is_done_in_order_in_another_thread() -> None:
    copier = Copier()
    done: list[int] = []

    futures = [copier.submit(partial(done.append, i)) for i in range(100)]
    names = copier.submit(lambda: threading.current_thread().name).result(10)
    copier.close()

    assert done == list(range(100))
    assert all(future.done() for future in futures)
    assert names == "psworker-copier"


def test_an_error_is_raised_where_the_work_is_waited_for() -> None:
    copier = Copier()

    def fail() -> None:
        raise OSError("no memory")

    failed = copier.submit(fail)

    with pytest.raises(OSError, match="no memory"):
        failed.result(10)
    assert copier.submit(lambda: 3).result(10) == 3
    copier.close()


def test_close_waits_for_what_it_was_told_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    copier = Copier()
    done: list[int] = []
    go_on = threading.Event()
    copier.submit(lambda: go_on.wait(10))
    copier.submit(lambda: done.append(1))
    closing = threading.Thread(target=copier.close)
    closing.start()

    go_on.set()
    closing.join(10)

    assert done == [1]
    assert set(threading.enumerate()) <= before
