"""What one start of a worker decides, event by event."""

from dataclasses import replace

import pytest

from pswire.membership import (
    Departure,
    FenceKind,
    Member,
    Mode,
    Outcome,
    Record,
    WorkerKey,
)
from psworker.errors import EvictedError, StalenessError
from psworker.member.core import (
    Begin,
    Evicted,
    Join,
    MemberCore,
    Missed,
    Pull,
    Seed,
    Settled,
    outcome_of_closed,
    outcome_of_done,
    was_done,
)
from psworker.transport.values import PushReply, SeedOrder

ME = WorkerKey("w1", 1)
OTHER = WorkerKey("w0", 1)
ORDER = SeedOrder(101, ())


def member(worker: WorkerKey, base_clock: int, base_sequence: int = 0) -> Member:
    return Member(
        worker=worker, rank=0, base_clock=base_clock, base_sequence=base_sequence
    )


def record(generation: int, *members: Member, **more: object) -> Record:
    made = Record(
        fence_number=generation + 100,
        generation=generation,
        kind=FenceKind.MEMBERSHIP,
        members=members,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def reply(outcome: Outcome = Outcome.APPLIED, **more: object) -> PushReply:
    made = PushReply(
        outcome=outcome,
        shard_incarnation=1,
        generation=1,
        version=9,
        frontier=8,
        clock=8,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def joined(base_clock: int = 7) -> MemberCore:
    core = MemberCore(ME)
    core.take_record(
        record(
            1,
            member(OTHER, 2),
            member(ME, base_clock),
        )
    )
    return core


def seeder() -> MemberCore:
    """A worker that has asked for a place and is ordered to seed."""
    core = MemberCore(ME)
    core.want_place()
    core.joined(Join(1))
    core.order = ORDER
    return core


def begin_of(core: MemberCore) -> Begin:
    begin = core.next_to_join()
    assert isinstance(begin, Begin)
    return begin


def test_a_joiner_pulls_the_values_of_the_clock_before_its_first_push() -> None:
    core = MemberCore(ME)
    core.take_record(record(1, member(ME, 7)))

    assert begin_of(core) == Begin(record(1, member(ME, 7)), member(ME, 7), Pull(1, 7))
    assert core.next_push().clock == 8


def test_a_joiner_asks_once_and_again_when_the_coordinator_was_started_anew() -> None:
    core = MemberCore(ME)
    assert core.next_to_join() is None, "the script has not asked"

    core.want_place()
    question = core.next_to_join()
    core.view_count += 1  # the first view
    assert core.next_to_join() == question == Join(1)
    core.joined(Join(1))
    assert core.next_to_join() is None

    core.view_count += 1
    assert core.next_to_join() == Join(2)
    core.joined(Join(2))
    assert core.next_to_join() is None


def test_a_seeder_whose_coordinator_was_started_anew_asks_before_it_seeds_on() -> None:
    core = seeder()
    assert core.next_to_join() == Seed(ORDER)

    core.view_count = 2
    assert core.next_to_join() == Join(2)
    core.joined(Join(2))
    assert core.next_to_join() == Seed(ORDER), "until it has another, or none"


def test_an_order_to_seed_stands_until_it_is_carried_out() -> None:
    core = seeder()
    assert core.next_to_join() == core.next_to_join() == Seed(ORDER)

    core.seeded(ORDER)
    assert core.next_to_join() is None

    core.order = SeedOrder(102, ())
    assert core.next_to_join() == Seed(SeedOrder(102, ()))


def test_an_order_to_seed_is_over_when_another_worker_seeds_or_has() -> None:
    core = seeder()
    assert not core.is_over(ORDER)
    core.order = None
    assert core.is_over(ORDER)
    assert core.next_to_join() is None

    core.take_record(record(1, member(ME, 7)))
    assert not core.is_over(ORDER)
    core.take_record(record(2, member(ME, 7)))
    assert core.is_over(ORDER)


@pytest.mark.parametrize(("generation", "pull"), [(1, None), (2, Pull(2, 7))])
def test_a_joiner_whose_values_the_job_starts_with_pulls_nothing(
    generation: int, pull: Pull | None
) -> None:
    core = seeder()
    core.seeded(ORDER)

    core.take_record(record(generation, member(ME, 7)))

    assert begin_of(core).pull == pull


def test_a_script_that_asks_again_brings_values_that_were_not_seeded() -> None:
    core = seeder()
    core.seeded(ORDER)
    core.want_place()
    core.joined(Join(1))
    assert core.next_to_join() == Seed(ORDER)

    core.take_record(record(1, member(ME, 7)))
    assert begin_of(core).pull == Pull(1, 7)


def test_pushes_are_numbered_and_each_is_of_the_clock_of_the_newest_record() -> None:
    core = joined()

    first = core.next_push()
    core.acknowledge(1)
    core.take_record(record(2, member(ME, 20, 1)))
    second = core.next_push()

    assert (first.generation, first.sequence, first.clock) == (1, 1, 8)
    assert (second.generation, second.sequence, second.clock) == (2, 2, 21)
    assert second.sequence_unacknowledged_min == 2
    assert (first.is_of_longest, second.is_of_longest) == (False, True)


def test_a_start_that_joins_numbers_its_pushes_anew() -> None:
    """Also where it has settled those of another: a group's leader that comes late."""
    core = MemberCore(ME)
    core.acknowledge(6)
    core.want_place()
    core.joined(Join(1))
    core.take_record(record(1, member(ME, 7)))

    assert core.next_push().sequence == 1


def test_an_older_record_changes_nothing() -> None:
    core = joined()

    assert core.take_record(record(0)) is None
    assert core.next_push().generation == 1


def test_a_worker_without_a_place_has_no_push() -> None:
    with pytest.raises(EvictedError, match="worker w1 is no member of the job"):
        MemberCore(ME).next_push()


def test_a_record_without_its_place_evicts_a_member_once() -> None:
    core = joined()
    gone = record(
        2,
        departures=(
            Departure(
                member=member(ME, 7),
                last_clock=9,
                evicted=True,
            ),
        ),
    )

    assert core.take_record(gone) == Evicted(9)
    assert core.take_record(replace(gone, generation=3)) is None


def test_a_record_that_forgot_its_departure_evicts_a_member_too() -> None:
    assert joined().take_record(record(2)) == Evicted(None)


def test_a_worker_that_waits_for_its_place_is_not_evicted() -> None:
    core = MemberCore(ME)

    assert core.take_record(record(1, member(OTHER, 2))) is None


def test_a_push_that_all_shards_have_is_settled_once_it_is_acknowledged() -> None:
    core = joined()

    concluded = core.conclude(1, [reply(), reply(Outcome.DUPLICATE, generation=3)])

    assert isinstance(concluded, Settled)
    assert concluded.result.outcome == "applied"
    assert core.generation_heard == 3
    assert core.sequence == 0
    core.acknowledge(1)
    assert core.sequence == 1


def test_a_push_that_a_shard_has_skipped_is_skipped() -> None:
    concluded = joined().conclude(1, [reply(Outcome.SKIPPED), reply(Outcome.DUPLICATE)])

    assert isinstance(concluded, Settled)
    assert concluded.result.skipped


def test_after_a_push_that_was_dropped_it_goes_on_after_the_closed_clocks() -> None:
    core = joined()
    dropped = reply(Outcome.DROPPED, closed_sequence=4)

    concluded = core.conclude(1, [reply(Outcome.DROPPED), dropped])

    assert concluded == Missed(1, 4)
    assert core.catch_up(Missed(1, 4)) == Pull(1, 11)
    assert core.next_push().sequence == 5


def test_where_some_shards_have_closed_a_later_clock_with_it_it_ends_there() -> None:
    """As the leader of a host group before has sent it: it must not be sent twice."""
    core = joined()
    counted = reply(Outcome.DUPLICATE, closed_sequence=6)
    about_to = reply(Outcome.DROPPED, closed_sequence=5)

    assert core.conclude(1, [counted, about_to]) == Missed(1, 5)


def test_clocks_are_not_counted_by_a_record_older_than_that_of_the_shards() -> None:
    """The clock of a push depends on it: a change of the mode counts anew."""
    core = joined()
    missed = core.conclude(1, [reply(Outcome.DROPPED, generation=2)])
    assert isinstance(missed, Missed)

    assert core.catch_up(missed) is None
    assert core.sequence == 0
    core.take_record(record(2, member(ME, 30, 1)))

    assert core.catch_up(missed) == Pull(2, 30)


def test_catching_up_ends_with_an_eviction() -> None:
    core = joined()
    core.take_record(record(2))

    with pytest.raises(EvictedError):
        core.catch_up(Missed(2, 1))


def test_values_older_than_the_mode_allows_are_refused() -> None:
    core = joined()
    core.check(0, reply())

    with pytest.raises(StalenessError):
        core.check(0, reply(frontier=7))
    core.check(0, reply(frontier=7, mode=Mode.ASP, generation=2))


@pytest.mark.parametrize(
    ("done", "counts"), [([4, 4], True), ([3, 3], True), ([2, 2], False)]
)
def test_a_push_under_way_counts_as_far_as_the_record_says(
    done: list[int], counts: bool
) -> None:
    assert was_done(3, done) is counts


@pytest.mark.parametrize(
    ("outcomes", "outcome"),
    [
        ([Outcome.DUPLICATE, Outcome.DUPLICATE], "applied"),
        ([Outcome.APPLIED, Outcome.DUPLICATE], "applied"),
        ([Outcome.SKIPPED, Outcome.SKIPPED], "skipped"),
        ([Outcome.DROPPED, Outcome.DROPPED], "dropped"),
    ],
)
def test_a_push_that_counts_was_applied_or_thrown_away_as_the_shards_say(
    outcomes: list[Outcome], outcome: str
) -> None:
    assert outcome_of_done(outcomes) == outcome


def test_a_push_that_shards_do_not_answer_was_skipped_for_itself_alone() -> None:
    assert outcome_of_closed(is_finite=True) is Outcome.APPLIED
    assert outcome_of_closed(is_finite=False) is Outcome.SKIPPED
