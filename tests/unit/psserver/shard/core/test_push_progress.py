"""SSP and ASP on one shard: each push by itself, and answers within the bound."""

import pytest

from psserver.shard.core.effects import (
    ApplyChunk,
    ContributionAwaited,
    HyperparametersDiffer,
)
from pswire.awaited import Awaited
from pswire.membership import Mode, Outcome
from pswire.reasons import ErrorReason
from tests.doubles.core_values import (
    chunk,
    departure,
    key,
    push_id,
    record,
    trailer,
)
from tests.doubles.driven_shard import DrivenShard, asp, ssp
from tests.refusals import refused

# By itself


@pytest.mark.parametrize("shard", [asp("a", "b"), ssp(1, "a", "b")])
def test_a_push_is_applied_without_waiting_for_others(shard: DrivenShard) -> None:
    shard.step("a", 1, [0])

    (order,) = shard.of(ApplyChunk)
    assert (order.pusher, order.clock, order.total_weight) == (key("a"), 1, 1.0)
    assert [part.worker_id for part in order.contributions] == ["a"]
    reply = shard.replies()[push_id("a")]
    assert (reply.outcome, reply.clock, reply.frontier, reply.version) == (
        Outcome.APPLIED,
        1,
        0,
        1,
    )
    assert reply.mode is shard.core.clocks.mode


def test_a_reply_names_the_bound_of_ssp_and_none_of_asp() -> None:
    for shard, bound in ((ssp(3, "a"), 3), (asp("a"), 0)):
        shard.step("a", 1, [0])
        assert shard.replies()[push_id("a")].staleness_bound == bound


def test_an_answer_carries_what_others_have_changed() -> None:
    shard = asp("a", chunks=(0, 1))
    shard.push("a", chunks=[0])
    shard.apply_all()

    (finish,) = shard.finishes()
    assert finish.needs_all


def test_nothing_is_applied_before_the_trailer() -> None:
    shard = asp("a", chunks=(0, 1))
    shard.send_chunk(push_id("a"), 0)
    shard.send_chunk(push_id("a"), 1)
    assert shard.of(ApplyChunk) == []

    shard.send_trailer(push_id("a"), trailer([0, 1]))

    assert sorted(shard.applied()) == [("a", 1, 0), ("a", 1, 1)]


def test_a_chunk_is_applied_as_soon_as_it_comes() -> None:
    shard = asp("a", chunks=(0, 1))
    shard.send_trailer(push_id("a"), trailer([0, 1]))
    shard.send_chunk(push_id("a"), 1)

    assert shard.applied() == [("a", 1, 1)]
    shard.apply_all()
    assert shard.answered() == []
    shard.send_chunk(push_id("a"), 0)
    shard.apply_all()
    assert shard.answered() == [("a", 1)]


def test_a_push_without_chunks_here_is_done_at_once() -> None:
    shard = asp("a")
    shard.push("a")
    assert shard.outcomes() == {"a": Outcome.APPLIED}


# One update of a chunk at a time


def test_updates_of_a_chunk_come_one_at_a_time_in_the_order_of_arrival() -> None:
    shard = asp("a", "b", "c")
    for name in "cab":
        shard.push(name, chunks=[0])
    assert shard.applied() == [("c", 1, 0)]

    shard.core.chunk_applied(0)
    assert shard.applied() == [("c", 1, 0), ("a", 1, 0)]
    shard.core.chunk_applied(0)
    shard.core.chunk_applied(0)

    assert shard.applied() == [("c", 1, 0), ("a", 1, 0), ("b", 1, 0)]
    assert shard.answered() == [("c", 1), ("a", 1), ("b", 1)]


def test_a_push_waits_in_no_chunk_but_in_those_it_shares() -> None:
    shard = asp("a", "b", chunks=(0, 1))
    shard.push("a", chunks=[0])
    shard.push("b", chunks=[0, 1])

    assert shard.applied() == [("a", 1, 0), ("b", 1, 1)]


def test_an_interrupted_push_holds_nobody_back() -> None:
    shard = asp("a", "b", chunks=(0, 1))
    shard.send_trailer(push_id("a"), trailer([0, 1]))
    shard.send_chunk(push_id("a"), 0)
    shard.apply_all()

    shard.step("b", 1, [0, 1])
    shard.step("b", 2, [0, 1])

    assert shard.answered() == [("b", 1), ("b", 2)]


# Sent again


def test_an_interrupted_push_goes_on_with_the_chunks_that_lack() -> None:
    shard = asp("a", chunks=(0, 1))
    shard.send_trailer(push_id("a"), trailer([0, 1]))
    shard.send_chunk(push_id("a"), 0)
    shard.apply_all()

    shard.step("a", 1, [0, 1])

    assert shard.applied() == [("a", 1, 0), ("a", 1, 1)]
    assert shard.outcomes() == {"a": Outcome.APPLIED}


def test_a_chunk_sent_again_while_it_waits_its_turn_is_applied_once() -> None:
    shard = asp("a", "b")
    shard.push("a", chunks=[0])
    shard.push("b", chunks=[0])
    shard.push("b", chunks=[0])
    shard.apply_all()

    assert shard.applied() == [("a", 1, 0), ("b", 1, 0)]


def test_a_push_sent_again_after_it_is_done_is_a_duplicate() -> None:
    shard = asp("a")
    shard.step("a", 1, [0])
    shard.step("a", 1, [0])

    assert len(shard.of(ApplyChunk)) == 1
    reply = shard.core.reply_to(push_id("a"))
    assert reply is not None
    assert (reply.outcome, reply.version) == (Outcome.DUPLICATE, 1)
    assert shard.core.applied_chunks(push_id("a")) == {0}


def test_a_duplicate_of_a_push_whose_answer_waits_waits_too() -> None:
    shard = ssp(0, "a", "b")
    shard.step("a", 1, [0])
    shard.push("a", chunks=[0])
    assert shard.core.reply_to(push_id("a")) is None
    assert shard.core.applied_chunks(push_id("a")) == frozenset()

    shard.step("b", 1, [0])

    assert shard.outcomes() == {"a": Outcome.APPLIED, "b": Outcome.APPLIED}


@pytest.mark.parametrize("is_done", [False, True])
def test_other_bytes_under_the_same_id_are_refused(is_done: bool) -> None:
    shard = asp("a", chunks=(0, 1))
    push = push_id("a")
    shard.send_trailer(push, trailer([0, 1]))
    shard.send_chunk(push, 0)
    if is_done:
        shard.send_chunk(push, 1)
    shard.apply_all()

    with refused(ErrorReason.PUSH_CONFLICT):
        shard.core.add_chunk(push, shard.open(push), 0, chunk("others"))
    with refused(ErrorReason.PUSH_CONFLICT):
        shard.send_trailer(push, trailer([0, 1], weight=2.0))


def test_a_push_out_of_order_is_refused() -> None:
    shard = asp("a")
    with refused(ErrorReason.SEQUENCE_GAP):
        shard.push("a", 2, chunks=[0])


# What is not applied


def test_a_push_that_is_not_finite_skips_only_itself() -> None:
    shard = asp("a", "b")
    shard.push("a", finite=False)
    shard.step("b", 1, [0])
    shard.step("a", 2, [0])

    assert shard.applied() == [("b", 1, 0), ("a", 2, 0)]
    replies = shard.replies()
    skipped = replies[push_id("a")]
    assert (skipped.outcome, skipped.nonfinite_worker_ids) == (
        Outcome.SKIPPED,
        ("a",),
    )
    assert replies[push_id("b")].outcome is Outcome.APPLIED
    assert replies[push_id("a", 2)].clock == 2


def test_a_skipped_push_sent_again_is_told_so_again() -> None:
    shard = asp("a")
    shard.push("a", finite=False)
    reply = shard.core.reply_to(push_id("a"))

    assert reply is not None
    assert (reply.outcome, reply.nonfinite_worker_ids) == (Outcome.SKIPPED, ("a",))


def test_a_push_that_is_not_finite_is_no_skipped_clock_to_a_fence() -> None:
    shard = ssp(1, "a", "b")
    shard.freeze(2)
    shard.push("a", finite=False)
    shard.freeze(3)

    assert [report.skip_clocks for report in shard.reports()] == [(), ()]


def test_weight_0_moves_the_clock_and_nothing_else() -> None:
    shard = ssp(0, "a", "b")
    shard.step("a", 1, [0])
    shard.push("b", chunks=[0], weight=0.0)

    assert shard.applied() == [("a", 1, 0)]
    assert shard.outcomes() == {"a": Outcome.APPLIED, "b": Outcome.APPLIED}
    assert shard.core.clocks.frontier == 1
    assert shard.core.clocks.version == 2


# The bound


def test_an_answer_waits_until_the_frontier_is_within_the_bound() -> None:
    shard = ssp(1, "a", "b")
    shard.step("a", 1, [0])
    assert shard.answered() == [("a", 1)]
    shard.step("a", 2, [0])
    assert shard.answered() == [("a", 1)]
    assert len(shard.of(ApplyChunk)) == 2

    shard.step("b", 1, [0])

    assert shard.answered() == [("a", 1), ("a", 2), ("b", 1)]
    reply = shard.replies()[push_id("a", 2)]
    assert (reply.clock, reply.frontier, reply.version) == (2, 1, 3)


def test_a_blocked_worker_does_not_hold_back_others() -> None:
    """Its push counts; only its answer waits."""
    shard = ssp(1, "a", "b", "c")
    shard.step("a", 1, [0])
    shard.step("a", 2, [0])
    assert push_id("a", 2) not in shard.replies()

    shard.step("b", 1, [0])
    shard.step("c", 1, [0])
    assert push_id("a", 2) in shard.replies()
    assert shard.core.clocks.frontier == 1


def test_workers_that_are_all_ahead_are_released_by_the_slowest_alone() -> None:
    shard = ssp(0, "a", "b", "c")
    shard.step("a", 1, [0])
    shard.step("b", 1, [0])
    assert shard.answered() == []

    shard.step("c", 1, [0])

    assert sorted(shard.answered()) == [("a", 1), ("b", 1), ("c", 1)]


def test_asp_has_no_bound() -> None:
    shard = asp("a", "b")
    for sequence in range(1, 30):
        shard.step("a", sequence, [0])
    assert len(shard.answered()) == 29
    assert shard.core.clocks.frontier == 0


def test_values_are_admitted_by_the_same_bound() -> None:
    shard = ssp(1, "a", "b")
    assert shard.core.admits_pull(key("a"), 1)
    assert not shard.core.admits_pull(key("a"), 2)
    assert shard.core.admits_values(push_id("a", 1))
    assert not shard.core.admits_values(push_id("a", 2))

    shard.step("b", 1, [0])
    shard.step("a", 1, [0])

    assert shard.core.admits_pull(key("a"), 2)
    assert shard.core.admits_values(push_id("a", 2))
    assert asp("a").core.admits_pull(key("a"), 99)


def test_values_of_a_clock_of_bsp_are_never_given_ahead() -> None:
    shard = DrivenShard({"a": 0}, [0])
    assert not shard.core.admits_values(push_id("a"))
    assert not asp("a").core.admits_values(push_id("z"))


def test_a_joiner_at_the_frontier_is_waited_for() -> None:
    shard = ssp(0, "a")
    shard.step("a", 1, [0])
    shard.install(
        record({"a": 0, "b": 1}, generation=2, mode=Mode.SSP, staleness_bound=0)
    )
    shard.step("a", 2, [0])
    assert push_id("a", 2) not in shard.replies()

    shard.step("b", 1, [0])

    assert shard.replies()[push_id("a", 2)].frontier == 2


# Hyperparameters


def test_the_hyperparameters_of_the_longest_member_count() -> None:
    shard = DrivenShard({"a": 3, "b": 1, "c": 1}, [0], mode=Mode.ASP)
    shard.push("a", chunks=[0], rate=0.3)
    shard.push("c", chunks=[0], rate=0.2)
    shard.push("b", chunks=[0], rate=0.1)
    shard.push("a", 1, chunks=[0], rate=0.3)
    shard.apply_all()
    shard.push("a", 2, chunks=[0], rate=0.3)

    orders = shard.of(ApplyChunk)
    rates = [order.hyperparameters[0][0] for order in orders]
    # Nobody longer had pushed before `c`, and then `b` has the lower id.
    assert rates == [0.3, 0.2, 0.1, 0.1]


def test_members_that_differ_are_named_once() -> None:
    shard = asp("a", "b")
    shard.push("a", chunks=[0], rate=0.1)
    shard.apply_all()
    for sequence in (1, 2):
        shard.push("b", sequence, chunks=[0], rate=0.2)
        shard.apply_all()

    (warning,) = shard.of(HyperparametersDiffer)
    assert (warning.used, warning.other) == (key("a"), key("b"))
    assert warning.values == ((0.1,), (0.2,))


def test_each_optimizer_has_its_own_longest_member() -> None:
    shard = asp("a", "b", chunks=(0, 1))
    shard.push("a", chunks=[0], optimizer="generator", rate=0.1)
    shard.push("b", chunks=[1], optimizer="critic", rate=0.2)

    orders = {order.optimizer: order for order in shard.of(ApplyChunk)}
    assert orders["generator"].hyperparameters == ((0.1,),)
    assert orders["critic"].hyperparameters == ((0.2,),)


def test_whoever_has_ended_no_longer_names_hyperparameters() -> None:
    shard = asp("a", "b")
    shard.push("a", chunks=[0], rate=0.1)
    shard.apply_all()
    gone = departure("a", last_clock=1)
    shard.depart({"b": 0}, gone)
    shard.push("b", chunks=[0], rate=0.2)

    assert shard.of(ApplyChunk)[-1].hyperparameters == ((0.2,),)


# Workers without data


def test_an_idle_worker_is_asked_when_an_answer_waits_for_it_alone() -> None:
    shard = ssp(0, "a", "b")
    shard.core.await_contribution(key("b"), 1, 0)
    assert shard.of(ContributionAwaited) == []
    shard.push("a", chunks=[0], optimizer="critic")
    assert shard.of(ContributionAwaited) == []

    shard.apply_all()

    (asked,) = shard.of(ContributionAwaited)
    assert (asked.worker, asked.clock, asked.optimizer) == (key("b"), 1, "critic")


def test_an_idle_worker_is_not_asked_while_somebody_else_is_as_slow() -> None:
    shard = ssp(0, "a", "b", "c")
    shard.core.await_contribution(key("b"), 1, 0)
    shard.step("a", 1, [0])
    assert shard.of(ContributionAwaited) == []

    shard.step("c", 1, [0])

    assert [each.worker for each in shard.of(ContributionAwaited)] == [key("b")]


def test_an_idle_worker_within_the_bound_is_left_alone() -> None:
    shard = ssp(2, "a", "b")
    shard.core.await_contribution(key("b"), 1, 0)
    for sequence in (1, 2):
        shard.step("a", sequence, [0])
    assert shard.of(ContributionAwaited) == []
    shard.step("a", 3, [0])
    assert len(shard.of(ContributionAwaited)) == 1


def test_in_asp_nobody_is_asked() -> None:
    shard = asp("a", "b")
    shard.core.await_contribution(key("b"), 1, 0)
    for sequence in (1, 2, 3):
        shard.step("a", sequence, [0])
    assert shard.of(ContributionAwaited) == []


def test_whoever_answers_wait_for_is_named() -> None:
    shard = ssp(1, "a", "b", "c")
    shard.step("c", 1, [0])
    shard.step("a", 1, [0])
    assert shard.core.awaited(5_000) == []
    shard.step("a", 2, [0])

    assert shard.core.awaited(5_000) == [Awaited("b", 0, -1)]
    assert shard.core.waiting_reason == (
        "slower workers to come within the staleness bound"
    )
