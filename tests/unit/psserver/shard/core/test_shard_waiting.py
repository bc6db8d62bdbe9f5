"""Whom a clock waits for, and workers that have no data for it."""

from psserver.shard.core.effects import (
    ContributionAwaited,
)
from pswire.awaited import NOT_KNOWN, Awaited
from pswire.reasons import ErrorReason
from tests.doubles.core_values import key, push_id
from tests.doubles.driven_shard import DrivenShard
from tests.refusals import refused


def test_workers_without_data_are_asked_once_the_clock_needs_only_them() -> None:
    shard = DrivenShard({"a": 0, "b": 0, "c": 0}, [0])
    shard.core.await_contribution(key("b"), 1, 0)
    shard.push("a", chunks=[0], optimizer="critic")
    assert shard.of(ContributionAwaited) == []

    shard.core.await_contribution(key("c"), 1, 0)

    asked = shard.of(ContributionAwaited)
    assert [(each.worker, each.clock) for each in asked] == [
        (key("b"), 1),
        (key("c"), 1),
    ]
    assert {each.optimizer for each in asked} == {"critic"}


def test_a_worker_is_asked_once() -> None:
    shard = DrivenShard({"a": 0, "b": 0, "c": 0}, [0])
    for name in "bc":
        shard.core.await_contribution(key(name), 1, 0)
    shard.push("a", chunks=[0])
    shard.push("b", weight=0.0)

    assert len(shard.of(ContributionAwaited)) == 2


def test_idle_workers_do_not_spin() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.core.await_contribution(key("a"), 1, 0)
    shard.core.await_contribution(key("b"), 1, 0)
    assert shard.of(ContributionAwaited) == []


def test_a_push_of_weight_0_waits_for_no_idle_worker() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.core.await_contribution(key("b"), 1, 0)
    shard.push("a", weight=0.0)
    assert [each.worker for each in shard.of(ContributionAwaited)] == [key("b")]


def test_a_worker_that_pushes_or_hangs_up_is_not_idle() -> None:
    shard = DrivenShard({"a": 0, "b": 0, "c": 0}, [0])
    for name in "bc":
        shard.core.await_contribution(key(name), 1, 0)
    shard.core.withdraw_awaiting(key("c"))
    shard.push("a", chunks=[0])

    assert shard.of(ContributionAwaited) == []


def test_only_members_may_be_without_data() -> None:
    shard = DrivenShard({"a": 0}, [0])
    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        shard.core.await_contribution(key("z"), 1, 0)


def test_whoever_is_waited_for_is_named() -> None:
    shard = DrivenShard({"a": 0, "b": 0, "c": 0}, [0])
    shard.core.open_push(push_id("b"), 1, 1_000, generation=1)
    shard.push("a", chunks=[0])

    assert shard.core.awaited(4_000) == [Awaited("b", 0, 3_000), Awaited("c", 0, -1)]
    assert shard.core.waiting_reason == "clock 1 to be complete"


def test_the_coordinator_tells_a_busy_worker_from_a_lost_one() -> None:
    shard = DrivenShard({"a": 0, "b": 0, "c": 0}, [0])
    shard.push("a", chunks=[0])
    shard.core.note_lost({key("b"): 2_000}, 1_000)

    assert shard.core.awaited(4_000) == [
        Awaited("b", 0, NOT_KNOWN, lost_ms=5_000),
        Awaited("c", 0, NOT_KNOWN, lost_ms=0),
    ]
    shard.core.note_lost({}, 5_000)
    assert [each.lost_ms for each in shard.core.awaited(5_000)] == [0, 0]


def test_a_shard_that_the_coordinator_does_not_answer_calls_nobody_alive() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", chunks=[0])
    shard.core.note_lost({}, 1_000)

    assert [each.lost_ms for each in shard.core.awaited(7_000)] == [NOT_KNOWN]


def test_the_next_step_begins_when_a_push_is_done_not_when_it_came() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", chunks=[0])
    shard.core.note_done(key("b"), 60_000)
    shard.core.note_done(key("z"), 60_000)

    (awaited,) = shard.core.awaited(61_000)
    assert awaited.step_ms == 1_000


def test_who_has_no_data_is_not_named_beside_who_holds_it_up() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.core.await_contribution(key("a"), 1, 0)
    assert [each.name for each in shard.core.awaited(0)] == ["b"]
    shard.core.await_contribution(key("b"), 1, 0)
    assert [each.name for each in shard.core.awaited(0)] == ["a", "b"]
