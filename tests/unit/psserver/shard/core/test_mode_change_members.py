"""Members that come and go while a change of mode is under way on one shard."""

from psserver.shard.core.effects import ApplyChunk, RefusePush
from pswire.membership import Mode
from tests.doubles.core_values import departure, key, push_id, trailer
from tests.doubles.driven_shard import DrivenShard, asp, bsp, far_apart


def unsettled() -> DrivenShard:
    """To BSP after clock 5, and push 2 of `b` is under way."""
    shard = asp("a", "b", chunks=(0, 1))
    for sequence in range(1, 6):
        shard.step("a", sequence, [0, 1])
    shard.step("b", 1, [0, 1])
    shard.send_trailer(push_id("b", 2), trailer([0, 1]))
    shard.send_chunk(push_id("b", 2), 0)
    shard.apply_all()
    shard.change(Mode.BSP, 5, bases={"a": 5, "b": 5}, sequences={"a": 5, "b": 2})
    assert not shard.core.clocks.is_settled
    return shard


def test_an_eviction_settles_a_change_that_waits_for_the_dead() -> None:
    shard = unsettled()
    shard.push("a", 6, chunks=[0, 1])
    assert shard.apply_all() == []
    gone = departure("b", base_clock=5, base_sequence=2, last_clock=4, evicted=True)
    shard.change(
        Mode.BSP,
        5,
        bases={"a": 5},
        sequences={"a": 5},
        departures=(gone,),
        steps=1,
    )
    shard.apply_all()

    assert [each.push for each in shard.of(RefusePush)] == [push_id("b", 2)]
    assert shard.core.state.torn_step_count == 1
    assert [clock for clock, _ in shard.clock_orders()] == [6, 6]
    assert shard.replies()[push_id("a", 6)].version == 7


def test_the_complete_last_push_of_the_dead_comes_before_the_first_clock() -> None:
    shard = far_apart()
    shard.change(Mode.BSP, 5, bases={"a": 5, "b": 5}, sequences={"a": 5, "b": 2})
    shard.freeze(3)
    shard.push("b", 2, chunks=[0])
    shard.push("a", 6, chunks=[0])
    gone = departure("b", base_clock=5, base_sequence=2, last_clock=5, evicted=True)
    shard.change(
        Mode.BSP,
        5,
        bases={"a": 5},
        sequences={"a": 5},
        departures=(gone,),
        steps=2,
    )
    shard.apply_all()

    orders = shard.of(ApplyChunk)[-2:]
    assert [(o.pusher, o.clock) for o in orders] == [(key("b"), 5), (None, 6)]
    assert shard.core.clocks.version == 8
    assert shard.core.state.torn_step_count == 0


def test_a_joiner_during_a_change_waits_for_what_is_under_way() -> None:
    shard = unsettled()
    bases = {"a": 5, "b": 5, "c": 5}
    shard.change(Mode.BSP, 5, bases=bases, sequences={"a": 5, "b": 2})
    assert not shard.core.admits_pull(key("c"), 5)
    assert shard.core.clocks.frontier == 4
    shard.send_chunk(push_id("b", 2), 1)
    shard.apply_all()
    assert shard.core.admits_pull(key("c"), 5)

    for name, sequence in (("a", 6), ("b", 3), ("c", 1)):
        shard.step(name, sequence, [0])

    assert shard.clock_orders() == [(6, "abc")]
    assert shard.core.clocks.version == 10


def test_a_departure_of_the_old_mode_told_again_is_still_of_the_old_mode() -> None:
    """It ended in ASP, and another shard had not applied its last push."""
    shard = asp("a", "b")
    shard.step("a", 1, [0])
    shard.freeze(2)
    shard.push("b", chunks=[0])
    gone = (departure("b", last_clock=1, evicted=True),)
    shard.change(Mode.ASP, 0, bases={"a": 0}, departures=gone, steps=1)
    shard.freeze(3)
    shard.apply_all()
    shard.change(
        Mode.BSP,
        1,
        bases={"a": 1},
        sequences={"a": 1},
        departures=gone,
        steps=1,
    )

    assert shard.applied() == [("a", 1, 0), ("b", 1, 0)]
    assert shard.core.clocks.version == 2
    shard.step("a", 2, [0])
    assert shard.clock_orders() == [(2, "a")]


def test_a_departure_of_bsp_told_again_in_asp_is_still_of_bsp() -> None:
    shard = bsp("a", "b")
    shard.send_trailer(push_id("a"), trailer([0]))
    shard.push("b", chunks=[0])
    gone = (departure("b", last_clock=1, evicted=True),)
    shard.change(Mode.BSP, 0, bases={"a": 0}, departures=gone, steps=1)
    shard.change(Mode.ASP, 1, bases={"a": 0}, departures=gone, steps=1)
    shard.push("a", chunks=[0])
    shard.apply_all()

    assert shard.clock_orders() == [(1, "ab")]
    assert shard.applied() == []
    assert shard.core.clocks.version == 2


def test_a_report_says_whether_the_mode_before_is_over() -> None:
    shard = unsettled()
    shard.freeze(8)
    shard.core.abort_fence(8)
    shard.send_chunk(push_id("b", 2), 1)
    shard.apply_all()
    shard.freeze(9)

    assert [report.is_settled for report in shard.reports()][-2:] == [False, True]
