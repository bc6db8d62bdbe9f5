"""What a mode means, who is the longest member, what a record says of members."""

from dataclasses import replace

import pytest

from pswire.membership import (
    Departure,
    FenceKind,
    Member,
    Mode,
    Record,
    WorkerKey,
    longest_of,
)


def member(name: str, base_clock: int, base_sequence: int = 0) -> Member:
    return Member(
        worker=WorkerKey(name, 1),
        rank=0,
        base_clock=base_clock,
        base_sequence=base_sequence,
    )


def record(*members: Member) -> Record:
    return Record(
        fence_number=1, generation=1, kind=FenceKind.MEMBERSHIP, members=members
    )


@pytest.mark.parametrize(
    ("members", "longest"),
    [
        ((member("a", 3), member("b", 1)), "b"),
        ((member("b", 1), member("a", 1)), "a"),
        # A change of the mode set its base anew, at clock 5, for its third push.
        ((member("a", 3), member("b", 5, 3)), "b"),
    ],
)
def test_the_longest_member_comes_first_then_the_lowest_id(
    members: tuple[Member, ...], longest: str
) -> None:
    assert longest_of(members).worker.worker_id == longest
    found = [m.worker for m in members if record(*members).has_longest(m.worker)]
    assert found == [WorkerKey(longest, 1)]


def test_a_record_without_members_has_no_longest() -> None:
    assert record().longest is None
    assert not record().has_longest(WorkerKey("w0", 1))


def test_who_takes_part_in_a_clock_is_the_same_before_and_after_a_record() -> None:
    stays, joins, goes = (
        replace(member(name, base), rank=rank)
        for rank, (name, base) in enumerate([("a", 0), ("b", 7), ("c", 0)])
    )
    before = record(stays, goes)
    after = replace(
        record(stays, joins),
        departures=(Departure(member=goes, last_clock=5, evicted=False),),
    )
    assert before.ranks_at(5) == after.ranks_at(5) == (0, 2)
    assert after.ranks_at(6) == after.ranks_at(7) == (0,)
    assert after.ranks_at(8) == (0, 1)
    assert replace(after, mode=Mode.ASP).ranks_at(5) == (0, 1)


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_has_rules_and_a_label(mode: Mode) -> None:
    assert Mode.labelled(mode.label) is mode
    assert mode.label in Mode.labels()
    # A user's bound that no pull waits for would promise what nobody keeps.
    assert mode.rules.bounds_lag or not mode.rules.takes_bound


@pytest.mark.parametrize(
    ("mode", "lag_max"), [(Mode.BSP, 0), (Mode.SSP, 3), (Mode.ASP, None)]
)
def test_how_far_values_may_lag(mode: Mode, lag_max: int | None) -> None:
    assert mode.rules.lag_max(3) == lag_max


def test_only_ssp_has_a_bound_of_the_user() -> None:
    assert [mode.rules.bound_of(3) for mode in Mode] == [0, 3, 0, 0]


def test_only_bsp_and_quorum_have_clocks_and_only_bsp_rounds() -> None:
    clocked = [mode for mode in Mode if mode.rules.is_clocked]
    dealing = [mode for mode in Mode if mode.rules.deals_rounds]
    assert clocked == [Mode.BSP, Mode.QUORUM]
    assert dealing == [Mode.BSP]
