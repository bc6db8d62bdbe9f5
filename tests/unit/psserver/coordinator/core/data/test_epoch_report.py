"""Every position of an epoch is in one of the counts, whatever happens to it."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from psserver.coordinator.core.data.epoch_ledger import (
    SKIPPED_RUN_COUNT_MAX,
    EpochLedger,
)
from psserver.coordinator.core.data.ledger import DataLedger
from pswire.leased_data import DataReport, EpochShape
from tests.doubles.core_values import key

A, B, C = key("a"), key("b"), key("c")


def shape(position_count: int, *, drop_last: bool = False) -> EpochShape:
    return EpochShape(position_count=position_count, batch_size=2, drop_last=drop_last)


def test_what_becomes_of_samples_is_told_by_kind() -> None:
    ledger = EpochLedger("loader", 0, shape(13, drop_last=True))
    used, torn, dropped, skipped, _ = ledger.lease(A, (), 5)
    ledger.consume(A, (used,))
    ledger.tear(A, (torn,))
    ledger.drop(A, (dropped,))
    ledger.skip(A, (skipped, skipped))
    report = ledger.report
    assert (report.seen_once, report.torn) == (2, 2)
    assert (report.dropped, report.skipped) == (2, 2)
    assert (report.never, report.held, report.left_out) == (4, 2, 1)
    assert not report.is_over
    assert not report.is_complete


def test_what_was_skipped_strands_nobody_and_is_not_dealt_again() -> None:
    ledger = EpochLedger("loader", 0, shape(4))
    used, skipped = ledger.lease(A, (), 2)
    ledger.skip(A, (skipped,))
    ledger.consume(A, (used,))
    assert ledger.is_closed
    ledger.give_back(A)
    assert ledger.lease(B, (), 9) == []
    assert ledger.report.skipped == 2


def test_what_was_skipped_is_seen_once_it_is_pushed_after_all() -> None:
    ledger = EpochLedger("loader", 0, shape(4))
    pieces = tuple(ledger.lease(A, (), 2))
    ledger.skip(A, pieces)
    ledger.consume(A, pieces[:1])
    ledger.drop(A, pieces[1:])
    report = ledger.report
    assert (report.seen_once, report.dropped) == (2, 2)
    assert report.skipped == 0


def test_what_a_departed_worker_has_skipped_stays_skipped() -> None:
    ledger = EpochLedger("loader", 0, shape(4))
    pieces = tuple(ledger.lease(A, (), 2))
    ledger.skip(A, pieces)
    ledger.retire(A)
    ledger.consume(A, pieces)
    report = ledger.report
    assert (report.skipped, report.seen_once) == (4, 0)


def test_what_a_worker_alone_has_skipped_takes_the_room_of_one_batch() -> None:
    ledger = EpochLedger("loader", 0, shape(200))
    for _ in range(50):
        ledger.skip(A, tuple(ledger.lease(A, (), 2)))
    assert ledger.skipped[A].runs == [(0, 200)]
    assert ledger.report.skipped == 200


def test_skips_are_kept_apart_up_to_a_limit_and_counted_beyond_it() -> None:
    ledger = EpochLedger("loader", 0, shape(4 * SKIPPED_RUN_COUNT_MAX + 8))
    pieces = []
    while not ledger.is_closed:
        for worker in (A, B):
            (piece,) = ledger.lease(worker, (A, B), 1)
            ledger.skip(worker, (piece,))
            pieces.append(piece)
    assert ledger.skipped[A].run_count == SKIPPED_RUN_COUNT_MAX
    ledger.consume(A, tuple(pieces))
    report = ledger.report
    # The two oldest of A, and all of B.
    assert report.skipped == 2 * (SKIPPED_RUN_COUNT_MAX + 2) + 4
    assert report.seen_once == 2 * SKIPPED_RUN_COUNT_MAX
    assert report.never == 0


def test_only_of_the_epoch_before_may_a_push_still_be_under_way() -> None:
    ledger = DataLedger(7)
    pieces = {}
    for number in range(3):
        ledger.open_epoch(A, "loader", number, shape(6))
        opened = ledger.register_order(A, "loader", number, 1)
        pieces[number] = tuple(opened.lease(A, (), 2))
        ledger.take_report(A, DataReport(skipped=pieces[number][:1]))
    oldest, before, _ = ledger.epochs()
    assert not oldest.has_of(A)
    assert before.has_of(A)
    for number in range(2):
        ledger.take_report(A, DataReport(pieces[number]))
    for each, seen_count, skipped_count in ((oldest, 0, 2), (before, 4, 0)):
        assert each.report.seen_once == seen_count
        assert each.report.skipped == skipped_count


def test_what_two_workers_have_used_is_seen_more_than_once() -> None:
    ledger = DataLedger(7)
    ledger.open_epoch(A, "loader", 0, shape(6))
    first = ledger.register_order(A, "loader", 0, 1)
    early, late, _ = first.lease(A, (), 3)
    ledger.open_epoch(A, "loader", 1, shape(6))
    # It had drawn and pushed them, without telling so in time.
    ledger.take_report(A, DataReport((early,)))
    assert first.report.seen_once == 2
    rest = tuple(first.lease(B, (), 9))
    assert early not in rest
    ledger.take_report(B, DataReport(rest))
    ledger.take_report(A, DataReport((late,)))
    ledger.take_report(A, DataReport((late,)))
    report = first.report
    assert (report.seen_once, report.seen_again) == (4, 2)
    assert report.never == 0
    assert not report.is_complete


def test_what_is_dealt_again_and_used_late_is_seen_once_unless_both_use_it() -> None:
    for handed_out in (0, 3):
        ledger = EpochLedger("loader", 0, shape(6))
        pieces = tuple(ledger.lease(A, (), 3))
        ledger.give_back(A)
        # In rounds, the three are in the queue of B; then it may have them, too.
        ledger.lease(C, (B, B, B, C), 1) if not handed_out else ledger.lease(B, (), 3)
        ledger.consume(A, pieces)
        report = ledger.report
        assert (report.seen_once, report.seen_again) == (6, 0)
        assert report.is_over
        assert report.is_complete
        ledger.consume(B, pieces[:handed_out])
        report = ledger.report
        assert report.seen_again == 2 * handed_out
        assert report.seen_once == 6 - 2 * handed_out


def test_what_another_has_skipped_and_is_used_late_is_seen_once() -> None:
    ledger = EpochLedger("loader", 0, shape(2))
    pieces = tuple(ledger.lease(A, (), 1))
    ledger.give_back(A)
    ledger.skip(B, tuple(ledger.lease(B, (), 1)))
    ledger.consume(A, pieces)
    assert (ledger.report.seen_once, ledger.report.skipped) == (2, 0)
    ledger.retire(B)
    assert ledger.report.is_complete


def test_who_gets_its_own_batch_again_uses_it_once() -> None:
    ledger = EpochLedger("loader", 0, shape(2))
    pieces = tuple(ledger.lease(A, (), 1))
    ledger.give_back(A)
    assert tuple(ledger.lease(A, (), 1)) == pieces
    ledger.consume(A, pieces)
    assert ledger.report.is_complete
    assert not ledger.has_of(A)


@pytest.mark.parametrize("end", ["tear", "drop", "retire"])
def test_a_late_report_changes_no_count_that_is_final(end: str) -> None:
    ledger = EpochLedger("loader", 0, shape(2))
    pieces = tuple(ledger.lease(A, (), 1))
    ledger.give_back(A)
    again = tuple(ledger.lease(B, (), 1))
    if end == "retire":
        ledger.skip(B, again)
        ledger.retire(B)
    else:
        getattr(ledger, end)(B, again)
    before = ledger.report
    ledger.consume(A, pieces)
    assert ledger.report == before
    assert not ledger.has_of(A)


def test_what_three_have_used_counts_as_one_repetition() -> None:
    ledger = EpochLedger("loader", 0, shape(2))
    for worker in (A, B, C):
        pieces = tuple(ledger.lease(worker, (), 1))
        ledger.give_back(worker)
    for worker in (C, A, B):
        ledger.consume(worker, pieces)
    assert (ledger.report.seen_once, ledger.report.seen_again) == (0, 2)


def test_a_departed_worker_can_use_nothing_any_more() -> None:
    ledger = EpochLedger("loader", 0, shape(4))
    pieces = tuple(ledger.lease(A, (), 2))
    ledger.give_back(A)
    ledger.retire(A)
    ledger.consume(A, pieces)
    assert ledger.report.never == 4


EVENTS = ("lease", "consume", "drop", "tear", "skip", "give_back", "pass_by", "retire")

LATE_REPORT = [
    ("lease", A, 0),
    ("give_back", A, 0),
    ("lease", B, 0),
    ("consume", A, 0),
]
"""A piece is dealt again, and then the first worker says that it has used it."""


@settings(derandomize=True, max_examples=1_000, deadline=None)
@given(
    st.integers(0, 9),
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(EVENTS), st.sampled_from((A, B, C)), st.integers(0, 9)
        ),
        max_size=40,
    ),
)
@example(2, False, LATE_REPORT)
@example(2, False, [*LATE_REPORT, ("consume", B, 0), ("consume", A, 0)])
def test_the_counts_always_make_up_the_epoch(
    position_count: int,
    drop_last: bool,
    events: list[tuple[str, tuple[str, int], int]],
) -> None:
    ledger = EpochLedger("loader", 0, shape(position_count, drop_last=drop_last))
    told = []
    for event, worker, number in events:
        if event == "lease":
            told += ledger.lease(worker, (), 1 + number % 3)  # type: ignore[arg-type]
        elif event in ("give_back", "pass_by", "retire"):
            getattr(ledger, event)(worker)
        elif told:
            getattr(ledger, event)(worker, (told[number % len(told)],))
        report = ledger.report
        counts = (
            *(report.seen_once, report.seen_again, report.torn),
            *(report.dropped, report.skipped, report.never),
            report.left_out,
        )
        assert min(counts) >= 0
        assert sum(counts) == position_count
