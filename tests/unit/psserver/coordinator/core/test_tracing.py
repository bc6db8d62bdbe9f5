"""The trace that is being recorded: who takes part, and what is kept of it."""

import pytest

from psserver.coordinator.core import tracing
from psserver.coordinator.core.tracing import Tracing
from pswire.reasons import ErrorReason, Refusal

NAMES = ("worker a", "shard 0")


def take(book: Tracing, name: str, *spans: object, number: int | None = None) -> None:
    book.take(
        name,
        book.number if number is None else number,
        spans,
        clock=(7, 1),
        left_out_count=0,
        is_complete=bool(spans),
    )


def test_it_is_over_when_all_have_recorded_or_have_left() -> None:
    book = Tracing(0)
    book.begin(5, NAMES)
    assert book.unfinished(NAMES) == ["shard 0", "worker a"]
    take(book, "worker a", "x")
    assert book.unfinished(NAMES) == ["shard 0"]
    assert book.unfinished(["worker a"]) == [], "who has left records no more"
    found = book.end()
    assert found["worker a"].spans == ["x"]
    assert found["worker a"].clock_offset_us == 7
    assert book.step_count == 0


def test_reports_of_another_trace_or_of_strangers_are_not_kept() -> None:
    book = Tracing(0)
    book.begin(5, NAMES)
    book.end()
    book.begin(5, NAMES)
    take(book, "worker a", "old", number=book.number - 1)
    take(book, "worker b", "strange")
    assert all(not each.spans for each in book.end().values())
    take(book, "worker a", "late")
    assert book.processes == {}


def test_one_at_a_time_and_only_of_somebody() -> None:
    book = Tracing(0)
    with pytest.raises(Refusal) as caught:
        book.begin(5, ())
    assert caught.value.reason is ErrorReason.NOT_STARTED
    book.begin(5, NAMES)
    with pytest.raises(Refusal) as caught:
        book.begin(5, NAMES)
    assert caught.value.reason is ErrorReason.BUSY
    assert book.processes, "the one that is being recorded goes on"


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "SPAN_COUNT_MAX", 3)
    book = Tracing(0)
    book.begin(5, NAMES)
    take(book, "worker a", 1, 2)
    take(book, "shard 0", 3, 4, 5)
    found = book.end()
    assert (found["shard 0"].spans, found["shard 0"].left_out_count) == ([3], 2)


def test_numbers_go_on_after_a_restart() -> None:
    first, second = Tracing(0), Tracing(1)
    for book in (first, second):
        book.begin(1, NAMES)
    assert second.number > first.number
