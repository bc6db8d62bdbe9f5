"""What a shard keeps for one worker is one object, and goes with it."""

from psserver.shard.core.member_on_shard import (
    DEPARTED_COUNT_MAX,
    Era,
    MemberOnShard,
    MembersOnShard,
)
from pswire.membership import ClockChoice, Mode, Outcome
from tests.doubles.core_values import departure, key, push_id, trailer

A = key("a")
BSP = Era(Mode.BSP, 0)


def closed(workers: MembersOnShard, name: str = "a", last: int = 1) -> MemberOnShard:
    workers.close(departure(name, last_clock=last), BSP)
    return workers.of(key(name))


def test_looking_at_a_worker_remembers_nothing() -> None:
    workers = MembersOnShard()

    assert workers.window_of(A).done_sequence == 0
    assert workers.departure_of(A) is None
    assert workers.era_of(A) is None
    assert workers.entry_of(push_id("a", 1)) is None
    assert list(workers) == []


def test_incarnations_have_windows_of_their_own() -> None:
    workers = MembersOnShard()
    workers.of(A).window.open(1)
    workers.of(A).window.finish(1, Outcome.APPLIED)

    assert workers.of(A).window.done_sequence == 1
    assert workers.of(key("a/2")).window.done_sequence == 0
    assert not workers.of(key("b")).window.has_chunk(1, 3, 7)


def test_of_one_that_ended_only_its_pushes_are_kept() -> None:
    workers = MembersOnShard()
    member = workers.of(A)
    member.window.open(1)
    member.note_push(1, 5)
    member.idle_sequence = member.committed_sequence = member.seen_update = 2
    member.staged = ClockChoice(1, (A,))
    member.ready = 1, 1
    member.numbered[1] = 1
    member.newest["optimizer"] = trailer([])
    member.first_update = 3

    kept = closed(workers)

    assert kept.departure == departure("a", last_clock=1)
    assert kept == MemberOnShard(member.window, departure("a", last_clock=1), BSP)
    assert workers.departure_of(A) == departure("a", last_clock=1)


def test_who_has_ended_for_longest_is_forgotten_first_but_not_in_the_middle() -> None:
    workers = MembersOnShard()
    workers.of(key("there"))
    for number in range(DEPARTED_COUNT_MAX + 3):
        closed(workers, f"w{number}")

    workers.forget_departed({key("w1")})

    known = [str(each.window.worker) for each in workers]
    assert known[:3] == ["there/1", "w1/1", "w3/1"]
    assert len(known) == DEPARTED_COUNT_MAX + 2


def test_a_second_record_that_names_an_end_changes_neither_era_nor_order() -> None:
    workers = MembersOnShard()
    closed(workers, "a")
    closed(workers, "b")

    workers.close(departure("a", last_clock=1), Era(Mode.ASP, 7))

    assert workers.era_of(A) == BSP
    assert [each.window.worker for each in workers] == [A, key("b")]
