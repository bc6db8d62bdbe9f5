"""A script that connects a second time by accident is told, and others are not."""

import gc
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from psworker import connecting
from psworker.backends.backend import Backend, WorkerPlace
from psworker.connecting import note_worker, refuse_second
from psworker.connection import Connection
from psworker.errors import ConfigurationError


class AtJob:
    """What stands behind a connection to a job that nobody serves."""

    def __init__(self, worker_id: str, coordinator: str) -> None:
        self.place = WorkerPlace(worker_id=worker_id, mode="bsp")
        self.coordinator = coordinator
        self.is_out = False

    def close(self, *, leaves: bool) -> None:
        """There is nobody to leave."""


class Connected:
    """A connection, as `connect()` notes it."""

    def __init__(self, worker_id: str, coordinator: str, wanted_id: str) -> None:
        self.at_job = AtJob(worker_id, coordinator)
        backend: Any = self.at_job
        assert isinstance(backend.place, WorkerPlace)
        self.connection = Connection(backend)
        held: Backend = backend
        note_worker(self.connection, held, coordinator, wanted_id)


@pytest.fixture(name="first", autouse=True)
def first_connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connected]:
    monkeypatch.setattr(connecting, "_has_warned_of_several", False)
    monkeypatch.setattr(connecting, "_workers", WeakKeyDictionary())  # of other tests
    first = Connected("w0", "h:1", "")
    yield first
    first.connection.close()


def test_the_same_thread_is_refused_with_the_name_of_its_worker() -> None:
    with pytest.raises(ConfigurationError, match=r"as worker w0.* call close"):
        refuse_second("h:1", "")


def test_another_job_another_id_and_another_thread_have_room() -> None:
    refuse_second("h:2", "")
    refuse_second("h:1", "mine")
    refused: list[Exception] = []

    def connect() -> None:
        try:
            refuse_second("h:1", "")
        except ConfigurationError as error:
            refused.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    assert not refused


def test_one_that_is_closed_counts_no_more(first: Connected) -> None:
    first.connection.close()
    refuse_second("h:1", "")


def test_one_that_the_job_has_evicted_is_closed_for_the_next(first: Connected) -> None:
    first.at_job.is_out = True
    refuse_second("h:1", "")
    assert first.connection.is_closed


def test_one_that_is_dropped_without_close_is_still_a_worker(first: Connected) -> None:
    Connected("w1", "h:2", "")
    gc.collect()
    with pytest.raises(ConfigurationError, match="as worker w1"):
        refuse_second("h:2", "")
    first.connection.close()
    (dropped,) = [each for each in connecting._workers if not each.is_closed]
    dropped.close()


def test_localhost_is_no_other_job() -> None:
    other = Connected("w1", "127.0.0.1:1", "")
    with pytest.raises(ConfigurationError, match="close"):
        refuse_second("localhost:1", "")
    refuse_second("localhost:2", "")
    other.connection.close()


def _connect(
    wanted_id: str, *, coordinator: str = "h:1", in_thread: bool = False
) -> None:
    def connect() -> None:
        Connected(wanted_id or "w1", coordinator, wanted_id).connection.close()

    if in_thread:
        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()
    else:
        connect()


def test_one_more_id_in_the_same_thread_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _connect("mine")
    _connect("yours")
    (record,) = caplog.records
    assert "two workers of the job at h:1, w0 and mine" in record.message
    assert "step them in threads of their own" in record.message
    assert "close() on the first" in record.message


def test_one_more_thread_without_an_id_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _connect("", in_thread=True)
    (record,) = caplog.records
    assert "w0 and w1, and each must make its steps" in record.message


def test_who_clearly_means_several_workers_is_not_warned(
    caplog: pytest.LogCaptureFixture, first: Connected
) -> None:
    _connect("mine", in_thread=True)
    _connect("", coordinator="h:2")
    first.at_job.is_out = True
    _connect("")
    first.connection.close()
    _connect("mine")
    assert not caplog.records
