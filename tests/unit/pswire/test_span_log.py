"""What a process records of a trace, and by which clock."""

import pytest

from pswire.span_log import SPAN_COUNT_MAX, SpanLog
from pswire.v1 import coordinator_service_pb2 as messages

NOTHING = messages.TraceOrder()


def order(number: int, step_count: int = 2) -> messages.TraceOrder:
    return messages.TraceOrder(number=number, step_count=step_count)


def ordered(number: int = 1, step_count: int = 2) -> SpanLog:
    log = SpanLog(iter(range(0, 1 << 20, 10)).__next__)
    log.report()
    log.take_answer(0, order(number, step_count))
    return log


def test_nothing_is_recorded_before_an_order() -> None:
    log = SpanLog()
    assert log.report() is None
    log.take_answer(0, NOTHING)
    assert log.recording is None


def test_the_steps_of_an_order_are_recorded_and_no_more() -> None:
    log = ordered(step_count=2)
    assert log.recording is not None
    for step in (7, 8, 9, 10):
        log.recording.note("compute", step, step + 1, step)

    report = log.report()

    assert report is not None
    assert [each.step for each in report.spans] == [7, 8]
    assert report.is_complete
    log.take_answer(0, order(1, 2))
    assert log.recording is None, "it is known, and begins no second time"


def test_spans_go_with_the_next_report_each_once() -> None:
    log = ordered(step_count=9)
    assert log.recording is not None
    log.recording.note("send", 5, 8, 1, "a")
    first, second = log.report(), log.report()
    assert first is not None
    assert second is not None
    (span,) = first.spans
    assert (span.kind, span.begin_us, span.duration_us, span.lane) == (
        "send",
        5,
        3,
        "a",
    )
    assert not first.is_complete
    assert list(second.spans) == []


def test_what_nobody_takes_is_bounded() -> None:
    log = ordered(step_count=9)
    assert log.recording is not None
    for number in range(SPAN_COUNT_MAX + 3):
        log.recording.note("apply", number + 100, number + 100, 1)
    report = log.report()
    assert report is not None
    assert (len(report.spans), report.left_out_count) == (SPAN_COUNT_MAX, 3)


def test_a_trace_that_nobody_waits_for_ends() -> None:
    log = ordered()
    log.report()
    log.take_answer(0, NOTHING)
    assert log.recording is None


@pytest.mark.parametrize("is_shorter", [False, True])
def test_the_shortest_round_trip_sets_the_clock(is_shorter: bool) -> None:
    # The coordinator's clock is 1,000 ahead; of 40 us one way takes 30.
    times = iter((100, 140, *((200, 210) if is_shorter else (200, 280))))
    log = SpanLog(lambda: next(times))
    log.report()
    log.take_answer(100 + 30 + 1_000, order(1))
    log.report()
    log.take_answer(205 + 1_000, order(1))
    times = iter((300,))

    report = log.report()

    assert report is not None
    offset, error = (1_000, 5) if is_shorter else (1_010, 20)
    assert (report.clock_offset_us, report.clock_error_us) == (offset, error)
    assert abs(report.clock_offset_us - 1_000) <= report.clock_error_us


def test_what_begins_before_the_trace_belongs_to_none_of_its_steps() -> None:
    log = SpanLog(iter(range(0, 1 << 20, 10)).__next__)
    log.report()
    # The coordinator's clock is 1,000 ahead.
    wanted = messages.TraceOrder(number=1, step_count=9, begin_us=1_500)
    log.take_answer(1_005, wanted)
    assert log.recording is not None
    log.recording.note("compute", 499, 510, 1)
    log.recording.note("send", 500, 510, 1)
    report = log.report()
    assert report is not None
    assert [each.kind for each in report.spans] == ["send"]
