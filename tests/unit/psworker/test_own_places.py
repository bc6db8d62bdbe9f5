"""A script that connects a second time by accident is told, and others are not."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from psworker import own_places
from psworker.errors import ConfigurationError


@dataclass(eq=False)
class Place:
    worker_id: str = "w0"
    is_out: bool = False
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True
        own_places.give_up(self)


@pytest.fixture(name="place", autouse=True)
def taken_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(own_places, "_has_told_several", False)
    place = Place()
    own_places.take(place, "h:1", "", is_out=lambda: place.is_out)
    yield place
    own_places.give_up(place)


def test_the_same_thread_is_refused_with_the_name_of_its_worker() -> None:
    with pytest.raises(ConfigurationError, match=r"as worker w0.* call close"):
        own_places.make_room("h:1", "")


def test_another_job_another_id_and_another_thread_have_room() -> None:
    own_places.make_room("h:2", "")
    own_places.make_room("h:1", "mine")
    refused: list[Exception] = []

    def connect() -> None:
        try:
            own_places.make_room("h:1", "")
        except ConfigurationError as error:
            refused.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    assert not refused


def test_one_that_is_closed_has_left_its_place(place: Place) -> None:
    place.close()
    own_places.make_room("h:1", "")


def test_one_that_the_job_has_taken_out_makes_room(place: Place) -> None:
    place.is_out = True
    own_places.make_room("h:1", "")
    assert place.is_closed


def test_localhost_is_no_other_job() -> None:
    place = Place()
    own_places.take(place, "127.0.0.1:1", "", is_out=lambda: False)
    with pytest.raises(ConfigurationError, match="close"):
        own_places.make_room("localhost:1", "")
    own_places.make_room("localhost:2", "")
    own_places.give_up(place)


def _take(wanted_id: str, *, coordinator: str = "h:1", in_thread: bool = False) -> None:
    place = Place(wanted_id or "w1")

    def take() -> None:
        own_places.take(place, coordinator, wanted_id, is_out=lambda: False)

    if in_thread:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    else:
        take()
    own_places.give_up(place)


def test_one_more_id_in_the_same_thread_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _take("mine")
    _take("yours")
    (record,) = caplog.records
    assert "two workers of the job at h:1, w0 and mine" in record.message
    assert "step them in threads of their own" in record.message
    assert "close() on the first" in record.message


def test_one_more_thread_without_an_id_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _take("", in_thread=True)
    (record,) = caplog.records
    assert "w0 and w1, and each must make its steps" in record.message


def test_who_clearly_means_several_workers_is_told_nothing(
    caplog: pytest.LogCaptureFixture, place: Place
) -> None:
    _take("mine", in_thread=True)
    _take("", coordinator="h:2")
    place.is_out = True
    _take("")
    place.close()
    _take("mine")
    assert not caplog.records
