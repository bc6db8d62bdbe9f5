"""One shard: what is applied, when, with whose contributions, and who is told."""

from dataclasses import replace

import pytest

from psserver.shard.core.effects import (
    ApplyChunk,
    ChunkTorn,
    Finish,
    HyperparametersDiffer,
    LoadState,
    RefusePush,
)
from psserver.shard.core.shard_state import ShardRules
from pswire.aggregation import Aggregation, UpdateRules
from pswire.membership import Mode, Outcome
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import departure, key, push_id, record, trailer
from tests.doubles.driven_shard import DrivenShard
from tests.refusals import refused


def worker_ids(order: ApplyChunk) -> list[str]:
    return [part.worker_id for part in order.contributions]


# Finite first


def test_nothing_is_applied_before_all_verdicts_are_in() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0, 1])

    shard.push("a", chunks=[0, 1])
    shard.send_chunk(push_id("b"), 0)
    shard.send_chunk(push_id("b"), 1)

    assert shard.of(ApplyChunk) == []
    shard.send_trailer(push_id("b"), trailer([0, 1]))
    assert [order.chunk_index for order in shard.of(ApplyChunk)] == [0, 1]


def test_a_chunk_is_applied_as_soon_as_its_own_contributions_are_there() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0, 1])
    shard.push("a", chunks=[0, 1])
    shard.send_trailer(push_id("b"), trailer([0, 1]))

    shard.send_chunk(push_id("b"), 1)

    assert [order.chunk_index for order in shard.of(ApplyChunk)] == [1]


def test_one_verdict_that_is_not_finite_skips_the_clock_for_all() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", chunks=[0])
    shard.push("b", finite=False)

    assert shard.of(ApplyChunk) == []
    replies = shard.replies()
    assert [reply.outcome for reply in replies.values()] == [Outcome.SKIPPED] * 2
    assert {reply.nonfinite_worker_ids for reply in replies.values()} == {("b",)}
    assert shard.core.clocks.applied_clock == 1
    assert all(reply.version == 2 for reply in replies.values())


def test_a_skipped_push_is_told_so_again_when_it_is_sent_again() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", chunks=[0])
    shard.push("b", finite=False)

    reply = shard.core.reply_to(push_id("a"))

    assert reply is not None
    assert (reply.outcome, reply.nonfinite_worker_ids) == (Outcome.SKIPPED, ("b",))


# Weights


def test_weight_0_counts_for_nothing() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", chunks=[0], weight=3.0)
    shard.push("b", chunks=[0], weight=0.0)

    (order,) = shard.of(ApplyChunk)
    assert worker_ids(order) == ["a"]
    assert order.total_weight == 3.0


def test_a_total_weight_of_0_closes_the_clock_without_an_update() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", weight=0.0)
    shard.push("b", chunks=[0], weight=0.0)

    assert shard.of(ApplyChunk) == []
    assert [r.outcome for r in shard.replies().values()] == [Outcome.APPLIED] * 2


def test_the_divisor_is_the_weight_of_all_also_of_those_without_the_chunk() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0, 1])
    shard.push("a", chunks=[0], weight=2.0)
    shard.push("b", chunks=[1], weight=5.0)

    orders = shard.of(ApplyChunk)
    assert [worker_ids(order) for order in orders] == [["a"], ["b"]]
    assert [order.total_weight for order in orders] == [7.0, 7.0]


# Contributors


def test_contributors_are_those_of_the_record_however_many_pushed() -> None:
    shard = DrivenShard({"a": 0, "b": 1}, [0])

    shard.push("a", chunks=[0])

    (order,) = shard.of(ApplyChunk)
    assert (order.clock, worker_ids(order)) == (1, ["a"])


@pytest.mark.parametrize("arrival", [["a", "b", "c"], ["c", "b", "a"]])
@pytest.mark.parametrize("joining", [["a", "b", "c"], ["b", "c", "a"]])
def test_the_order_of_the_sum_is_that_of_the_worker_ids(
    arrival: list[str], joining: list[str]
) -> None:
    shard = DrivenShard(dict.fromkeys(joining, 0), [0])
    for name in arrival:
        shard.push(name, chunks=[0])

    (order,) = shard.of(ApplyChunk)
    assert worker_ids(order) == ["a", "b", "c"]
    assert list(shard.core.pushes_of(1)) == [push_id(n) for n in "abc"]


def test_clocks_complete_one_after_the_other() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    for sequence in (1, 2, 3):
        shard.push("a", sequence, chunks=[0])
        shard.push("b", sequence, chunks=[0])
        shard.apply_all()

    assert [order.clock for order in shard.of(ApplyChunk)] == [1, 2, 3]
    replies = [effect.reply for effect in shard.of(Finish)]
    assert [reply.version for reply in replies] == [2, 2, 4, 4, 6, 6]
    assert [reply.frontier for reply in replies] == [1, 1, 2, 2, 3, 3]


# Optimizers and hyperparameters


def test_the_longest_contributors_hyperparameters_count() -> None:
    shard = DrivenShard({"a": 3, "b": 1, "c": 1}, [0])
    for clock in (2, 3):
        shard.push("b", clock - 1, weight=0.0)
        shard.push("c", clock - 1, weight=0.0)
    shard.push("a", 1, chunks=[0], rate=0.3)
    shard.push("b", 3, chunks=[0], rate=0.2)
    shard.push("c", 3, chunks=[0], rate=0.1)

    (order,) = shard.of(ApplyChunk)
    assert order.hyperparameters == ((0.2,),)


def test_a_longer_contributor_without_weight_does_not_count() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", weight=0.0, rate=0.3, optimizer="other")
    shard.push("b", chunks=[0], rate=0.2)

    (order,) = shard.of(ApplyChunk)
    assert (order.optimizer, order.hyperparameters) == ("optimizer", ((0.2,),))


def test_workers_that_differ_are_named_once() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    for sequence in (1, 2):
        shard.push("a", sequence, chunks=[0], rate=0.1)
        shard.push("b", sequence, chunks=[0], rate=0.2)
        shard.apply_all()

    (warning,) = shard.of(HyperparametersDiffer)
    assert (warning.used, warning.other) == (key("a"), key("b"))
    assert (warning.clock, warning.group) == (1, 0)
    assert warning.values == ((0.1,), (0.2,))


def test_an_optimizer_out_of_phase_is_refused_with_who_pushed_what() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", chunks=[0], optimizer="generator")

    with refused(
        ErrorReason.OPTIMIZER_OUT_OF_PHASE, r"b/1 .*'critic'.* a/1 .*'generator'"
    ):
        shard.push("b", chunks=[0], optimizer="critic")
    assert shard.core.on_shard.window_of(key("b")).entries[1].trailer is None


def test_a_step_where_another_publishes_is_refused_with_who_does_what() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.send_trailer(push_id("a"), replace(trailer([0]), publishes=True))

    with refused(ErrorReason.OPTIMIZER_OUT_OF_PHASE, r"a/1 publishes .* b/1 steps"):
        shard.push("b", chunks=[0])


@pytest.mark.parametrize("late_publishes", [True, False])
def test_what_a_late_worker_does_elsewhere_in_its_script_is_dropped(
    *, late_publishes: bool
) -> None:
    shard = DrivenShard({"a": 1, "b": 0}, [0])
    shard.push("b", chunks=[0])
    shard.apply_all()
    values = {"publishes": True, "value_entries": frozenset({3})}
    with_values = replace(trailer([0]), **values)  # type: ignore[arg-type]
    for worker, sequence in (("a", 1), ("b", 2)):
        publishes = (worker == "a") is late_publishes
        what = with_values if publishes else trailer([0])
        shard.send_trailer(push_id(worker, sequence), what)
        shard.send_chunk(push_id(worker, sequence), 0)

    (order,) = shard.apply_all()
    assert [part.worker_id for part in order.contributions] == ["b"]
    assert order.total_weight == 1.0
    outcomes = {
        done.reply.outcome: done.push.worker.worker_id
        for done in shard.of(Finish)
        if done.push.sequence == (1 if done.push.worker == key("a") else 2)
    }
    assert outcomes == {Outcome.DROPPED: "a", Outcome.APPLIED: "b"}


def test_of_all_who_publish_the_longest_is_the_source() -> None:
    shard = DrivenShard({"b": 0, "c": 0}, [0])
    for name in "cb":
        what = replace(trailer([0]), publishes=True, value_entries=frozenset({3}))
        shard.send_trailer(push_id(name), what)
    shard.send_chunk(push_id("c"), 0)
    shard.send_chunk(push_id("b"), 0)

    (order,) = shard.of(ApplyChunk)
    found = [(p.worker_id, p.value_entries, p.is_source) for p in order.contributions]
    assert found == [("b", {3}, True), ("c", {3}, False)]


def test_a_worker_without_data_disturbs_nobody_who_publishes() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", weight=0.0)
    shard.send_trailer(push_id("b"), replace(trailer([0]), publishes=True))
    shard.send_chunk(push_id("b"), 0)

    (order,) = shard.of(ApplyChunk)
    assert [(p.worker_id, p.is_source) for p in order.contributions] == [("b", True)]


@pytest.mark.parametrize("is_of_longest", [True, False])
def test_in_asp_only_the_longest_member_publishes(*, is_of_longest: bool) -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0], mode=Mode.ASP)
    what = replace(trailer([0]), publishes=True, is_of_longest=is_of_longest)
    shard.send_trailer(push_id("b"), what)
    shard.send_chunk(push_id("b"), 0)

    (order,) = shard.of(ApplyChunk)
    assert len(order.contributions) == is_of_longest
    shard.apply_all()
    assert shard.outcomes() == {"b": Outcome.APPLIED}


@pytest.mark.parametrize("name", ["a", "b"])
def test_where_a_norm_is_the_limit_nobody_says_of_itself_that_it_is_the_longest(
    name: str,
) -> None:
    """Values that are published have no norm, nor has state that is loaded."""
    rules = ShardRules(update=UpdateRules(gradient_norm_max=1.0))
    shard = DrivenShard({"a": 0, "b": 0}, [0], mode=Mode.ASP, rules=rules)
    for worker in "ab":
        shard.push(worker, chunks=[0])
    shard.apply_all()
    shard.forget()
    what = replace(trailer([0]), publishes=True, is_of_longest=True, loads_state=True)
    shard.send_trailer(push_id(name, 2), what)
    shard.send_chunk(push_id(name, 2), 0)

    (order,) = shard.of(ApplyChunk)
    is_longest = name == "a"
    assert len(order.contributions) == is_longest
    assert len(shard.of(LoadState)) == is_longest


@pytest.mark.parametrize("rule", ["median", "trimmed-mean:0.4"])
def test_of_workers_that_nobody_trusts_one_alone_replaces_no_values(rule: str) -> None:
    update = UpdateRules(aggregation=Aggregation.parse(rule))
    shard = DrivenShard(dict.fromkeys("abc", 0), [0], rules=ShardRules(update=update))
    for name in "abc":
        values = frozenset({0} if name == "a" else ())
        shard.send_trailer(push_id(name), replace(trailer([0]), value_entries=values))
        shard.send_chunk(push_id(name), 0)

    (order,) = shard.of(ApplyChunk)
    assert worker_ids(order) == ["b", "c"]
    assert order.total_weight == 3.0  # its gradient counts as zeros


def test_of_workers_that_nobody_trusts_one_that_publishes_ends_no_others() -> None:
    update = UpdateRules(aggregation=Aggregation.parse("median"))
    shard = DrivenShard(dict.fromkeys("abc", 0), [0], rules=ShardRules(update=update))
    values = {"publishes": True, "value_entries": frozenset({0})}
    shard.send_trailer(push_id("a"), replace(trailer([0]), **values))  # type: ignore[arg-type]
    shard.send_chunk(push_id("a"), 0)
    for name in "bc":
        shard.push(name, chunks=[0])

    (order,) = shard.apply_all()
    assert worker_ids(order) == ["b", "c"]
    assert shard.outcomes() == {
        "a": Outcome.DROPPED,
        "b": Outcome.APPLIED,
        "c": Outcome.APPLIED,
    }


def test_weight_0_is_never_out_of_phase() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", chunks=[0], optimizer="generator")
    shard.push("b", optimizer="critic", weight=0.0)

    (order,) = shard.of(ApplyChunk)
    assert order.optimizer == "generator"


# Sent again


def test_a_chunk_sent_again_before_it_is_applied_counts_once() -> None:
    shard = DrivenShard({"a": 0}, [0])
    push = push_id("a")
    shard.send_chunk(push, 0)
    shard.send_chunk(push, 0)
    shard.push("a", chunks=[0])

    assert [order.chunk_index for order in shard.of(ApplyChunk)] == [0]


def test_a_push_sent_again_while_it_is_applied_changes_nothing() -> None:
    shard = DrivenShard({"a": 0}, [0, 1])
    push = shard.push("a", chunks=[0, 1])
    shard.core.chunk_applied(0)
    assert shard.core.applied_chunks(push) == {0}
    assert shard.core.reply_to(push) is None

    shard.push("a", chunks=[0, 1])

    assert len(shard.of(ApplyChunk)) == 2
    shard.core.chunk_applied(1)
    assert shard.replies()[push].outcome is Outcome.APPLIED


def test_a_duplicate_is_answered_after_completion_with_all_values() -> None:
    shard = DrivenShard({"a": 0}, [0, 1])
    push = shard.push("a", chunks=[0])
    shard.apply_all()

    shard.push("a", chunks=[0])
    reply = shard.core.reply_to(push)

    assert reply is not None
    assert reply.outcome is Outcome.DUPLICATE
    assert (reply.clock, reply.version, reply.frontier) == (1, 1, 1)
    assert shard.core.applied_chunks(push) == {0, 1}
    assert len(shard.of(ApplyChunk)) == 1


def test_an_acknowledged_push_needs_no_entry() -> None:
    shard = DrivenShard({"a": 0}, [0])
    push = shard.push("a", chunks=[0])
    shard.apply_all()
    shard.core.acknowledge(key("a"), 2)

    assert shard.core.open_push(push, 1, 0, generation=1) is None
    reply = shard.core.reply_to(push)
    assert reply is not None
    assert reply.outcome is Outcome.DUPLICATE


# Refusals


def test_a_push_before_the_first_record_is_told_to_wait() -> None:
    shard = DrivenShard({}, [0])
    with refused(ErrorReason.RECOVERING):
        shard.push("a")


@pytest.mark.parametrize("name", ["z", "a/2"])
def test_a_push_of_a_start_that_no_record_names_is_refused(name: str) -> None:
    shard = DrivenShard({"a": 0}, [0])
    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        shard.push(name)
    assert shard.core.on_shard.window_of(key(name)).entries == {}


def test_a_header_that_names_another_clock_is_refused() -> None:
    shard = DrivenShard({"a": 5}, [0])
    with refused(ErrorReason.MALFORMED_MESSAGE, "clock 6, the header says 7"):
        shard.core.open_push(push_id("a"), 7, 0, generation=1)


def test_a_chunk_of_another_shard_is_refused() -> None:
    shard = DrivenShard({"a": 0}, [0])
    with refused(ErrorReason.CHUNK_INVALID):
        shard.send_chunk(push_id("a"), 1)
    with refused(ErrorReason.CHUNK_INVALID):
        shard.send_trailer(push_id("a"), trailer([0, 1]))


def test_a_worker_that_ended_may_ask_for_its_last_answer_only() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    for name in "ab":
        shard.push(name, chunks=[0])
    shard.apply_all()
    shard.depart({"a": 0}, departure("b", last_clock=1), steps=1)

    assert shard.core.open_push(push_id("b"), 1, 0, generation=2) is not None
    reply = shard.core.reply_to(push_id("b"))
    assert reply is not None
    assert (reply.outcome, reply.generation) == (Outcome.DUPLICATE, 2)
    with pytest.raises(Refusal, match="closed at push 1") as caught:
        shard.push("b", 2)
    assert caught.value.reason is ErrorReason.WORKER_INCARNATION_STALE
    assert caught.value.facts == {"sequence_closed": "1"}


def test_a_push_from_an_older_generation_is_translated_by_the_records() -> None:
    """Whoever pushed before it heard of a joiner pushed for the right clock."""
    shard = DrivenShard({"a": 0}, [0])
    shard.step("a", 1, [0])
    shard.install(record({"a": 0, "b": 1}, generation=2))

    push = shard.push("a", 2, chunks=[0])
    shard.push("b", 1, chunks=[0])
    shard.apply_all()

    reply = shard.replies()[push]
    assert (reply.clock, reply.version, reply.generation) == (2, 3, 2)


# Members that end


def test_the_clock_goes_on_without_a_worker_that_was_evicted() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", chunks=[0])
    assert shard.of(ApplyChunk) == []

    shard.depart({"a": 0}, departure("b", last_clock=0))

    (order,) = shard.of(ApplyChunk)
    assert worker_ids(order) == ["a"]


def test_what_a_dead_worker_had_complete_counts() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("b", chunks=[0])
    gone = departure("b", last_clock=1, evicted=True)
    shard.depart({"a": 0}, gone, steps=1)
    shard.push("a", chunks=[0])
    shard.apply_all()

    (order,) = shard.of(ApplyChunk)
    assert worker_ids(order) == ["a", "b"]
    assert shard.replies()[push_id("a")].version == 2


def test_what_is_applied_beyond_a_dead_workers_last_clock_is_counted_as_torn() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0, 1])
    shard.push("a", chunks=[0, 1])
    shard.send_trailer(push_id("b"), trailer([0, 1]))
    shard.send_chunk(push_id("b"), 0)
    shard.core.chunk_applied(0)
    assert shard.core.state.torn_step_count == 0

    shard.depart({"a": 0}, departure("b", last_clock=0))

    assert shard.core.state.torn_step_count == 1
    assert [worker_ids(o) for o in shard.of(ApplyChunk)] == [["a", "b"], ["a"]]
    shard.core.chunk_applied(1)
    assert shard.replies().keys() == {push_id("a")}


def test_a_call_whose_push_is_thrown_away_is_ended() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("b", chunks=[0])

    shard.depart({"a": 0}, departure("b", last_clock=0))

    (refused,) = shard.of(RefusePush)
    assert refused.push == push_id("b")
    assert refused.refusal.reason is ErrorReason.WORKER_INCARNATION_STALE
    assert refused.refusal.facts == {"sequence_closed": "0"}


def test_clocks_that_nobody_is_left_of_are_passed_for_a_joiner() -> None:
    """The only worker died in its step; its trailer fixed the joiner's base."""
    shard = DrivenShard({"a": 0}, [0])
    shard.send_trailer(push_id("a"), trailer([0]))

    shard.depart({"b": 1}, departure("a", last_clock=0))
    assert shard.core.clocks.applied_clock == 1
    push = shard.push("b", chunks=[0])
    shard.apply_all()

    reply = shard.replies()[push]
    assert (reply.clock, reply.version) == (2, 1)


def test_a_clock_that_a_record_skips_is_skipped_when_all_have_pushed() -> None:
    """Another shard had the verdict of a worker that died."""
    shard = DrivenShard({"a": 0, "b": 0, "c": 0}, [0])
    gone = departure("c", last_clock=0, evicted=True)
    shard.install(
        record({"a": 0, "b": 0}, generation=2, departures=(gone,), skipped_clocks=(1,))
    )
    shard.push("a", chunks=[0])
    assert shard.core.clocks.applied_clock == 0
    shard.push("b", chunks=[0])

    assert shard.of(ApplyChunk) == []
    replies = shard.replies().values()
    assert [reply.outcome for reply in replies] == [Outcome.SKIPPED] * 2


def test_who_leaves_does_not_count_in_the_clock_that_a_record_skips() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.install(record({"a": 0, "b": 0}, generation=2, skipped_clocks=(1,)))
    gone = departure("b", last_clock=0)
    shard.depart({"a": 0}, gone)
    shard.push("a", chunks=[0])

    reply = shard.replies()[push_id("a")]
    assert (reply.outcome, reply.version) == (Outcome.SKIPPED, 1)


def test_a_skipped_clock_that_nobody_is_left_of_is_a_joiners_own() -> None:
    shard = DrivenShard({"a": 0}, [0])
    gone = departure("a", last_clock=0)
    shard.install(record({}, generation=2, departures=(gone,), skipped_clocks=(1,)))
    shard.install(record({"b": 0}, generation=3))

    push = shard.push("b", chunks=[0])
    shard.apply_all()

    assert shard.replies()[push].outcome is Outcome.APPLIED


def test_bytes_that_contradict_their_verdict_are_reported() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    for name in "ab":
        shard.push(name, chunks=[0])

    shard.core.chunk_applied(0, ["b"])

    (torn,) = shard.of(ChunkTorn)
    assert (torn.clock, torn.chunk_index, torn.worker_ids) == (1, 0, ("b",))
    assert [r.outcome for r in shard.replies().values()] == [Outcome.APPLIED] * 2
