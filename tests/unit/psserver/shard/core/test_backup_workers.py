"""Backup workers: a clock of BSP that closes without the slowest."""

import pytest

from psserver.shard.core.effects import ApplyChunk, ContributionAwaited
from psserver.shard.core.push import PushId
from psserver.shard.core.shard_state import ShardRules
from pswire.membership import ClockChoice, Outcome, StepAtomicity
from pswire.reasons import ErrorReason
from tests.doubles.core_values import (
    choice,
    chosen_by_first,
    departure,
    key,
    push_id,
    record,
    trailer,
)
from tests.doubles.driven_shard import DrivenShard
from tests.refusals import refused


def shard_of(*names: str, backups: int = 1, is_first: bool = True) -> DrivenShard:
    rules = ShardRules(
        step_atomicity=StepAtomicity.CLOCK,
        backup_worker_count=backups,
        is_first=is_first,
    )
    return DrivenShard(dict.fromkeys(names, 0), [0], rules=rules)


def pushed(*names: str, backups: int = 1) -> DrivenShard:
    shard = shard_of(*names, backups=backups)
    for name in names:
        shard.push(name, chunks=[0])
    return shard


def chosen(shard: DrivenShard, name: str = "a", sequence: int = 1) -> str | None:
    """Ids of those that were chosen for the clock of a push."""
    what = shard.core.choice_for(key(name), sequence)
    if what is None:
        return None
    return "".join(worker.worker_id for worker in what.workers)


def ready(shard: DrivenShard, *names: str, sequence: int = 1) -> None:
    for name in names:
        shard.core.ready(key(name), sequence, 0)


def close(shard: DrivenShard, sequence: int, *names: str) -> None:
    """These push a clock, which closes with them."""
    for name in names:
        shard.push(name, sequence, chunks=[0])
    shard.core.commit(key(names[0]), chosen_by_first(sequence, *names))
    shard.apply_all()


# Staged, ready, chosen


def test_a_worker_is_told_staged_as_its_own_push_is_complete() -> None:
    shard = shard_of("a", "b", "c")
    shard.send_trailer(push_id("a"), trailer([0]))
    shard.push("b", chunks=[0])

    (told,) = shard.staged()
    assert (told.push, told.choice) == (push_id("b"), ClockChoice(1, ()))
    shard.send_chunk(push_id("a"), 0)
    assert [each.push for each in shard.staged()] == [push_id("b"), push_id("a")]


def test_the_first_that_are_ready_are_chosen() -> None:
    shard = pushed("a", "b", "c")
    ready(shard, "c")
    assert chosen(shard) is None

    ready(shard, "b")

    assert chosen(shard) == "bc"
    assert shard.of(ApplyChunk) == []


def test_the_choice_stands_once_and_for_all() -> None:
    shard = pushed("a", "b", "c")
    ready(shard, "c", "b", "a")
    assert chosen(shard) == "bc"

    shard.depart({"b": 0, "c": 0}, departure("a", last_clock=0))

    assert chosen(shard, "b") == "bc"
    assert shard.core.commit(key("b"), chosen_by_first(1, "b", "c"))


def test_who_is_ready_twice_counts_once() -> None:
    shard = pushed("a", "b", "c")
    ready(shard, "c", "c", "c")
    assert chosen(shard) is None


def test_ready_of_an_older_push_says_nothing_of_the_next() -> None:
    shard = pushed("a", "b", "c")
    ready(shard, "a", "b")
    shard.core.commit(key("a"), chosen_by_first(1, "a", "b"))
    shard.apply_all()
    for name in "abc":
        shard.push(name, 2, chunks=[0])
    ready(shard, "b", sequence=1)
    assert chosen(shard, sequence=2) is None

    ready(shard, "c", "b", sequence=2)

    assert chosen(shard, sequence=2) == "bc"


def test_at_least_one_is_always_waited_for() -> None:
    shard = pushed("a", "b", backups=5)
    assert chosen(shard) is None
    ready(shard, "b")
    assert chosen(shard) == "b"


def test_weight_0_counts_as_nobody_in_the_choice() -> None:
    """Of three one has no data: of the two that work, one is a backup."""
    shard = shard_of("a", "b", "c")
    shard.push("a", weight=0.0)
    shard.push("b", chunks=[0])
    shard.push("c", chunks=[0])
    ready(shard, "a")
    assert chosen(shard) is None

    ready(shard, "c")

    assert chosen(shard) == "ac"


def test_when_nobody_has_data_the_clock_closes_with_all() -> None:
    shard = shard_of("a", "b")
    for name in "ab":
        shard.push(name, weight=0.0)
    ready(shard, "a")
    assert chosen(shard) is None
    ready(shard, "b")
    assert chosen(shard) == "ab"

    shard.core.commit(key("a"), chosen_by_first(1, "a", "b"))

    assert shard.of(ApplyChunk) == []
    assert shard.outcomes() == {"a": Outcome.APPLIED, "b": Outcome.APPLIED}


def test_only_shard_0_chooses() -> None:
    shard = shard_of("a", "b", is_first=False)
    for name in "ab":
        shard.push(name, chunks=[0])
    ready(shard, "a", "b")
    assert chosen(shard) is None

    assert shard.core.commit(key("a"), chosen_by_first(1, "a"))

    assert len(shard.apply_all()) == 1
    assert shard.outcomes() == {"a": Outcome.APPLIED, "b": Outcome.DROPPED}


def test_a_departed_contributor_counts_as_ready() -> None:
    """Every shard holds its last push, and it can't say so any more."""
    shard = pushed("a", "b", "c")
    ready(shard, "b")
    gone = departure("c", last_clock=1, evicted=True)
    shard.depart({"a": 0, "b": 0}, gone, steps=1)

    assert chosen(shard) == "bc"


def test_somebody_who_is_left_is_chosen_to_drive_the_commit() -> None:
    """The dead would be enough, but the other shards would never hear of it."""
    shard = shard_of("a", "b", "c")
    for name in "ab":
        shard.push(name, chunks=[0])
    gone = tuple(departure(name, last_clock=1, evicted=True) for name in "ab")
    shard.depart({"c": 0}, *gone, steps=2)
    assert chosen(shard, "c") is None

    shard.push("c", chunks=[0])
    ready(shard, "c")

    assert chosen(shard, "c") == "ac"
    assert shard.core.commit(key("c"), chosen_by_first(1, "a", "c"))
    shard.apply_all()
    assert shard.outcomes()["c"] is Outcome.APPLIED
    assert shard.outcomes()["b"] is Outcome.DROPPED


def test_all_that_departed_close_their_clock_without_a_driver() -> None:
    shard = pushed("a", "b")
    gone = tuple(departure(name, last_clock=1, evicted=True) for name in "ab")
    shard.depart({"c": 1}, *gone, steps=2)

    (order,) = shard.apply_all()
    assert [part.worker_id for part in order.contributions] == ["a", "b"]


def test_an_evicted_worker_without_a_push_is_not_waited_for() -> None:
    shard = shard_of("a", "b", "c")
    shard.push("a", chunks=[0])
    ready(shard, "a")
    assert chosen(shard) is None
    shard.depart({"a": 0, "b": 0}, departure("c", last_clock=0))

    assert chosen(shard) == "a"


def test_the_choice_of_a_clock_that_is_over_names_nobody() -> None:
    shard = shard_of("a", "b")
    close(shard, 1, "a")
    close(shard, 2, "a")
    assert chosen(shard, "b", 1) == ""


def test_a_stranger_is_never_ready() -> None:
    shard = pushed("a")
    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        shard.core.ready(key("a/2"), 1, 0)


def test_the_report_of_shard_0_names_its_choice() -> None:
    shard = pushed("a", "b")
    ready(shard, "b")
    shard.freeze(2)
    assert shard.reports()[0].chosen == chosen_by_first(1, "b")


# Commits


@pytest.mark.parametrize("names", [(), ("a", "c"), ("z",)])
def test_a_commit_of_pushes_that_are_not_here_is_refused(
    names: tuple[str, ...],
) -> None:
    shard = shard_of("a", "b", "c")
    shard.push("a", chunks=[0])
    shard.send_trailer(push_id("c"), trailer([0]))

    assert not shard.core.commit(key("a"), chosen_by_first(1, *names))
    assert shard.of(ApplyChunk) == []


def test_a_record_repeats_the_choice_whose_drivers_are_gone() -> None:
    shard = pushed("a", "b", "c")
    ready(shard, "a", "b")
    gone = tuple(departure(name, last_clock=1, evicted=True) for name in "ab")
    shard.install(
        record(
            {"c": 0},
            generation=2,
            departures=gone,
            departed_step_count=2,
            commit=choice(1, "a", "b"),
        )
    )

    (order,) = shard.apply_all()
    assert [part.worker_id for part in order.contributions] == ["a", "b"]
    assert shard.outcomes()["c"] is Outcome.DROPPED


def test_the_divisor_is_the_weight_of_the_chosen_alone() -> None:
    shard = shard_of("a", "b", "c")
    for name, weight in (("a", 2.0), ("b", 3.0), ("c", 7.0)):
        shard.push(name, chunks=[0], weight=weight)
    shard.core.commit(key("a"), chosen_by_first(1, "a", "b"))

    (order,) = shard.of(ApplyChunk)
    assert order.total_weight == 5.0


def test_hyperparameters_are_those_of_the_longest_that_was_chosen() -> None:
    shard = DrivenShard(
        {"a": 0, "b": 0},
        [0],
        rules=ShardRules(step_atomicity=StepAtomicity.CLOCK, backup_worker_count=1),
    )
    shard.push("a", chunks=[0], rate=0.3)
    shard.push("b", chunks=[0], rate=0.2)
    shard.core.commit(key("b"), chosen_by_first(1, "b"))

    (order,) = shard.of(ApplyChunk)
    assert order.hyperparameters == ((0.2,),)


# Dropped


def test_a_push_that_was_here_and_not_chosen_is_dropped_with_the_clock() -> None:
    shard = pushed("a", "b")
    shard.core.commit(key("b"), chosen_by_first(1, "b"))
    assert shard.outcomes() == {}
    shard.apply_all()

    assert shard.outcomes() == {"a": Outcome.DROPPED, "b": Outcome.APPLIED}
    replies = shard.replies()
    assert {reply.version for reply in replies.values()} == {2}
    assert {reply.frontier for reply in replies.values()} == {1}
    assert shard.core.applied_chunks(push_id("a")) == frozenset()
    assert shard.core.state.torn_step_count == 0


def test_a_push_that_comes_after_its_clock_is_dropped() -> None:
    shard = shard_of("a", "b")
    close(shard, 1, "a")

    assert shard.core.open_push(push_id("b"), 1, 0, generation=1) is None
    reply = shard.core.reply_to(push_id("b"))

    assert reply is not None
    assert (reply.outcome, reply.clock, reply.closed_sequence) == (
        Outcome.DROPPED,
        1,
        1,
    )
    assert len(shard.of(ApplyChunk)) == 1


def test_the_rest_of_a_push_that_was_dropped_meanwhile_is_let_in_and_ignored() -> None:
    shard = shard_of("a", "b")
    shard.send_chunk(push_id("b"), 0)
    close(shard, 1, "a")
    assert shard.outcomes()["b"] is Outcome.DROPPED

    shard.send_chunk(push_id("b"), 0)
    shard.send_trailer(push_id("b"), trailer([0]))

    assert len(shard.of(ApplyChunk)) == 1


def test_a_slow_worker_jumps_to_the_newest_clock() -> None:
    shard = shard_of("a", "b")
    for clock in (1, 2, 3):
        close(shard, clock, "a")
    assert shard.core.open_push(push_id("b", 1), 1, 0, generation=1) is None
    reply = shard.core.reply_to(push_id("b", 1))
    assert reply is not None
    assert (reply.outcome, reply.clock, reply.closed_sequence) == (
        Outcome.DROPPED,
        3,
        3,
    )
    assert shard.core.admits_pull(key("b"), 3)

    close(shard, 4, "b")

    assert shard.replies()[PushId(key("b"), 4)].outcome is Outcome.APPLIED
    assert shard.replies()[PushId(key("a"), 4)].outcome is Outcome.DROPPED


def test_a_jump_to_a_clock_that_is_open_here_pulls_when_it_is_closed() -> None:
    """Another shard has closed clock 1 already."""
    shard = pushed("a", "b")
    assert not shard.core.admits_pull(key("b"), 1)

    shard.core.commit(key("a"), chosen_by_first(1, "a"))
    shard.apply_all()

    assert shard.core.admits_pull(key("b"), 1)


def test_data_of_a_dropped_push_is_not_told_as_consumed() -> None:
    shard = shard_of("a", "b")
    shard.send_ranges("b", 1, start=0)
    close(shard, 1, "a")
    shard.freeze(2, evicting=["b"])

    (report,) = shard.reports()
    assert [each.ranges for each in report.holdings] == [(), ()]


# Not finite, and idle


def test_a_push_that_is_not_finite_and_not_chosen_is_ignored() -> None:
    shard = shard_of("a", "b")
    shard.push("a", chunks=[0])
    shard.push("b", finite=False)
    shard.core.commit(key("a"), chosen_by_first(1, "a"))
    shard.apply_all()

    assert shard.outcomes() == {"a": Outcome.APPLIED, "b": Outcome.DROPPED}
    assert shard.replies()[push_id("b")].nonfinite_worker_ids == ()


def test_a_chosen_push_that_is_not_finite_skips_the_clock_of_the_chosen() -> None:
    shard = shard_of("a", "b", "c")
    shard.push("a", chunks=[0])
    shard.push("b", finite=False)
    shard.push("c", chunks=[0])
    shard.core.commit(key("a"), chosen_by_first(1, "a", "b"))

    assert shard.of(ApplyChunk) == []
    assert shard.outcomes() == {
        "a": Outcome.SKIPPED,
        "b": Outcome.SKIPPED,
        "c": Outcome.DROPPED,
    }
    assert shard.replies()[push_id("a")].nonfinite_worker_ids == ("b",)


def test_a_verdict_that_a_record_tells_of_decides_nothing_without_the_choice() -> None:
    shard = shard_of("a", "b")
    shard.push("a", chunks=[0])
    shard.push("b", finite=False)
    shard.install(record({"a": 0, "b": 0}, generation=2, skipped_clocks=(1,)))
    shard.core.commit(key("a"), chosen_by_first(1, "a"))
    shard.apply_all()

    assert shard.outcomes()["a"] is Outcome.APPLIED


def test_an_idle_worker_is_asked_as_soon_as_anybody_has_pushed() -> None:
    shard = shard_of("a", "b", "c")
    shard.core.await_contribution(key("b"), 1, 0)
    assert shard.of(ContributionAwaited) == []

    shard.push("a", chunks=[0])

    assert [each.worker for each in shard.of(ContributionAwaited)] == [key("b")]


def test_workers_that_are_all_idle_do_not_spin() -> None:
    shard = shard_of("a", "b")
    for name in "ab":
        shard.core.await_contribution(key(name), 1, 0)
    assert shard.of(ContributionAwaited) == []


def test_one_that_comes_too_late_hears_what_was_committed_without_it() -> None:
    """In mode quorum it commits on the other shards, if nobody else is left to."""
    shard = shard_of("a", "b")
    shard.send_trailer(push_id("b"), trailer([0]))

    close(shard, 1, "a")

    assert [each.push for each in shard.staged()] == [push_id("a"), push_id("b")]
    assert shard.staged()[-1].choice.workers == (key("a"),)
    assert shard.replies()[push_id("b")].outcome is Outcome.DROPPED
