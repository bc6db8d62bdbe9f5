"""The trace that is being recorded: who takes part, and what is kept of it."""

import pytest

from psserver.coordinator.core import tracing
from psserver.coordinator.core.tracing import RecordedProcess, Tracing
from pswire.limits import MESSAGE_BYTES_MAX, NAME_BYTES_MAX
from pswire.reasons import ErrorReason
from pswire.v1 import coordinator_service_pb2 as messages
from tests.refusals import refused

NAMES = ("worker a", "shard 0")


def take(book: Tracing, name: str, *kinds: str, number: int | None = None) -> None:
    book.take(
        name,
        book.number if number is None else number,
        [messages.Span(kind=kind) for kind in kinds],
        clock=(7, 1),
        left_out_count=0,
        is_complete=bool(kinds),
    )


def kinds_of(found: dict[str, RecordedProcess], name: str) -> list[str]:
    return [span.kind for span in found[name].spans]


def test_it_is_over_when_all_have_recorded_or_have_left() -> None:
    book = Tracing(0)
    book.begin(5, NAMES)
    assert book.unfinished(NAMES) == ["shard 0", "worker a"]
    take(book, "worker a", "x")
    assert book.unfinished(NAMES) == ["shard 0"]
    assert book.unfinished(["worker a"]) == [], "who has left records no more"
    found = book.end()
    assert kinds_of(found, "worker a") == ["x"]
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
    with refused(ErrorReason.NOT_STARTED):
        book.begin(5, ())
    book.begin(5, NAMES)
    with refused(ErrorReason.BUSY):
        book.begin(5, NAMES)
    assert book.processes, "the one that is being recorded goes on"


def test_no_process_takes_the_room_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "SPAN_COUNT_MAX", 8)
    book = Tracing(0)
    book.begin(5, ("worker a", "worker b", "shard 0"))
    take(book, "worker a", *"123456789")
    take(book, "worker b", "x", "y")
    take(book, "shard 0", *"12345")
    found = book.end()
    assert kinds_of(found, "worker a") == ["1", "2"]
    assert kinds_of(found, "worker b") == ["x", "y"]
    assert kinds_of(found, "shard 0") == ["1", "2", "3", "4"]
    assert [found[name].left_out_count for name in sorted(found)] == [1, 7, 0]


def test_spans_of_the_longest_names_fit_one_message() -> None:
    names = [f"worker {number:>{NAME_BYTES_MAX}}" for number in range(1_000)]
    book = Tracing(0)
    book.begin(5, [*names, "shard 0"])
    long = "\N{KITE}" * 64
    for name in (*names, "shard 0"):
        take(book, name, *(long for _ in range(100)))
    take(book, "shard 0", *(long for _ in range(40_000)))
    unfinished = book.unfinished(names)
    answer = messages.RecordTraceResponse(
        processes=[
            messages.ProcessTrace(
                name=name, recorded=messages.RecordedSpans(spans=process.spans)
            )
            for name, process in book.end().items()
        ],
        unfinished=[*unfinished, *names],
    )
    assert MESSAGE_BYTES_MAX / 2 < answer.ByteSize() < MESSAGE_BYTES_MAX


def test_numbers_go_on_after_a_restart() -> None:
    first, second = Tracing(0), Tracing(1)
    for book in (first, second):
        book.begin(1, NAMES)
    assert second.number > first.number
