"""Changes of mode on one shard: nothing lost, nothing twice, no clock goes back."""

import pytest

from psserver.shard.core.effects import ApplyChunk, ContributionAwaited, Finish
from pswire.awaited import Awaited
from pswire.membership import FenceKind, Mode, Outcome
from tests.doubles.core_values import departure, key, push_id, record, trailer
from tests.doubles.driven_shard import DrivenShard, asp, bsp, far_apart

# From BSP


def test_a_clock_that_any_shard_has_a_trailer_of_is_finished_in_bsp() -> None:
    shard = bsp("a", "b")
    shard.push("a", chunks=[0])
    shard.change(Mode.ASP, 1, bases={"a": 0, "b": 0})
    assert shard.apply_all() == []

    shard.step("b", 1, [0])

    assert shard.clock_orders() == [(1, "ab")]
    assert {reply.mode for reply in shard.replies().values()} == {Mode.ASP}
    shard.step("b", 2, [0])
    shard.step("b", 3, [0])
    assert shard.applied() == [("b", 2, 0), ("b", 3, 0)]


def test_a_clock_of_which_only_another_shard_has_a_trailer_is_finished_too() -> None:
    shard = bsp("a", "b")
    shard.change(Mode.ASP, 1, bases={"a": 0, "b": 0})
    shard.step("b", 1, [0])
    assert shard.of(ApplyChunk) == []
    shard.step("a", 1, [0])

    assert shard.clock_orders() == [(1, "ab")]


def test_a_clock_of_which_no_shard_has_a_trailer_is_the_new_modes() -> None:
    shard = bsp("a", "b")
    shard.send_chunk(push_id("a"), 0)
    shard.change(Mode.ASP, 0, bases={"a": 0, "b": 0})
    shard.send_trailer(push_id("a"), trailer([0]))

    assert shard.applied() == [("a", 1, 0)]


def test_the_bound_of_ssp_holds_from_the_last_clock_of_bsp_on() -> None:
    shard = bsp("a", "b")
    for name in "ab":
        shard.push(name, chunks=[0])
    shard.apply_all()
    shard.change(Mode.SSP, 1, bases={"a": 0, "b": 0}, bound=1)
    shard.step("a", 2, [0])
    assert ("a", 2) in shard.answered()
    shard.step("a", 3, [0])
    assert ("a", 3) not in shard.answered()

    shard.step("b", 2, [0])

    assert shard.replies()[push_id("a", 3)].frontier == 2


def test_a_push_beyond_the_last_clock_of_bsp_waits_for_it() -> None:
    """Another shard has finished it, and answered."""
    shard = bsp("a", "b", "c")
    gone = departure("c", last_clock=1, evicted=True)
    shard.push("c", chunks=[0])
    shard.change(
        Mode.ASP,
        1,
        bases={"a": 0, "b": 0},
        departures=(gone,),
        steps=1,
    )
    shard.change(Mode.ASP, 1, bases={"a": 0, "b": 0, "d": 1}, steps=1)
    shard.push("d", 1, chunks=[0])
    assert shard.applied() == []

    for name in "ab":
        shard.push(name, chunks=[0])
    shard.apply_all()

    assert shard.clock_orders() == [(1, "abc")]
    assert shard.applied() == [("d", 2, 0)]


def test_a_worker_that_owes_the_last_clock_of_bsp_may_pull_before_it() -> None:
    """It has just joined: without values it would never push."""
    shard = bsp("a")
    shard.step("a", 1, [0])
    shard.install(record({"a": 0, "b": 1}, generation=2))
    shard.push("a", 2, chunks=[0])
    shard.change(Mode.ASP, 2, bases={"a": 0, "b": 1})

    assert shard.core.admits_pull(key("b"), 1)
    assert not shard.core.admits_pull(key("a"), 2)
    shard.step("b", 1, [0])
    assert shard.core.admits_pull(key("a"), 2)


@pytest.mark.parametrize("last", [0, 1])
def test_the_last_clock_of_bsp_goes_on_without_whoever_is_evicted(last: int) -> None:
    shard = bsp("a", "b")
    shard.send_trailer(push_id("a"), trailer([0]))
    if last:
        shard.push("b", chunks=[0])
    shard.change(Mode.ASP, 1, bases={"a": 0, "b": 0})
    gone = departure("b", last_clock=last, evicted=True)
    shard.change(Mode.ASP, 1, bases={"a": 0}, departures=(gone,), steps=last)
    shard.push("a", chunks=[0])
    shard.apply_all()

    assert shard.clock_orders() == [(1, "ab" if last else "a")]
    assert shard.core.clocks.version == 1 + last


def test_when_nobody_is_left_the_last_clock_of_bsp_is_passed() -> None:
    shard = bsp("a")
    shard.send_trailer(push_id("a"), trailer([0]))
    shard.change(Mode.ASP, 1, bases={"a": 0})
    gone = departure("a", last_clock=0, evicted=True)
    shard.change(Mode.ASP, 1, bases={}, departures=(gone,))
    shard.change(Mode.ASP, 1, bases={"b": 1})
    shard.step("b", 1, [0])

    assert shard.applied() == [("b", 2, 0)]
    assert shard.core.clocks.frontier == 2
    assert shard.core.clocks.version == 1


# To BSP


def test_clocks_that_are_far_apart_meet_and_the_version_stays() -> None:
    shard = far_apart()
    shard.change(Mode.BSP, 5, bases={"a": 5, "b": 5}, sequences={"a": 5, "b": 1})

    assert shard.core.clocks.frontier == 5
    assert shard.core.clocks.version == 6
    shard.push("b", 2, chunks=[0])
    assert shard.apply_all() == []
    shard.step("a", 6, [0])

    assert shard.clock_orders() == [(6, "ab")]
    reply = shard.replies()[push_id("b", 2)]
    assert (reply.clock, reply.frontier, reply.version, reply.mode) == (
        6,
        6,
        8,
        Mode.BSP,
    )


def test_a_push_of_the_old_mode_under_way_is_applied_by_itself() -> None:
    """Another shard has its trailer, this one has nothing of it yet."""
    shard = far_apart()
    shard.change(Mode.BSP, 5, bases={"a": 5, "b": 5}, sequences={"a": 5, "b": 2})
    assert shard.core.clocks.frontier == 4
    shard.push("a", 6, chunks=[0])
    assert shard.apply_all() == []

    shard.step("b", 2, [0])

    assert shard.applied()[-1] == ("b", 5, 0)
    reply = shard.replies()[push_id("b", 2)]
    assert (reply.outcome, reply.clock, reply.frontier, reply.version) == (
        Outcome.APPLIED,
        5,
        5,
        7,
    )
    shard.step("b", 3, [0])
    assert shard.clock_orders() == [(6, "ab")]


def test_bsp_begins_although_one_ended_that_has_pushed_its_first_clock() -> None:
    """That push is of the clock that comes next, and not one that comes before it."""
    shard = asp("a", "b")
    shard.send_trailer(push_id("a"), trailer([0]))
    shard.change(Mode.BSP, 1, bases={"a": 1, "b": 1}, sequences={"a": 1, "b": 0})
    shard.push("b", 1, chunks=[0])
    gone = departure("b", base_clock=1, last_clock=2, evicted=True)
    shard.change(
        Mode.BSP,
        1,
        bases={"a": 1},
        sequences={"a": 1},
        departures=(gone,),
        steps=1,
    )
    assert shard.apply_all() == []

    shard.send_chunk(push_id("a"), 0)
    shard.apply_all()
    shard.step("a", 2, [0])

    assert shard.answered() == [("a", 1), ("a", 2), ("b", 1)]
    assert shard.clock_orders() == [(2, "ab")]
    assert shard.core.clocks.version == 3


def test_an_answer_of_the_old_mode_waits_for_all_that_is_under_way() -> None:
    """In BSP all have the same values, from the first clock on."""
    shard = far_apart()
    shard.forget()
    shard.push("a", 6, chunks=[0])
    shard.freeze(2)
    shard.apply_all()
    shard.change(Mode.BSP, 6, bases={"a": 6, "b": 6}, sequences={"a": 6, "b": 2})
    assert shard.answered() == []
    assert not shard.core.admits_values(push_id("a", 6))
    assert not shard.core.admits_pull(key("a"), 6)

    shard.step("b", 2, [0])

    assert sorted(shard.answered()) == [("a", 6), ("b", 2)]
    assert {reply.frontier for reply in shard.replies().values()} == {6}


def test_an_answer_that_was_lost_is_not_given_again_ahead_of_the_new_mode() -> None:
    shard = far_apart()
    shard.change(Mode.BSP, 5, bases={"a": 5, "b": 5}, sequences={"a": 5, "b": 2})
    shard.forget()
    shard.push("a", 5, chunks=[0], weight=1.0)
    assert shard.core.applied_chunks(push_id("a", 5)) == frozenset()
    assert shard.core.reply_to(push_id("a", 5)) is None
    assert shard.answered() == []

    shard.step("b", 2, [0])

    reply = shard.replies()[push_id("a", 5)]
    assert (reply.outcome, reply.clock, reply.frontier) == (Outcome.DUPLICATE, 5, 5)


def test_whoever_the_new_mode_waits_for_is_named() -> None:
    shard = far_apart()
    shard.change(Mode.BSP, 5, bases={"a": 5, "b": 5}, sequences={"a": 5, "b": 2})
    assert shard.core.awaited(1_000) == [Awaited("b", 4, 1_000)]
    assert shard.core.waiting_reason == ("the pushes of the mode before to be applied")
    assert shard.core.clocks.is_settled is False


def test_idle_workers_are_not_asked_for_a_push_of_the_old_mode() -> None:
    shard = far_apart()
    shard.core.await_contribution(key("a"), 6, 0)
    shard.change(Mode.BSP, 5, bases={"a": 5, "b": 5}, sequences={"a": 5, "b": 2})
    assert shard.of(ContributionAwaited) == []
    shard.step("b", 2, [0])
    assert shard.of(ContributionAwaited) == []

    shard.push("b", 3, chunks=[0])

    (asked,) = shard.of(ContributionAwaited)
    assert (asked.worker, asked.clock) == (key("a"), 6)


def test_a_push_that_is_blocked_by_the_bound_is_released_by_the_change() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0], mode=Mode.SSP, staleness_bound=1)
    for sequence in (1, 2):
        shard.step("a", sequence, [0])
    assert shard.answered() == [("a", 1)]
    shard.change(Mode.BSP, 2, bases={"a": 2, "b": 2}, sequences={"a": 2, "b": 0})

    assert shard.answered() == [("a", 1), ("a", 2)]
    assert shard.replies()[push_id("a", 2)].mode is Mode.BSP


def test_whoever_never_pushed_in_the_old_mode_meets_the_others() -> None:
    shard = far_apart()
    shard.install(record({"a": 0, "b": 0, "c": 1}, generation=2, mode=Mode.ASP))
    bases = dict.fromkeys("abc", 5)
    shard.change(Mode.BSP, 5, bases=bases, sequences={"a": 5, "b": 1, "c": 0})
    for name, sequence in (("a", 6), ("b", 2), ("c", 1)):
        shard.step(name, sequence, [0])

    assert shard.clock_orders() == [(6, "abc")]
    assert shard.core.clocks.version == 9


def test_a_header_under_the_old_numbers_is_translated() -> None:
    shard = far_apart()
    shard.change(Mode.BSP, 5, bases={"a": 5, "b": 5}, sequences={"a": 5, "b": 1})

    assert shard.core.open_push(push_id("b", 2), 2, 0, generation=1) is not None


# Between SSP and ASP


def test_a_bound_that_begins_finds_clocks_that_meet() -> None:
    shard = far_apart()
    shard.change(
        Mode.SSP,
        5,
        bases={"a": 5, "b": 5},
        sequences={"a": 5, "b": 1},
        bound=1,
    )
    assert shard.core.clocks.frontier == 5
    shard.step("a", 6, [0])
    assert shard.replies()[push_id("a", 6)].clock == 6
    shard.step("a", 7, [0])
    assert push_id("a", 7) not in shard.replies()

    shard.step("b", 2, [0])

    reply = shard.replies()[push_id("a", 7)]
    assert (reply.clock, reply.frontier, reply.version) == (7, 6, 9)


def test_a_push_under_way_counts_as_not_pushed_to_the_bound_that_begins() -> None:
    shard = far_apart()
    shard.change(
        Mode.SSP,
        5,
        bases={"a": 5, "b": 5},
        sequences={"a": 5, "b": 2},
        bound=0,
    )
    assert shard.core.clocks.frontier == 4
    assert not shard.core.admits_pull(key("a"), 5)
    shard.step("b", 2, [0])
    assert shard.core.admits_pull(key("a"), 5)


def test_an_end_of_the_bound_releases_those_it_blocked() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0], mode=Mode.SSP, staleness_bound=0)
    shard.step("a", 1, [0])
    assert shard.answered() == []
    shard.change(Mode.ASP, 1, bases={"a": 1, "b": 1}, sequences={"a": 1, "b": 0})

    assert shard.answered() == [("a", 1)]


# There and back


def test_no_frontier_and_no_version_goes_back_over_any_changes() -> None:
    shard = bsp("a", "b")
    told = []

    def push(name: str, sequence: int) -> None:
        shard.step(name, sequence, [0])
        told.append((shard.core.clocks.frontier, shard.core.clocks.version))

    push("a", 1)
    shard.change(Mode.ASP, 1, bases={"a": 0, "b": 0})
    push("b", 1)
    for sequence in (2, 3, 4):
        push("a", sequence)
    shard.change(
        Mode.SSP,
        4,
        bases={"a": 4, "b": 4},
        sequences={"a": 4, "b": 2},
        bound=2,
    )
    push("a", 5)
    push("b", 2)
    push("b", 3)
    push("b", 4)
    shard.change(Mode.BSP, 6, bases={"a": 6, "b": 6}, sequences={"a": 5, "b": 4})
    push("b", 5)
    push("a", 6)
    shard.change(Mode.ASP, 7, bases={"a": 6, "b": 6}, sequences={"a": 5, "b": 4})
    push("a", 7)

    assert told == sorted(told)
    assert told[-1] == (7, 12)
    assert shard.core.clocks.version == 7 + 5
    assert len(shard.answered()) == 12
    assert len(shard.of(ApplyChunk)) == 12 - 2  # two clocks of BSP with two pushes


def test_a_mode_fence_without_a_change_changes_nothing() -> None:
    shard = asp("a", "b")
    shard.freeze(2, FenceKind.MODE)
    shard.install(record({"a": 0, "b": 0}, generation=2, mode=Mode.ASP))
    shard.step("a", 1, [0])
    assert shard.answered() == [("a", 1)]


def test_a_job_may_begin_in_any_mode() -> None:
    for mode, count in ((Mode.BSP, 0), (Mode.SSP, 1), (Mode.ASP, 1)):
        shard = DrivenShard({"a": 0, "b": 0}, [0], mode=mode, staleness_bound=1)
        shard.push("a", chunks=[0])
        assert len(shard.of(ApplyChunk)) == count


def test_the_first_answer_of_bsp_brings_all_values_and_later_ones_what_changed() -> (
    None
):
    """What a worker was given in ASP may lack what others have changed since."""
    shard = far_apart()
    shard.change(Mode.BSP, 5, bases={"a": 5, "b": 5}, sequences={"a": 5, "b": 1})
    shard.forget()

    for sequences in ((6, 2), (7, 3)):
        shard.push("a", sequences[0], chunks=[0])
        shard.push("b", sequences[1], chunks=[0])
        shard.apply_all()

    assert [each.needs_all for each in shard.of(Finish)] == [True, True, False, False]


def test_bsp_waits_for_pushes_of_a_mode_that_began_after_the_same_clock() -> None:
    shard = asp("a", "b")
    shard.push("a", chunks=[0])
    met = {"a": 1, "b": 1}
    shard.apply_all()
    shard.change(Mode.SSP, 1, bases=met, sequences={"a": 1, "b": 1}, bound=1)
    shard.change(Mode.BSP, 1, bases=met, sequences={"a": 1, "b": 1})

    assert not shard.core.clocks.is_settled
    assert shard.core.clocks.next_clock is None

    shard.step("b", 1, [0])

    assert shard.core.clocks.is_settled
    assert shard.core.clocks.next_clock == 2
