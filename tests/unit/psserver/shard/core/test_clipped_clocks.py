"""Clipping by the global norm on one shard: what is measured, told and committed."""

from dataclasses import replace
from typing import Any

import pytest

from psserver.shard.core.effects import ApplyChunk, MeasureClock
from psserver.shard.core.shard_state import ShardRules
from pswire.aggregation import UpdateRules, proof_of
from pswire.membership import ClockChoice, Mode, Outcome, StepAtomicity
from pswire.reasons import ErrorReason, Refusal
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

CLIP = ShardRules(shard_count=2, update=UpdateRules(clip_grad_norm=1.0))

NORM_3 = 1.0 / (3.0 + 1e-6)
"""What a gradient of norm 3 is scaled by."""


def shard_of(
    *names: str, chunks: tuple[int, ...] = (0,), mode: Mode = Mode.BSP
) -> DrivenShard:
    return DrivenShard(dict.fromkeys(names, 0), chunks, mode=mode, rules=CLIP)


def complete(*names: str) -> DrivenShard:
    """All have pushed clock 1, which is to be measured."""
    shard = shard_of(*names)
    for name in names:
        shard.push(name, chunks=[0])
    return shard


def staged(*names: str, part: float = 4.0) -> DrivenShard:
    """Clock 1 is measured, and all were told."""
    shard = complete(*names)
    shard.core.clock_measured(choice(1, *names), part)
    return shard


def committed(
    *names: str, total: float = 9.0, scale: float = NORM_3, clock: int = 1
) -> ClockChoice:
    """As a worker commits it, which knows what both shards have measured."""
    own = min(total, 4.0)
    return choice(clock, *names)._replace(
        sum_of_squares=total,
        gradient_scale=scale,
        parts=tuple(
            proven(index, choice(clock, *names)._replace(sum_of_squares=part))
            for index, part in enumerate((own, total - own))
        ),
    )


def proven(shard_index: int, part: ClockChoice) -> ClockChoice:
    return part._replace(proof=proof_of(b"", shard_index, part))


def told(shard: DrivenShard) -> list[tuple[str, str, float]]:
    """Who was told `staged`: its id, the ids of the contributors, and the sum."""
    return [
        (
            each.push.worker.worker_id,
            "".join(worker.worker_id for worker in each.choice.workers),
            each.choice.sum_of_squares,
        )
        for each in shard.staged()
    ]


# Measured


def test_a_clock_is_measured_once_all_of_it_is_there() -> None:
    shard = shard_of("a", "b", "c", chunks=(0, 1))
    shard.push("a", chunks=[0, 1], weight=3.0)
    shard.push("c", chunks=[], weight=0.0)
    shard.send_trailer(push_id("b"), trailer([1]))
    assert shard.of(MeasureClock) == []

    shard.send_chunk(push_id("b"), 1)

    (order,) = shard.of(MeasureClock)
    assert order.choice == choice(1, "a", "b", "c")
    assert order.total_weight == 4.0
    parts = [(i, [p.worker_id for p in found]) for i, found in order.chunks]
    assert parts == [(0, ["a"]), (1, ["a", "b"])]
    assert told(shard) == []
    assert shard.of(ApplyChunk) == []


def test_a_clock_is_measured_as_it_will_be_applied() -> None:
    shard = shard_of("a", "b", "c")
    for name, weight in (("a", 0.0), ("b", 1.0), ("c", 1.0)):
        what = replace(trailer([0], weight=weight), spec_digest=f"by {name}")
        shard.send_trailer(push_id(name), what)
        shard.send_chunk(push_id(name), 0)

    (order,) = shard.of(MeasureClock)
    assert (order.optimizer, order.spec_digest) == ("optimizer", "by b")
    shard.core.clock_measured(order.choice, 9.0)
    assert shard.core.commit(key("a"), committed("a", "b", "c"))
    (applied,) = shard.of(ApplyChunk)
    assert (applied.optimizer, applied.spec_digest) == ("optimizer", "by b")


def test_all_are_told_what_it_measures() -> None:
    shard = staged("a", "b")

    assert told(shard) == [("a", "ab", 4.0), ("b", "ab", 4.0)]
    assert shard.of(ApplyChunk) == []


def test_a_new_call_is_told_without_another_measurement() -> None:
    shard = staged("a", "b")
    shard.forget()
    shard.open(push_id("b"))

    assert told(shard) == [("b", "ab", 4.0)]
    assert shard.of(MeasureClock) == []


def test_a_clock_that_is_not_finite_is_not_measured() -> None:
    shard = shard_of("a", "b")
    shard.push("a", chunks=[0])
    shard.push("b", finite=False)

    assert told(shard) == [("a", "ab", 0.0), ("b", "ab", 0.0)]
    assert shard.core.commit(key("a"), committed("a", "b", total=0.0, scale=1.0))
    assert shard.of(MeasureClock) == []
    assert shard.outcomes() == {"a": Outcome.SKIPPED, "b": Outcome.SKIPPED}
    assert {reply.grad_norm for reply in shard.replies().values()} == {None}


def test_a_clock_of_weight_0_alone_measures_nothing() -> None:
    shard = shard_of("a")
    shard.push("a", weight=0.0)

    (order,) = shard.of(MeasureClock)
    assert order.chunks == ()
    shard.core.clock_measured(order.choice, 0.0)
    assert shard.core.commit(key("a"), committed("a", total=0.0, scale=1.0))
    assert shard.outcomes() == {"a": Outcome.APPLIED}


def test_others_are_measured_anew_when_a_record_has_changed_them() -> None:
    shard = staged("a", "b")
    shard.forget()
    gone = departure("b", last_clock=0, evicted=True)
    shard.depart({"a": 0}, gone)

    (order,) = shard.of(MeasureClock)
    assert order.choice == choice(1, "a")
    assert told(shard) == []
    shard.core.clock_measured(choice(1, "a"), 1.0)
    assert told(shard) == [("a", "a", 1.0)]


def test_a_measurement_that_a_record_overtook_says_nothing() -> None:
    shard = complete("a", "b")
    gone = departure("b", last_clock=0, evicted=True)
    shard.depart({"a": 0}, gone)
    shard.core.clock_measured(choice(1, "a", "b"), 4.0)

    assert told(shard) == []
    assert len(shard.of(MeasureClock)) == 2


def test_a_fence_waits_for_the_measurement_and_reports_it() -> None:
    shard = complete("a", "b")
    shard.freeze(2)
    assert shard.reports() == []

    shard.core.clock_measured(choice(1, "a", "b"), 4.0)

    (report,) = shard.reports()
    part = choice(1, "a", "b")._replace(sum_of_squares=4.0)
    assert report.measured == proven(0, part)
    assert told(shard) == []


def test_what_is_not_measured_is_not_reported() -> None:
    shard = shard_of("a", "b")
    shard.push("a", chunks=[0])
    shard.freeze(2)

    (report,) = shard.reports()
    assert report.measured is None


# Committed


def test_the_scale_of_the_commit_is_that_of_the_update() -> None:
    shard = staged("a", "b")

    assert shard.core.commit(key("b"), committed("a", "b"))

    (order,) = shard.apply_all()
    assert order.gradient_scale == NORM_3
    assert {reply.grad_norm for reply in shard.replies().values()} == {3.0}
    assert shard.core.on_shard.window_of(key("a")).entries[1].grad_norm == 3.0


def test_a_repeated_commit_changes_nothing() -> None:
    shard = staged("a", "b")
    assert shard.core.commit(key("a"), committed("a", "b"))
    assert shard.core.commit(key("b"), committed("a", "b"))
    shard.apply_all()
    assert shard.core.commit(key("b"), committed("a", "b"))

    assert len(shard.of(ApplyChunk)) == 1


@pytest.mark.parametrize("is_applied", [False, True])
def test_a_commit_with_another_scale_is_refused(is_applied: bool) -> None:
    shard = staged("a", "b")
    shard.core.commit(key("a"), committed("a", "b"))
    if is_applied:
        shard.apply_all()

    with pytest.raises(Refusal) as caught:
        shard.core.commit(key("b"), committed("a", "b", scale=0.5))

    assert caught.value.reason == ErrorReason.MALFORMED_MESSAGE
    assert caught.value.text == (
        "a commit of clock 1 says gradient scale 0.5 of norm 3.0: it is committed with "
        "gradient scale 0.33333322222225925 of norm 3.0; use the psworker of the same "
        "release"
    )


def test_a_scale_that_does_not_follow_from_its_norm_is_refused() -> None:
    shard = staged("a", "b")

    with pytest.raises(Refusal) as caught:
        shard.core.commit(key("a"), committed("a", "b", scale=1.0))

    assert caught.value.text == (
        "a commit of clock 1 says gradient scale 1.0 of norm 3.0: what the shards have "
        "measured makes gradient scale 0.33333322222225925 of norm 3.0; use the "
        "psworker of the same release"
    )
    assert shard.of(ApplyChunk) == []


@pytest.mark.parametrize(
    "change",
    [
        {"sum_of_squares": 1.0},
        {"clock": 2},
        {"workers": (key("a"),)},
        {"weights": (1.0, 1.0)},
        {"products": (1.0, 1.0)},
    ],
)
@pytest.mark.parametrize("shard_index", [0, 1])
def test_what_a_shard_has_not_measured_is_refused(
    shard_index: int, change: dict[str, Any]
) -> None:
    shard = staged("a", "b")
    parts = list(committed("a", "b").parts)
    parts[shard_index] = parts[shard_index]._replace(**change)

    with pytest.raises(Refusal) as caught:
        shard.core.commit(key("a"), committed("a", "b")._replace(parts=tuple(parts)))

    assert caught.value.text == (
        f"a commit of clock 1 brings what shard {shard_index} has not measured of it; "
        "use the psworker of the same release"
    )
    assert shard.of(ApplyChunk) == []


def test_what_one_shard_has_measured_is_no_other_ones() -> None:
    shard = staged("a", "b")
    named = committed("a", "b")

    for parts in (named.parts[::-1], named.parts[:1] * 2):
        with pytest.raises(Refusal, match="has not measured of it"):
            shard.core.commit(key("a"), named._replace(parts=parts))


def test_a_commit_without_what_all_shards_have_measured_is_refused() -> None:
    shard = staged("a", "b")
    named = committed("a", "b")

    for parts in ((), named.parts[:1], (*named.parts, named.parts[0])):
        with pytest.raises(Refusal) as caught:
            shard.core.commit(key("a"), named._replace(parts=parts))
        assert caught.value.text.startswith(
            f"a commit of clock 1 brings what {len(parts)} shards have measured, the "
            "job has 2"
        )
    assert shard.of(ApplyChunk) == []


def test_a_commit_of_what_is_not_measured_yet_is_refused_and_told_later() -> None:
    shard = complete("a", "b")

    assert not shard.core.commit(key("a"), committed("a", "b"))

    shard.core.clock_measured(choice(1, "a", "b"), 4.0)
    assert told(shard) == [("a", "ab", 4.0), ("b", "ab", 4.0)]


def test_a_record_that_commits_tells_the_scale() -> None:
    shard = complete("a", "b")
    gone = departure("b", last_clock=1, evicted=True)
    shard.install(
        record(
            {"a": 0},
            generation=2,
            departures=(gone,),
            departed_step_count=1,
            commit=committed("a", "b"),
        )
    )

    (order,) = shard.apply_all()
    assert order.gradient_scale == NORM_3
    assert shard.replies()[push_id("a")].grad_norm == 3.0


def test_a_clock_that_nobody_is_left_of_waits_for_a_record() -> None:
    shard = staged("a")
    shard.forget()
    gone = departure("a", last_clock=1, evicted=True)
    shard.depart({}, gone, steps=1)
    assert shard.apply_all() == []
    assert told(shard) == []

    shard.freeze(3)
    assert shard.reports()[-1].measured is not None
    shard.install(
        record(
            {},
            generation=3,
            departures=(gone,),
            departed_step_count=1,
            commit=committed("a"),
        )
    )

    (order,) = shard.apply_all()
    assert order.gradient_scale == NORM_3
    assert shard.core.clocks.version == 1


def test_only_the_newest_commit_counts_for_the_norm_of_an_answer() -> None:
    shard = staged("a")
    shard.core.commit(key("a"), committed("a"))
    shard.apply_all()
    shard.push("a", 2, finite=False)
    shard.core.commit(key("a"), committed("a", total=0.0, scale=1.0, clock=2))

    assert shard.outcomes() == {"a": Outcome.SKIPPED}
    assert shard.replies()[push_id("a", 2)].grad_norm is None


# Backup workers

BACKUPS = ShardRules(
    step_atomicity=StepAtomicity.CLOCK,
    backup_worker_count=1,
    is_first=True,
    shard_count=2,
    update=UpdateRules(clip_grad_norm=1.0),
)


def stands(*names: str) -> ClockChoice:
    return chosen_by_first(1, *names)._replace(gradient_scale=0.0)


def with_backups(*names: str) -> DrivenShard:
    """All have pushed clock 1 and were told of their own push."""
    shard = DrivenShard(dict.fromkeys(names, 0), (0,), rules=BACKUPS)
    for name in names:
        shard.push(name, chunks=[0])
    assert told(shard) == [(name, "", 0.0) for name in names]
    shard.forget()
    return shard


def test_those_that_were_chosen_are_told_what_the_clock_measures() -> None:
    shard = with_backups("a", "b", "c")
    for name in "ac":
        shard.core.ready(key(name), 1, 0)
    assert shard.core.choice_for(key("b"), 1) == stands("a", "c")
    assert shard.of(MeasureClock) == []

    assert not shard.core.commit(key("a"), stands("a", "c"))

    (order,) = shard.of(MeasureClock)
    assert [part.worker_id for part in order.chunks[0][1]] == ["a", "c"]
    shard.core.clock_measured(order.choice, 4.0)
    assert told(shard) == [("a", "ac", 4.0), ("c", "ac", 4.0)]
    assert shard.core.commit(key("c"), committed("a", "c"))
    (update,) = shard.apply_all()
    assert update.gradient_scale == NORM_3
    assert shard.outcomes() == {
        "a": Outcome.APPLIED,
        "b": Outcome.DROPPED,
        "c": Outcome.APPLIED,
    }
    assert shard.replies()[push_id("b")].grad_norm is None


def test_who_counts_is_told_once_and_for_all() -> None:
    shard = with_backups("a", "b")
    shard.core.commit(key("a"), stands("a"))
    shard.core.commit(key("b"), stands("b"))

    (order,) = shard.of(MeasureClock)
    assert order.choice[:2] == choice(1, "a")[:2]


def test_a_commit_overtaken_by_another_ones_scale_is_no_error() -> None:
    shard = with_backups("a", "b")
    shard.core.commit(key("a"), stands("a"))
    shard.core.clock_measured(shard.of(MeasureClock)[0].choice, 4.0)
    assert shard.core.commit(key("a"), committed("a"))

    assert shard.core.commit(key("a"), stands("a"))


def test_a_record_says_who_counts_before_the_scale_is_known() -> None:
    shard = with_backups("a", "b")
    shard.install(record({"a": 0, "b": 0}, generation=2, commit=stands("b")))

    (order,) = shard.of(MeasureClock)
    assert order.choice == choice(1, "b")._replace(gradient_scale=0.0)
    assert shard.apply_all() == []
    shard.core.clock_measured(order.choice, 4.0)
    assert told(shard) == [("b", "b", 4.0)]
    shard.freeze(3)
    part = stands("b")._replace(sum_of_squares=4.0)
    assert shard.reports()[-1].measured == proven(0, part)


# SSP and ASP


def test_a_push_by_itself_is_scaled_by_its_own_norm_in_one_phase() -> None:
    shard = shard_of("a", "b", mode=Mode.ASP)
    for name, norm in (("a", 3.0), ("b", 0.5)):
        push = push_id(name)
        shard.send_trailer(push, replace(trailer([0]), gradient_norm=norm))
        shard.send_chunk(push, 0)
        shard.apply_all()

    scales = [order.gradient_scale for order in shard.of(ApplyChunk)]
    assert scales == [NORM_3, 1.0]
    norms = {push.worker.worker_id: r.grad_norm for push, r in shard.replies().items()}
    assert norms == {"a": 3.0, "b": 0.5}
    assert shard.of(MeasureClock) == []
    assert shard.staged() == []


def test_clocks_are_measured_again_when_bsp_begins() -> None:
    shard = shard_of("a", mode=Mode.ASP)
    shard.step("a", 1, [0])
    shard.change(Mode.BSP, 1, bases={"a": 1}, sequences={"a": 1})
    shard.push("a", 2, chunks=[0])

    (order,) = shard.of(MeasureClock)
    assert order.choice == choice(2, "a")


def test_a_clock_of_bsp_that_is_open_when_asp_begins_is_committed() -> None:
    shard = complete("a", "b")
    shard.core.clock_measured(choice(1, "a", "b"), 4.0)
    shard.change(Mode.ASP, 1, bases={"a": 0, "b": 0})
    assert shard.apply_all() == []

    assert shard.core.commit(key("a"), committed("a", "b"))
    (order,) = shard.apply_all()
    assert order.gradient_scale == NORM_3


def test_a_push_that_comes_again_hears_what_was_measured_of_its_closed_clock() -> None:
    """Its driver may have been lost before it committed on another shard."""
    shard = staged("a", "b")
    before = shard.staged()[0].choice
    shard.core.commit(key("a"), committed("a", "b"))
    shard.apply_all()
    shard.forget()

    shard.open(push_id("a"))

    (again,) = shard.staged()
    assert (again.push, again.choice) == (push_id("a"), before)
    assert again.choice.proof


def test_a_clock_that_a_record_has_committed_is_said_to_nobody() -> None:
    shard = complete("a")
    shard.install(record({"a": 0}, generation=2, commit=committed("a")))
    shard.apply_all()
    shard.forget()

    shard.open(push_id("a"))

    assert shard.staged() == []
