"""Workers that end in SSP and ASP: what counts, what is torn, what a fence is told."""

from dataclasses import replace

import pytest

from psserver.shard.core.effects import ApplyChunk, LoadState, RefusePush
from psserver.shard.core.member_on_shard import DEPARTED_COUNT_MAX
from psserver.shard.core.shard_state import ShardRules
from pswire.leased_data import DataRange
from pswire.membership import Mode, Outcome, StepAtomicity
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import (
    chosen_by_first,
    departure,
    key,
    push_id,
    record,
    trailer,
)
from tests.doubles.driven_shard import DrivenShard, asp, ssp
from tests.refusals import refused

# Members that end


def gone_from(
    shard: DrivenShard, name: str, last: int, *rest: str, steps: int | None = None
) -> None:
    """A fence takes out a worker, whose last push that counts is `last`."""
    known = shard.core.clocks.record
    assert known is not None
    generation = known.generation + 1
    shard.freeze(generation)
    assert shard.reports()[-1].fence_number == generation
    shard.depart(
        dict.fromkeys(rest, 0),
        departure(name, last_clock=last, evicted=True),
        steps=last if steps is None else steps,
    )


def test_a_complete_last_push_is_applied_after_its_worker_has_ended() -> None:
    shard = asp("a", "b")
    shard.freeze(2)
    shard.push("b", chunks=[0])
    gone = departure("b", last_clock=1, evicted=True)
    shard.depart({"a": 0}, gone, steps=1)
    assert shard.core.clocks.version == 0
    shard.apply_all()

    assert shard.applied() == [("b", 1, 0)]
    assert shard.core.clocks.version == 1
    assert shard.core.state.torn_step_count == 0


def test_the_last_push_of_the_longest_loads_its_state_after_its_worker_has_ended() -> (
    None
):
    """As it did on shards that had all of it before."""
    shard = asp("a", "b")
    shard.push("b", chunks=[0], rate=0.2)
    shard.apply_all()
    shard.freeze(2)
    loading = replace(trailer([0], rate=0.1), loads_state=True, is_of_longest=True)
    shard.send_trailer(push_id("a"), loading)
    shard.send_chunk(push_id("a"), 0)
    gone = departure("a", last_clock=1, evicted=True)
    shard.depart({"b": 0}, gone, steps=1)

    assert [order.push for order in shard.of(LoadState)] == [push_id("a")]
    assert shard.of(ApplyChunk)[-1].hyperparameters == ((0.1,),)


def test_a_last_push_that_is_incomplete_here_is_thrown_away() -> None:
    shard = asp("a", "b", chunks=(0, 1))
    shard.send_chunk(push_id("b"), 0)
    gone_from(shard, "b", 0, "a")

    (refused,) = shard.of(RefusePush)
    assert refused.push == push_id("b")
    assert refused.refusal.facts == {"sequence_closed": "0"}
    assert shard.core.state.torn_step_count == 0
    assert shard.applied() == []


def test_a_last_push_that_is_partly_applied_is_torn_once() -> None:
    shard = asp("a", "b", chunks=(0, 1))
    shard.send_trailer(push_id("b"), trailer([0, 1]))
    shard.send_chunk(push_id("b"), 0)
    shard.apply_all()
    gone_from(shard, "b", 0, "a")
    shard.depart({"a": 0}, departure("b", last_clock=0, evicted=True))

    assert shard.core.state.torn_step_count == 1
    assert shard.core.clocks.version == 0
    shard.step("a", 1, [0, 1])
    assert shard.applied() == [("b", 1, 0), ("a", 1, 0), ("a", 1, 1)]


def test_a_last_push_that_waits_its_turn_is_taken_out_of_it() -> None:
    shard = asp("a", "b", chunks=(0, 1))
    shard.push("a", chunks=[0])
    shard.push("b", chunks=[0])
    shard.freeze(2)
    shard.apply_all()
    gone_from(shard, "b", 0, "a")
    shard.apply_all()

    assert shard.applied() == [("a", 1, 0)]
    assert shard.core.state.torn_step_count == 0


def test_a_last_push_that_is_wholly_applied_here_only_is_torn() -> None:
    """Another shard never got all of it. The version told does not go back."""
    shard = asp("a", "b")
    shard.step("b", 1, [0])
    shard.step("a", 1, [0])
    assert shard.replies()[push_id("a")].version == 2
    gone_from(shard, "b", 0, "a")

    assert shard.core.state.torn_step_count == 1
    assert shard.core.clocks.version == 2
    assert shard.core.closed_sequence(key("b")) == 0
    shard.step("a", 2, [0])
    assert shard.replies()[push_id("a", 2)].version == 2
    shard.step("a", 3, [0])
    assert shard.replies()[push_id("a", 3)].version == 3


def test_a_blocked_push_that_is_thrown_away_ends_its_call() -> None:
    shard = ssp(0, "a", "b")
    shard.step("b", 1, [0])
    assert shard.answered() == []
    gone_from(shard, "b", 0, "a")

    assert [each.push for each in shard.of(RefusePush)] == [push_id("b")]
    shard.step("a", 1, [0])
    assert shard.answered() == [("a", 1)]


def test_a_last_push_that_counts_is_not_answered_to_one_that_has_ended() -> None:
    """Nobody keeps to the bound for it; it learns how far it got instead."""
    shard = ssp(0, "a", "b")
    shard.step("b", 1, [0])
    gone_from(shard, "b", 1, "a")

    assert shard.answered() == []
    (refused,) = shard.of(RefusePush)
    assert refused.refusal.reason is ErrorReason.WORKER_INCARNATION_STALE
    assert refused.refusal.facts == {"sequence_closed": "1"}
    with pytest.raises(Refusal) as caught:
        shard.push("b", chunks=[0])
    assert caught.value.facts == {"sequence_closed": "1"}
    assert shard.core.closed_sequence(key("b")) == 1
    assert shard.core.state.torn_step_count == 0


def test_whoever_ends_no_longer_holds_back_the_others() -> None:
    shard = ssp(0, "a", "b")
    shard.step("a", 1, [0])
    assert shard.answered() == []
    gone_from(shard, "b", 0, "a")

    assert shard.answered() == [("a", 1)]
    assert shard.replies()[push_id("a")].frontier == 1


def test_the_frontier_keeps_its_last_value_when_nobody_is_there() -> None:
    shard = asp("a")
    for sequence in (1, 2, 3):
        shard.step("a", sequence, [0])
    gone_from(shard, "a", 3)
    assert shard.core.clocks.frontier == 3
    assert shard.core.clocks.version == 3


# Windows of those that have ended


def test_how_far_a_departed_worker_got_is_known_although_others_had_its_id_since() -> (
    None
):
    """One that was taken out and lives asks for it when it is back itself."""
    shard = asp("a", "b")
    shard.step("b", 1, [0])
    gone_from(shard, "b", 1, "a")
    back = {"a": 0, "b/2": 0}
    shard.install(record(back, generation=3, mode=Mode.ASP, departed_step_count=1))
    shard.step("b/2", 1, [0])
    gone_from(shard, "b/2", 1, "a", steps=2)
    back = {"a": 0, "b/3": 0}
    shard.install(record(back, generation=5, mode=Mode.ASP, departed_step_count=2))

    assert shard.core.closed_sequence(key("b")) == 1
    assert shard.core.closed_sequence(key("b/2")) == 1
    for name in ("b", "b/2"):
        with refused(ErrorReason.WORKER_INCARNATION_STALE):
            shard.push(name, 1, chunks=[0])


def test_a_departed_window_is_kept_while_a_record_still_tells_of_it() -> None:
    shard = asp("a", "b")
    shard.step("b", 1, [0])
    gone_from(shard, "b", 1, "a")
    back = {"a": 0, "b/2": 0}
    gone = (departure("b", last_clock=1, evicted=True),)
    shard.install(record(back, generation=3, mode=Mode.ASP, departed_step_count=1))
    shard.step("b/2", 1, [0])
    shard.depart(back, *gone, steps=1)

    assert shard.core.clocks.version == 2
    assert shard.core.clocks.departure_of(key("b")) is not None


def test_of_too_many_that_have_ended_the_oldest_are_forgotten() -> None:
    shard = asp("a")
    names = [f"w{index}" for index in range(DEPARTED_COUNT_MAX + 2)]
    gone = tuple(departure(name, last_clock=0) for name in names)
    shard.depart({"a": 0}, *gone)
    shard.install(record({"a": 0}, generation=3, mode=Mode.ASP))

    known = [shard.core.clocks.departure_of(key(name)) is not None for name in names]
    assert known == [False] * 2 + [True] * DEPARTED_COUNT_MAX


def test_data_of_a_departed_worker_is_not_kept() -> None:
    """The record that ended it has settled that; a thousand such lists add up."""
    shard = asp("a", "b")
    piece = DataRange("loader", 0, 0, 4)
    shard.send_trailer(push_id("b"), replace(trailer(), ranges=(piece,)))
    shard.apply_all()
    assert shard.core.on_shard.window_of(key("b")).ranges == [(1, piece)]

    gone_from(shard, "b", 1, "a")

    assert shard.core.on_shard.window_of(key("b")).ranges == []


def test_of_the_pushes_of_a_departed_worker_only_the_outcome_is_kept() -> None:
    """Digests of a large model's chunks, a thousand times, would be megabytes."""
    shard = asp("a", "b", chunks=(0, 1))
    shard.step("b", 1, [0, 1])
    gone_from(shard, "b", 1, "a")
    assert shard.core.on_shard.window_of(key("b")).entries[1].digests

    shard.install(record({"a": 0}, generation=3, mode=Mode.ASP))

    entry = shard.core.on_shard.window_of(key("b")).entries[1]
    assert entry.outcome is Outcome.APPLIED
    assert entry.trailer is None
    assert not entry.digests
    assert not entry.applied
    reply = shard.core.reply_to(push_id("b"))
    assert reply is not None
    assert reply.outcome is Outcome.DUPLICATE


def test_a_lost_worker_hears_that_its_push_was_dropped_in_the_mode_before() -> None:
    """Refused, it would take the push for one that counts."""
    rules = ShardRules(
        step_atomicity=StepAtomicity.CLOCK, backup_worker_count=1, is_first=True
    )
    shard = DrivenShard({"a": 0, "b": 0}, [0], rules=rules)
    for name in "ab":
        shard.push(name, chunks=[0])
    shard.core.commit(key("a"), chosen_by_first(1, "a"))
    shard.apply_all()
    sequences = {"a": 1, "b": 1}
    for generation, mode in ((2, Mode.ASP), (3, Mode.SSP)):
        shard.install(
            record(
                {"a": 1, "b": 1},
                generation=generation,
                mode=mode,
                mode_clock=1,
                base_sequences=sequences,
            )
        )
    gone = departure("b", base_clock=1, base_sequence=1, last_clock=1, evicted=True)
    shard.install(
        record(
            {"a": 1},
            generation=4,
            mode=Mode.SSP,
            mode_clock=1,
            base_sequences=sequences,
            departures=(gone,),
        )
    )

    shard.core.open_push(push_id("b"), 1, 0, generation=1)

    reply = shard.core.reply_to(push_id("b"))
    assert reply is not None
    assert reply.outcome is Outcome.DROPPED


# Reports


def test_a_report_lists_data_of_those_that_may_be_taken_out_only() -> None:
    shard = asp("a", "b")
    for name in "ab":
        shard.send_ranges(name, 1, start=0)
        shard.send_ranges(name, 2, start=8)
    shard.freeze(2, evicting=["b"])

    (report,) = shard.reports()
    ranges = {each.worker: each.ranges for each in report.holdings}
    assert ranges[key("a")] == ()
    assert [(s, piece.start) for s, piece in ranges[key("b")]] == [(1, 0), (2, 8)]


def test_a_report_says_how_far_each_push_came() -> None:
    shard = asp("a", "b", "c", chunks=(0, 1))
    shard.send_trailer(push_id("a"), trailer([0, 1]))
    shard.send_chunk(push_id("a"), 0)
    shard.step("b", 1, [0, 1])
    shard.send_chunk(push_id("c"), 0)
    shard.apply_all()
    shard.freeze(2)

    (report,) = shard.reports()
    assert [
        (h.complete_sequence, h.trailer_sequence, h.touched_sequence)
        for h in report.holdings
    ] == [(0, 1, 1), (1, 1, 1), (0, 0, 0)]
    assert (report.frontier, report.applied_clock, report.is_settled) == (0, 0, True)


def test_it_reports_only_when_no_update_is_under_way() -> None:
    shard = asp("a", chunks=(0, 1))
    shard.push("a", chunks=[0, 1])
    shard.freeze(2)
    shard.core.chunk_applied(0)
    assert shard.reports() == []

    shard.core.chunk_applied(1)

    (report,) = shard.reports()
    assert report.holdings[0].touched_sequence == 1
    assert shard.answered() == []
    assert shard.core.done_sequences() == ((key("a"), 0),)
    shard.core.abort_fence(2)
    assert shard.answered() == [("a", 1)]
    assert shard.core.done_sequences() == ((key("a"), 1),)
