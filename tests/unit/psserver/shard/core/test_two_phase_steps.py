"""Two-phase steps on one shard: nothing is applied before a commit."""

import pytest

from psserver.shard.core.effects import (
    ApplyChunk,
    ContributionAwaited,
    CopyImage,
    RefusePush,
)
from psserver.shard.core.shard_fence import Cut
from pswire.awaited import Awaited
from pswire.membership import FenceKind, Outcome
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import (
    choice,
    departure,
    key,
    push_id,
    record,
    trailer,
)
from tests.doubles.driven_shard import TWO_PHASE, DrivenShard
from tests.refusals import refused
from tests.unit.psserver.shard.core.two_phase_shards import shard_of, told


def complete(*names: str) -> DrivenShard:
    """All have pushed clock 1, and `staged` is told and forgotten."""
    shard = shard_of(*names)
    for name in names:
        shard.push(name, chunks=[0])
    shard.forget()
    return shard


# Nothing before a commit


def test_all_are_told_staged_when_all_of_the_clock_is_there() -> None:
    shard = shard_of("a", "b", chunks=(0, 1))
    shard.push("b", chunks=[0, 1])
    shard.send_trailer(push_id("a"), trailer([0, 1]))
    shard.send_chunk(push_id("a"), 0)
    assert told(shard) == []

    shard.send_chunk(push_id("a"), 1)

    assert told(shard) == [("a", 1, "ab"), ("b", 1, "ab")]
    assert shard.of(ApplyChunk) == []
    assert shard.answered() == []


def test_any_one_commit_is_enough() -> None:
    shard = complete("a", "b")

    assert shard.core.commit(key("b"), choice(1, "a", "b"))

    (order,) = shard.apply_all()
    assert [part.worker_id for part in order.contributions] == ["a", "b"]
    assert shard.outcomes() == {"a": Outcome.APPLIED, "b": Outcome.APPLIED}


def test_a_repeated_commit_changes_nothing() -> None:
    shard = complete("a", "b")
    for _ in range(2):
        assert shard.core.commit(key("a"), choice(1, "a", "b"))
    shard.apply_all()
    assert shard.core.commit(key("b"), choice(1, "a", "b"))

    assert len(shard.of(ApplyChunk)) == 1
    assert len(shard.answered()) == 2


def test_a_commit_of_one_clock_says_nothing_of_the_next() -> None:
    shard = complete("a")
    shard.core.commit(key("a"), choice(1, "a"))
    shard.apply_all()
    shard.push("a", 2, chunks=[0])

    assert shard.apply_all() == []
    assert told(shard) == [("a", 2, "a")]


def test_a_clock_that_is_not_finite_is_skipped_when_it_is_committed() -> None:
    shard = shard_of("a", "b")
    shard.push("a", chunks=[0])
    shard.push("b", finite=False)
    assert told(shard) == [("a", 1, "ab"), ("b", 1, "ab")]
    assert shard.answered() == []

    assert shard.core.commit(key("b"), choice(1, "a", "b"))

    assert shard.apply_all() == []
    assert shard.outcomes() == {"a": Outcome.SKIPPED, "b": Outcome.SKIPPED}


def test_a_skipped_clock_is_of_the_same_contributors_on_all_shards() -> None:
    """One has all pushes when a contributor is lost, the other lacks that one's."""
    one, other = shard_of("a", "b"), shard_of("a", "b")
    for shard in one, other:
        shard.push("a", chunks=[0])
    one.push("b", finite=False)
    lost = departure("b", last_clock=0, evicted=True)
    for shard in one, other:
        shard.forget()
        shard.install(
            record({"a": 0}, generation=2, departures=(lost,), skipped_clocks=(1,))
        )
        assert told(shard) == [("a", 1, "a")]

        assert not shard.core.commit(key("a"), choice(1, "a", "b"))
        assert shard.core.commit(key("a"), choice(1, "a"))

        assert shard.outcomes() == {"a": Outcome.SKIPPED}


def test_a_clock_of_weight_0_alone_needs_its_commit_too() -> None:
    shard = shard_of("a", "b")
    shard.push("a", weight=0.0)
    shard.push("b", weight=0.0)
    assert shard.answered() == []
    shard.core.commit(key("a"), choice(1, "a", "b"))

    assert shard.apply_all() == []
    assert shard.outcomes() == {"a": Outcome.APPLIED, "b": Outcome.APPLIED}


def test_an_idle_worker_is_asked_before_anything_is_staged() -> None:
    shard = shard_of("a", "b")
    shard.core.await_contribution(key("b"), 1, 0)
    shard.push("a", chunks=[0])
    assert [each.worker for each in shard.of(ContributionAwaited)] == [key("b")]
    assert told(shard) == []

    shard.push("b", weight=0.0)

    assert told(shard) == [("a", 1, "ab"), ("b", 1, "ab")]


# Told again


def test_a_new_call_of_a_worker_is_told_again() -> None:
    shard = complete("a", "b")
    shard.open(push_id("b"))

    assert told(shard) == [("b", 1, "ab")]


def test_nobody_is_told_again_without_need() -> None:
    shard = complete("a", "b")
    shard.core.await_contribution(key("a"), 2, 0)
    shard.install(record({"a": 0, "b": 0}, generation=2))

    assert told(shard) == []


def test_those_left_are_told_of_a_record_that_took_one_out() -> None:
    shard = shard_of("a", "b", "c")
    for name in "ab":
        shard.push(name, chunks=[0])
    assert told(shard) == []
    shard.depart({"a": 0, "b": 0}, departure("c", last_clock=0))

    assert told(shard) == [("a", 1, "ab"), ("b", 1, "ab")]


def test_those_left_are_told_who_counts_although_one_has_ended() -> None:
    shard = shard_of("a", "b", "c")
    for name in "abc":
        shard.push(name, chunks=[0])
    shard.forget()
    shard.depart({"a": 0, "b": 0}, departure("c", last_clock=0, evicted=True))

    assert told(shard) == [("a", 1, "ab"), ("b", 1, "ab")]
    assert [each.push for each in shard.of(RefusePush)] == [push_id("c")]
    assert shard.core.state.torn_step_count == 0


# Refused


def test_a_commit_with_other_contributors_is_refused_and_staged_told_again() -> None:
    shard = complete("a", "b")

    assert not shard.core.commit(key("a"), choice(1, "a"))
    assert not shard.core.commit(key("a"), choice(1, "a", "b", "c"))

    assert shard.of(ApplyChunk) == []
    assert told(shard)[-2:] == [("a", 1, "ab"), ("b", 1, "ab")]
    assert shard.core.commit(key("a"), choice(1, "a", "b"))


def test_a_commit_that_a_record_overtook_is_refused() -> None:
    """On another shard the record came later."""
    shard = complete("a", "b")
    gone = departure("b", last_clock=0, evicted=True)
    shard.depart({"a": 0}, gone)

    assert not shard.core.commit(key("a"), choice(1, "a", "b"))
    assert shard.core.commit(key("a"), choice(1, "a"))
    assert len(shard.apply_all()) == 1


def test_a_commit_of_what_is_not_all_here_is_refused() -> None:
    shard = shard_of("a", "b")
    shard.push("a", chunks=[0])
    shard.send_trailer(push_id("b"), trailer([0]))

    assert not shard.core.commit(key("a"), choice(1, "a", "b"))
    assert shard.of(ApplyChunk) == []


def test_a_commit_with_a_scale_where_nothing_is_clipped_is_refused() -> None:
    shard = complete("a", "b")
    scaled = choice(1, "a", "b")._replace(sum_of_squares=4.0, gradient_scale=0.5)

    with pytest.raises(Refusal) as caught:
        shard.core.commit(key("a"), scaled)

    assert caught.value.reason is ErrorReason.MALFORMED_MESSAGE
    assert caught.value.message == (
        "a commit of clock 1 says gradient scale 0.5 of norm 2.0: what the shards have "
        "measured makes gradient scale 1.0 of norm 0.0"
    )
    assert shard.of(ApplyChunk) == []
    assert shard.core.commit(key("a"), choice(1, "a", "b"))


def test_a_commit_of_a_clock_ahead_is_refused() -> None:
    shard = complete("a", "b")
    assert not shard.core.commit(key("a"), choice(2, "a", "b"))


@pytest.mark.parametrize("name", ["z", "a/2"])
def test_a_stranger_commits_nothing(name: str) -> None:
    shard = complete("a")
    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        shard.core.commit(key(name), choice(1, "a"))
    assert shard.of(ApplyChunk) == []


# Finished by a record


def test_a_record_commits_what_some_shard_has_committed() -> None:
    shard = complete("a", "b")
    gone = departure("b", last_clock=1, evicted=True)
    shard.install(
        record(
            {"a": 0},
            generation=2,
            departures=(gone,),
            departed_step_count=1,
            commit=choice(1, "a", "b"),
        )
    )

    (order,) = shard.apply_all()
    assert [part.worker_id for part in order.contributions] == ["a", "b"]
    assert shard.replies()[push_id("a")].version == 2


def test_a_record_says_nothing_of_a_commit_that_is_done_here() -> None:
    shard = complete("a", "b")
    shard.core.commit(key("a"), choice(1, "a", "b"))
    shard.apply_all()
    shard.install(record({"a": 0, "b": 0}, generation=2, commit=choice(1, "a", "b")))
    for name in "ab":
        shard.push(name, 2, chunks=[0])

    assert shard.apply_all() == []
    assert told(shard) == [("a", 2, "ab"), ("b", 2, "ab")]


def test_a_clock_whose_contributors_have_all_departed_commits_itself() -> None:
    shard = complete("a", "b")
    gone = tuple(departure(name, last_clock=1, evicted=True) for name in "ab")
    shard.depart({"c": 1}, *gone, steps=2)

    (order,) = shard.apply_all()
    assert [part.worker_id for part in order.contributions] == ["a", "b"]
    assert shard.core.clocks.applied_clock == 1
    assert shard.core.clocks.version == 2


def test_whoever_is_left_of_those_that_contributed_still_drives() -> None:
    shard = complete("a", "b")
    gone = departure("b", last_clock=1, evicted=True)
    shard.depart({"a": 0}, gone, steps=1)
    assert shard.apply_all() == []

    assert shard.core.commit(key("a"), choice(1, "a", "b"))
    assert len(shard.apply_all()) == 1


def test_a_report_names_the_newest_commit() -> None:
    shard = complete("a", "b")
    shard.freeze(2)
    shard.core.abort_fence(2)
    shard.core.commit(key("a"), choice(1, "a", "b"))
    shard.apply_all()
    shard.freeze(3)

    before, after = shard.reports()
    assert (before.committed, before.touched_clock_max) == (None, 0)
    assert (after.committed, after.touched_clock_max) == (choice(1, "a", "b"), 1)


def test_what_is_staged_while_frozen_is_told_after_the_fence() -> None:
    shard = shard_of("a")
    shard.freeze(2)
    shard.push("a", chunks=[0])
    assert told(shard) == []

    shard.core.abort_fence(2)

    assert told(shard) == [("a", 1, "a")]


def test_a_commit_beyond_a_cut_comes_after_its_image() -> None:
    shard = shard_of("a")
    shard.freeze(2, FenceKind.CUT)
    shard.core.decide_cut(2, Cut(9, 1))
    shard.push("a", chunks=[0])
    shard.core.commit(key("a"), choice(1, "a"))
    assert shard.copies() == []
    shard.apply_all()
    shard.push("a", 2, chunks=[0])
    shard.core.commit(key("a"), choice(2, "a"))
    shard.apply_all()

    orders = shard.image_orders()
    assert [(type(each), each.clock) for each in orders] == [
        (ApplyChunk, 1),
        (CopyImage, 1),
        (ApplyChunk, 2),
    ]


def test_a_shard_that_has_everything_names_who_may_commit() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0], rules=TWO_PHASE)
    shard.push("a", chunks=[0])
    assert shard.core.awaited(0) == [Awaited("b", 0, -1)]
    assert shard.core.waiting_reason == "clock 1 to be complete"

    shard.push("b", chunks=[0])

    assert shard.core.awaited(0) == [Awaited("a", 0, 0), Awaited("b", 0, 0)]
    assert shard.core.waiting_reason == "clock 1 to be committed"
