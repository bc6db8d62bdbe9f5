from pswire.leased_data import DataRange, DataReport
from psworker.data.pending import PendingData
from tests.integration.interruptions import AtLine, text_of

FIRST = DataRange("loader", 0, 0, 4)
SECOND = DataRange("loader", 0, 4, 8)


def test_a_push_takes_everything_drawn_since_the_push_before() -> None:
    pending = PendingData()
    pending.draw(4, FIRST)
    pending.draw(4, SECOND)

    drawn = pending.take()

    assert (drawn.sample_count, drawn.ranges) == (8, (FIRST, SECOND))
    assert pending.take().sample_count is None


def test_a_report_tells_what_is_consumed_and_what_was_dropped_once() -> None:
    pending = PendingData()
    pending.unreported.note((FIRST,), is_dropped=False)
    pending.unreported.note((SECOND,), is_dropped=True)
    assert pending.unreported.has_news

    assert pending.unreported.take() == DataReport((FIRST,), (SECOND,))
    assert pending.unreported.take() == DataReport()
    assert not pending.unreported.has_news


def test_a_report_that_failed_is_told_again_before_what_came_later() -> None:
    pending = PendingData()
    pending.unreported.note((FIRST,), is_dropped=False)
    report = pending.unreported.take()
    pending.unreported.note((SECOND,), is_dropped=False)

    pending.unreported.put_back(report)

    assert pending.unreported.take().consumed == (FIRST, SECOND)


def test_nothing_of_the_start_before_is_told_after_joining_again() -> None:
    pending = PendingData()
    pending.unreported.note((FIRST,), is_dropped=False)
    report = pending.unreported.take()
    pending.draw(4, SECOND)

    pending.start_over()
    pending.unreported.put_back(report)

    assert not pending.unreported.has_news
    assert pending.take().ranges == ()


def test_a_handler_may_ask_and_note_at_any_line() -> None:
    """It interrupts the thread that draws, and its state_dict() completes a step."""
    pending = PendingData()
    with AtLine() as untouched:
        draw_and_push(pending)

    for line in untouched.lines:
        pending = PendingData()

        def save(pending: PendingData = pending) -> None:
            assert pending.has_drawn in (False, True)
            pending.unreported.note((FIRST,), is_dropped=False)

        with AtLine(line, save) as interrupted:
            draw_and_push(pending)

        assert interrupted.is_reached, text_of(line)
        assert pending.unreported.take().consumed == (FIRST,), text_of(line)


def draw_and_push(pending: PendingData) -> None:
    pending.draw(4, SECOND)
    pending.note_backward(pending.note_call(_Unknown()))
    assert pending.has_trained
    pending.unreported.put_back(pending.unreported.take())
    pending.take()
    pending.unreported.put_back(pending.unreported.take())
    pending.skip("loader")
    pending.end("loader")


class _Unknown:
    """Inputs of a call that are of no batch's memory."""

    row_count = 4

    def are_of(self, memory: object) -> bool:
        return False

    def are_elsewhere(self, memory: object) -> bool:
        return False
