from psworker.pending import DataRange, DataReport, PendingData

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
    pending.acknowledge((FIRST,))
    pending.drop((SECOND,))
    assert pending.has_news

    assert pending.take_report() == DataReport((FIRST,), (SECOND,))
    assert pending.take_report() == DataReport()
    assert not pending.has_news


def test_a_report_that_failed_is_told_again_before_what_came_later() -> None:
    pending = PendingData()
    pending.acknowledge((FIRST,))
    report = pending.take_report()
    pending.acknowledge((SECOND,))

    pending.return_report(report)

    assert pending.take_report().consumed == (FIRST, SECOND)


def test_nothing_of_the_start_before_is_told_after_joining_again() -> None:
    pending = PendingData()
    pending.acknowledge((FIRST,))
    report = pending.take_report()
    pending.draw(4, SECOND)

    pending.start_over()
    pending.return_report(report)

    assert not pending.has_news
    assert pending.take().ranges == ()
