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
def taken_place() -> Iterator[Place]:
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
