"""Every position of an epoch is dealt once, and again only when it was not used."""

import itertools

import pytest

import psserver.coordinator.core.data.ledger as ledger_module
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.data.ledger import DataLedger, carried_over
from pswire.leased_data import DataRange, DataReport, EpochShape
from pswire.limits import HELD_COUNT_MAX, ORDER_ORIGIN_BYTES_MAX
from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason
from tests.doubles.core_values import key
from tests.refusals import refused

A, B, C = key("a"), key("b"), key("c")


def shape(
    position_count: int, batch_size: int = 2, *, drop_last: bool = False
) -> EpochShape:
    return EpochShape(
        position_count=position_count, batch_size=batch_size, drop_last=drop_last
    )


def epoch(position_count: int) -> EpochLedger:
    return EpochLedger("loader", 0, shape(position_count))


def spans(ranges: list[DataRange]) -> list[tuple[int, int]]:
    return [(piece.start, piece.stop) for piece in ranges]


def use_up(
    ledger: EpochLedger,
    order: tuple[WorkerKey, ...],
    participants: tuple[WorkerKey, ...],
) -> dict[WorkerKey, list[tuple[int, int]]]:
    """Workers ask in turn for one batch and consume it, until none gets any."""
    found: dict[WorkerKey, list[tuple[int, int]]] = {worker: [] for worker in order}
    while True:
        leased = {w: ledger.lease(w, participants, 1) for w in order}
        if not any(leased.values()):
            return found
        for worker, ranges in leased.items():
            found[worker] += spans(ranges)
            ledger.consume(worker, tuple(ranges))


# Dealing


@pytest.mark.parametrize("order", list(itertools.permutations((A, B, C))))
def test_rounds_do_not_depend_on_who_asks_first(
    order: tuple[WorkerKey, ...],
) -> None:
    dealt = use_up(epoch(13), order, (A, B, C))

    assert dealt == {
        A: [(0, 2), (6, 8), (12, 13)],
        B: [(2, 4), (8, 10)],
        C: [(4, 6), (10, 12)],
    }


def test_rounds_do_not_depend_on_how_many_are_asked_for() -> None:
    ledger = epoch(12)
    assert spans(ledger.lease(B, (A, B), 3)) == [(2, 4), (6, 8), (10, 12)]
    assert spans(ledger.lease(A, (A, B), 1)) == [(0, 2)]
    assert spans(ledger.lease(A, (A, B), 9)) == [(0, 2), (4, 6), (8, 10)]


def test_without_rounds_whoever_asks_gets_the_next() -> None:
    ledger = epoch(8)
    assert spans(ledger.lease(A, (), 2)) == [(0, 2), (2, 4)]
    assert spans(ledger.lease(B, (), 1)) == [(4, 6)]


def test_one_that_takes_no_part_in_the_rounds_is_served_on_demand() -> None:
    ledger = epoch(8)
    assert spans(ledger.lease(C, (A, B), 1)) == [(0, 2)]
    assert spans(ledger.lease(B, (A, B), 1)) == [(4, 6)]


@pytest.mark.parametrize(
    ("position_count", "drop_last", "expected"),
    [
        (0, False, []),
        (1, False, [(0, 1)]),
        (1, True, []),
        (5, False, [(0, 2), (2, 4), (4, 5)]),
        (5, True, [(0, 2), (2, 4)]),
    ],
)
def test_the_last_batch_is_small_or_left_out(
    position_count: int, drop_last: bool, expected: list[tuple[int, int]]
) -> None:
    ledger = EpochLedger("loader", 0, shape(position_count, drop_last=drop_last))
    assert use_up(ledger, (A,), (A,)) == {A: expected}
    assert ledger.is_closed


def test_one_that_reports_nothing_gets_no_more() -> None:
    ledger = epoch(4 * HELD_COUNT_MAX)
    ledger.lease(A, (), HELD_COUNT_MAX)
    held = ledger.lease(A, (), 1)
    assert len(held) == HELD_COUNT_MAX
    ledger.consume(A, tuple(held[:2]))
    assert len(ledger.lease(A, (), 9)) == HELD_COUNT_MAX


# Consuming and closing


def test_what_is_held_and_not_reported_is_told_again() -> None:
    """The answer that told of it may have been lost."""
    ledger = epoch(8)
    first, second = ledger.lease(A, (), 2)
    ledger.consume(A, (first,))

    assert spans(ledger.lease(A, (), 1)) == [(2, 4), (4, 6)]
    ledger.consume(A, (second,))
    assert spans(ledger.lease(A, (), 1)) == [(4, 6), (6, 8)]
    assert spans(ledger.lease(A, (), 1)) == [(4, 6), (6, 8)]
    assert ledger.lease(B, (), 1) == []


def test_an_epoch_closes_when_all_that_was_dealt_is_consumed() -> None:
    ledger = epoch(4)
    (first,) = ledger.lease(A, (A, B), 1)
    (second,) = ledger.lease(B, (A, B), 1)
    ledger.consume(A, (first,))
    assert not ledger.is_closed
    ledger.consume(B, (second,))
    assert ledger.is_closed
    assert ledger.consumed_count == 4


def test_consuming_counts_once_and_only_what_one_holds() -> None:
    ledger = epoch(4)
    leased = tuple(ledger.lease(A, (A, B), 1))
    ledger.consume(A, leased)
    ledger.consume(A, leased)
    ledger.consume(B, leased)
    ledger.consume(A, (DataRange("loader", 0, 0, 4),))
    assert ledger.consumed_count == 2


def test_what_was_torn_or_thrown_away_closes_and_is_not_dealt_again() -> None:
    ledger = epoch(8)
    used, torn, dropped, rest = ledger.lease(A, (), 4)
    for _ in range(2):
        ledger.consume(A, (used,))
        ledger.tear(A, (torn,))
        ledger.drop(A, (dropped, dropped, used))
    assert not ledger.is_closed
    ledger.give_back(A)

    assert spans(ledger.lease(B, (), 9)) == [(rest.start, rest.stop)]
    ledger.consume(B, (rest,))
    assert ledger.is_closed
    counts = (ledger.consumed_count, ledger.torn_count, ledger.dropped_count)
    assert counts == (4, 2, 2)


def test_recalled_batches_are_dealt_in_their_order_after_those_given_back() -> None:
    ledger = epoch(12)
    ledger.lease(A, (A, B), 3)
    ledger.lease(B, (A, B), 1)
    ledger.give_back(B)
    assert not ledger.recall()
    assert spans(list(ledger.returned)) == [(2, 4), (6, 8), (10, 12)]

    other = epoch(12)
    other.lease(A, (A, B), 3)
    assert other.recall()
    assert not other.recall()
    assert spans(other.lease(B, (), 9)) == [(2, 4), (6, 8), (10, 12)]


def test_a_batch_dealt_to_one_that_has_not_asked_keeps_the_epoch_open() -> None:
    ledger = epoch(4)
    ledger.consume(A, tuple(ledger.lease(A, (A, B), 9)))
    assert not any(ledger.held.values())
    assert not ledger.is_closed
    assert ledger.lease(A, (A, B), 1) == []


def test_what_a_departed_worker_held_is_dealt_again() -> None:
    ledger = epoch(8)
    ledger.consume(B, tuple(ledger.lease(B, (A, B), 1)))
    ledger.lease(B, (A, B), 1)
    ledger.give_back(B)
    ledger.give_back(B)

    assert use_up(ledger, (A,), (A,)) == {A: [(0, 2), (4, 6), (6, 8)]}
    assert ledger.is_closed


def test_what_is_given_back_comes_before_what_was_never_dealt() -> None:
    ledger = epoch(8)
    ledger.lease(B, (), 2)
    ledger.give_back(B)
    assert spans(ledger.lease(A, (), 3)) == [(0, 2), (2, 4), (4, 6)]


# All epochs


def test_seeds_repeat_and_differ_between_epochs_loaders_and_jobs() -> None:
    ledger = DataLedger(7)
    seeds = {
        ledger.seed_of("loader", 0),
        ledger.seed_of("loader", 1),
        ledger.seed_of("loader1", 0),
        DataLedger(8).seed_of("loader", 0),
    }
    assert len(seeds) == 4
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert ledger.seed_of("loader", 3) == DataLedger(7).seed_of("loader", 3)
    # Stored jobs rely on it: the order of an epoch follows from it.
    assert ledger.seed_of("loader", 0) == 2018300706124816098


def test_opening_an_epoch_again_is_the_same() -> None:
    ledger = DataLedger(7)
    first = ledger.open_epoch(A, "loader", 0, shape(4))
    assert ledger.open_epoch(B, "loader", 0, shape(4)) == first
    assert len(ledger.epochs()) == 1
    assert ledger.participants("loader") == {A, B}


def test_without_a_seed_an_order_is_drawn_from_what_the_first_one_sends() -> None:
    ledger = DataLedger(0)
    assert ledger.open_epoch(A, "loader", 0, shape(4), origin=b"a") == b"a"
    assert ledger.open_epoch(B, "loader", 0, shape(4), origin=b"b") == b"a"
    assert ledger.open_epoch(B, "loader", 1, shape(4), origin=b"b") == b"b"
    ledger.retire(A)
    assert ledger.open_epoch(A, "loader", 0, shape(4), origin=b"c") == b"a"
    assert ledger.open_epoch(A, "loader", 1, shape(4)) == b"b"


def test_a_seed_of_the_job_counts_whatever_workers_send() -> None:
    ledger = DataLedger(7)
    seed = ledger.open_epoch(A, "loader", 0, shape(4), origin=b"a")
    assert seed == ledger.seed_of("loader", 0)
    assert ledger.epochs()[0].origin == b""


def test_of_an_epoch_that_is_over_every_order_will_do_and_none_is_kept() -> None:
    ledger = DataLedger(0)
    ledger.open_epoch(A, "loader", 0, shape(2), origin=b"a")
    first = ledger.register_order(A, "loader", 0, 1)
    used = tuple(first.lease(A, (), 9))
    ledger.open_epoch(A, "loader", 1, shape(2), DataReport(used), origin=b"d")
    assert first.is_closed
    assert first.origin == b""
    assert ledger.open_epoch(B, "loader", 0, shape(2), origin=b"b") == b"b"
    assert ledger.register_order(B, "loader", 0, 2) is first


def test_a_job_has_so_many_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is kept: a worker that opens ever more would fill the coordinator."""
    monkeypatch.setattr(ledger_module, "EPOCH_COUNT_MAX", 2)
    ledger = DataLedger(7)
    for number in (0, 1):
        ledger.open_epoch(A, "loader", number, shape(4))
    with refused(ErrorReason.LIMIT_EXCEEDED, "more than the 2 that a job may open"):
        ledger.open_epoch(A, "another", 0, shape(4))
    assert len(ledger.epochs()) == 2
    assert ledger.participants("another") == frozenset()
    assert ledger.open_epoch(B, "loader", 1, shape(4)) == ledger.seed_of("loader", 1)


def test_nothing_is_kept_of_loaders_whose_workers_have_ended() -> None:
    ledger = DataLedger(7)
    ledger.enroll(A, ("shared", "own"))
    ledger.enroll(B, ("shared",))
    ledger.retire(A)
    assert ledger._participants == {"shared": {B}}


def test_what_an_order_is_drawn_from_is_bounded() -> None:
    ledger = DataLedger(0)
    largest = b"x" * ORDER_ORIGIN_BYTES_MAX
    assert ledger.open_epoch(A, "loader", 0, shape(4), origin=largest) == largest
    for number in (0, 1):
        with refused(ErrorReason.LIMIT_EXCEEDED, "16385 bytes, at most 16384"):
            ledger.open_epoch(B, "loader", number, shape(4), origin=largest + b"x")
    assert len(ledger.epochs()) == 1
    assert ledger.participants("loader") == {A}


@pytest.mark.parametrize("theirs", [shape(5), shape(4, 1), shape(4, drop_last=True)])
def test_an_epoch_of_another_shape_is_refused(theirs: EpochShape) -> None:
    ledger = DataLedger(7)
    ledger.open_epoch(A, "loader", 0, shape(4))
    with refused(ErrorReason.DATA_ORDER_MISMATCH, "b/1 has"):
        ledger.open_epoch(B, "loader", 0, theirs)
    assert ledger.participants("loader") == {A}


@pytest.mark.parametrize("theirs", [shape(-1), shape(4, 0)])
def test_an_epoch_that_is_none_is_refused(theirs: EpochShape) -> None:
    ledger = DataLedger(7)
    with refused(ErrorReason.MALFORMED_MESSAGE):
        ledger.open_epoch(A, "loader", 0, theirs)
    assert ledger.epochs() == ()


def test_another_order_is_refused_with_whose_it_differs_from() -> None:
    ledger = DataLedger(7)
    ledger.open_epoch(A, "loader", 0, shape(4))
    ledger.register_order(A, "loader", 0, 11)
    ledger.register_order(B, "loader", 0, 11)
    with refused(ErrorReason.DATA_ORDER_MISMATCH, r"c/1 draws .* than a/1"):
        ledger.register_order(C, "loader", 0, 12)


def test_an_order_of_an_epoch_that_nobody_opened_is_refused() -> None:
    with refused(ErrorReason.NOT_STARTED):
        DataLedger(7).register_order(A, "loader", 0, 11)


def test_opening_the_next_epoch_gives_back_what_is_left_of_the_one_before() -> None:
    ledger = DataLedger(7)
    ledger.open_epoch(A, "loader", 0, shape(6))
    ledger.open_epoch(B, "loader", 0, shape(6))
    first = ledger.register_order(A, "loader", 0, 1)
    used, _ = first.lease(A, (), 2)

    ledger.open_epoch(A, "loader", 1, shape(6), DataReport((used,)))

    assert spans(first.lease(B, (), 9)) == [(2, 4), (4, 6)]
    assert first.consumed_count == 2


def test_what_was_thrown_away_is_reported_as_an_epoch_opens() -> None:
    ledger = DataLedger(7)
    ledger.open_epoch(A, "loader", 0, shape(6))
    first = ledger.register_order(A, "loader", 0, 1)
    used, dropped, _ = first.lease(A, (), 3)
    ledger.open_epoch(A, "loader", 1, shape(6), DataReport((used,), (dropped,)))

    assert (first.consumed_count, first.dropped_count) == (2, 2)
    assert spans(list(first.returned)) == [(4, 6)]


def test_one_that_asks_for_data_takes_part_from_then_on() -> None:
    """After a restart nobody may know of it but itself."""
    ledger = DataLedger(7)
    ledger.open_epoch(A, "loader", 0, shape(4))
    ledger.register_order(B, "loader", 0, 1)
    assert ledger.participants("loader") == {A, B}
    assert ledger.enrolments() == (("loader", (A, B)),)


def test_a_worker_that_is_gone_gives_back_all_and_takes_part_no_more() -> None:
    ledger = DataLedger(7)
    ledger.enroll(B, ("loader", "other"))
    for number in (0, 1):
        ledger.open_epoch(A, "loader", number, shape(2))
        ledger.register_order(A, "loader", number, 1).lease(B, (), 1)
    ledger.retire(B)

    assert [spans(list(e.returned)) for e in ledger.epochs()] == [[(0, 2)], [(0, 2)]]
    assert ledger.participants("loader") == {A}
    assert ledger.participants("other") == frozenset()


def test_ranges_of_unknown_epochs_are_ignored() -> None:
    ledger = DataLedger(7)
    pieces = (DataRange("z", 9, 0, 1),)
    ledger.take_report(A, DataReport(pieces, pieces, skipped=pieces))
    assert ledger.epochs() == ()


def test_the_first_epoch_that_is_not_over_is_told() -> None:
    ledger = DataLedger(1)
    assert ledger.first_open("loader") == 0
    shape = EpochShape(position_count=2, batch_size=2, drop_last=False)
    for epoch in range(2):
        ledger.open_epoch(key("a"), "loader", epoch, shape)
    _, second = ledger.epochs()
    second.consume(key("a"), tuple(second.lease(key("a"), (), 1)))
    assert second.is_closed
    assert ledger.first_open("loader") == 0
    first, _ = ledger.epochs()
    first.consume(key("a"), tuple(first.lease(key("a"), (), 1)))
    assert ledger.first_open("loader") == 2
    assert ledger.first_open("other") == 0


def test_an_epoch_is_new_until_anything_of_it_is_trained() -> None:
    ledger = DataLedger(1)
    assert ledger.is_new("loader")
    shape = EpochShape(position_count=4, batch_size=2, drop_last=False)
    for number in range(2):
        ledger.open_epoch(key("a"), "loader", number, shape)
        opened = ledger.epochs()[number]
        ranges = opened.lease(key("a"), (), 2)
        assert ledger.is_new("loader")
        opened.consume(key("a"), tuple(ranges[:1]))
        assert not ledger.is_new("loader")
        opened.consume(key("a"), tuple(ranges[1:]))
        assert ledger.is_new("loader")


# How often a sample may have been pushed


def test_an_epoch_counts_once_and_what_is_handed_out_again_once_more() -> None:
    """Whatever becomes of a worker: it may have pushed what it was given."""
    data = DataLedger(1)
    data.open_epoch(A, "loader", 0, shape(8))
    (ledger,) = data.epochs()
    assert data.participation_count == 1
    ledger.lease(A, (), 2)
    ledger.lease(A, (), 1)  # the first two again: the answer was lost
    assert data.participation_count == 1
    ledger.retire(A)
    assert data.participation_count == 1  # nobody has it again yet
    ledger.lease(B, (), 1)
    assert data.participation_count == 2
    ledger.inherit(B, C)
    ledger.lease(C, (), 3)
    assert data.participation_count == 3
    data.open_epoch(C, "loader", 1, shape(8))
    data.open_epoch(C, "other", 0, shape(8))
    assert data.participation_count == 5
    assert data.copy().participation_count == 5


def test_what_was_dealt_and_not_handed_out_counts_once() -> None:
    ledger = epoch(8)
    ledger.lease(B, (A, B), 1)  # deals to A, too
    ledger.recall()
    ledger.lease(B, (), 4)
    ledger.consume(B, tuple(ledger.held[B]))
    assert ledger.is_closed
    assert ledger.participation_count == 1


def test_a_job_that_returns_counts_what_it_has_spent_and_open_epochs_again() -> None:
    data = DataLedger(1)
    for number in range(3):
        data.open_epoch(A, "loader", number, shape(2))
        if number < 2:
            ledger = data.epochs()[-1]
            ledger.consume(A, tuple(ledger.lease(A, (), 1)))
    before = data.copy()
    data.open_epoch(A, "loader", 3, shape(2))
    assert data.participation_count == 4

    carried = carried_over(data.participation_count, before.epochs())
    data.return_to(before.epochs(), carried)

    assert data.participation_count == 4 + 1
