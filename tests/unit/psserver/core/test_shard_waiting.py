"""Whom a clock waits for, and workers that have no data for it."""

import pytest

from psserver.core.effects import (
    ContributionAwaited,
)
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import key, push_id
from tests.doubles.driven_shard import DrivenShard


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
    with pytest.raises(Refusal) as caught:
        shard.core.await_contribution(key("z"), 1, 0)
    assert caught.value.reason is ErrorReason.WORKER_INCARNATION_STALE


def test_whoever_is_waited_for_is_named() -> None:
    shard = DrivenShard({"a": 0, "b": 0, "c": 0}, [0])
    shard.core.open_push(push_id("b"), 1, 1_000, generation=1)
    shard.push("a", chunks=[0])

    assert shard.core.awaited(4_000) == [("b", 0, 3_000), ("c", 0, -1)]
    assert shard.core.waiting_reason == "clock 1 to be complete"
