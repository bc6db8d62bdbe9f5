"""A shard's side of fences: frozen from its report on, and never mixed."""

from psserver.edge.fence_report import FenceReport, WorkerHolding
from psserver.shard.core.effects import (
    ApplyChunk,
    CommitSeed,
    ContributionAwaited,
    CopyImage,
    DiscardSeed,
    Finish,
)
from psserver.shard.core.shard_fence import Cut
from pswire.membership import FenceKind, Outcome
from pswire.reasons import ErrorReason
from tests.doubles.core_values import departure, key, push_id, record, trailer
from tests.doubles.driven_shard import DrivenShard
from tests.refusals import refused


def frozen(bases: dict[str, int]) -> DrivenShard:
    shard = DrivenShard(bases, [0, 1])
    shard.freeze(2)
    return shard


# Frozen


def holding(
    name: str, *, complete: int, trailer: int, touched: int, begins: bool = False
) -> WorkerHolding:
    """Of a worker whose newest trailer begins a batch of which nothing is applied."""
    return WorkerHolding(
        worker=key(name),
        complete_sequence=complete,
        trailer_sequence=trailer,
        touched_sequence=touched,
        batch_sequence=trailer - begins,
        is_between_batches=begins,
    )


def test_a_frozen_shard_stages_and_applies_nothing() -> None:
    shard = frozen({"a": 0})
    shard.push("a", chunks=[0, 1])

    assert shard.of(ApplyChunk) == []
    assert set(shard.core.on_shard.window_of(key("a")).entries[1].staged) == {0, 1}
    assert shard.core.waiting_reason == (
        "the coordinator to decide a change of the workers"
    )

    shard.core.abort_fence(2)
    assert [order.chunk_index for order in shard.of(ApplyChunk)] == [0, 1]


def test_a_frozen_shard_skips_and_acknowledges_nothing() -> None:
    shard = frozen({"a": 0})
    shard.push("a", finite=False)
    assert shard.of(Finish) == []
    shard.core.abort_fence(2)
    assert [e.reply.outcome for e in shard.of(Finish)] == [Outcome.SKIPPED]


def test_a_chunk_that_comes_while_frozen_is_not_released() -> None:
    shard = DrivenShard({"a": 0}, [0, 1])
    shard.send_trailer(push_id("a"), trailer([0, 1]))
    shard.send_chunk(push_id("a"), 0)
    shard.core.chunk_applied(0)
    shard.freeze(2)

    shard.send_chunk(push_id("a"), 1)
    assert len(shard.of(ApplyChunk)) == 1

    shard.core.abort_fence(2)
    assert [order.chunk_index for order in shard.of(ApplyChunk)] == [0, 1]


def test_it_reports_only_when_nothing_is_being_applied() -> None:
    shard = DrivenShard({"a": 0}, [0, 1])
    push = shard.push("a", chunks=[0, 1])
    shard.freeze(2)
    shard.core.chunk_applied(0)
    assert shard.reports() == []

    shard.core.chunk_applied(1)

    (report,) = shard.reports()
    assert report.touched_clock_max == 1
    # Complete, yet neither counted nor answered before the fence is over.
    assert report.applied_clock == 0
    assert report.holdings == (holding("a", complete=1, trailer=1, touched=1),)
    assert shard.of(Finish) == []
    shard.core.abort_fence(2)
    assert shard.replies()[push].outcome is Outcome.APPLIED


def test_a_report_says_what_is_held_of_each_member() -> None:
    shard = DrivenShard({"a": 0, "b": 0, "c": 0, "d": 0}, [0])
    for name in "abcd":
        shard.push(name, chunks=[0])
    shard.apply_all()
    shard.forget()
    shard.push("a", 2, chunks=[0])
    shard.push("b", 2, finite=False)
    shard.send_trailer(push_id("c", 2), trailer([0]))
    shard.freeze(2)

    assert shard.reports() == [
        FenceReport(
            fence_number=2,
            holdings=(
                holding("a", complete=2, trailer=2, touched=1, begins=True),
                holding("b", complete=2, trailer=2, touched=1, begins=True),
                holding("c", complete=1, trailer=2, touched=1, begins=True),
                holding("d", complete=1, trailer=1, touched=1),
            ),
            trailer_clock_max=2,
            touched_clock_max=1,
            applied_clock=1,
            frontier=1,
        )
    ]


def test_a_report_names_the_clock_that_was_just_skipped() -> None:
    """Another shard may lack the push that was not finite."""
    shard = DrivenShard({"a": 0}, [0])
    shard.push("a", finite=False)
    shard.freeze(2)
    shard.core.abort_fence(2)
    shard.push("a", 2, weight=0.0)
    shard.freeze(3)

    assert [report.skip_clocks for report in shard.reports()] == [(1,), ()]


def test_a_report_counts_the_open_clock_of_one_that_ended() -> None:
    """`b` alone sent chunk 0 of clock 1; all that `a` sends of it is on its way."""
    shard = DrivenShard({"a": 0, "b": 0}, [0, 1])
    shard.send_trailer(push_id("a"), trailer([1]))
    shard.push("b", chunks=[0])
    shard.apply_all()
    gone = departure("b", last_clock=1, evicted=True)
    shard.depart({"a": 0}, gone)
    shard.freeze(3)

    (report,) = shard.reports()
    assert (report.applied_clock, report.touched_clock_max) == (0, 1)


def test_a_report_counts_the_trailer_of_one_that_ended() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("b", chunks=[0])
    gone = departure("b", last_clock=1, evicted=True)
    shard.depart({"a": 0}, gone)
    shard.freeze(3)

    (report,) = shard.reports()
    assert report.trailer_clock_max == 1


def test_a_report_keeps_joiners_out_of_a_clock_that_a_dead_worker_began() -> None:
    """Its chunk is applied: a joiner's, of the same clock, never would be."""
    shard = DrivenShard({"a": 0}, [0, 1])
    shard.send_trailer(push_id("a"), trailer([0, 1]))
    shard.send_chunk(push_id("a"), 0)
    shard.apply_all()
    gone = departure("a", last_clock=0, evicted=True)
    shard.depart({}, gone)
    shard.freeze(3)

    (report,) = shard.reports()
    assert (report.trailer_clock_max, report.touched_clock_max) == (1, 1)


def test_an_idle_worker_is_asked_after_the_fence() -> None:
    shard = frozen({"a": 0, "b": 0})
    shard.core.await_contribution(key("b"), 1, 0)
    shard.push("a", chunks=[0])
    assert shard.of(ContributionAwaited) == []

    shard.core.abort_fence(2)

    assert [each.worker for each in shard.of(ContributionAwaited)] == [key("b")]


# Repeated and outdated messages


def test_a_repeated_prepare_is_reported_once() -> None:
    shard = frozen({"a": 0})
    shard.freeze(2)
    shard.freeze(1)
    assert len(shard.reports()) == 1


def test_a_prepare_of_a_fence_that_is_over_opens_nothing() -> None:
    shard = DrivenShard({"a": 0}, [0])
    shard.core.abort_fence(5)
    shard.freeze(5)
    shard.push("a", chunks=[0])

    assert shard.reports() == []
    assert len(shard.of(ApplyChunk)) == 1


def test_a_record_newer_than_the_open_fence_ends_it() -> None:
    """Its abort was lost with a connection."""
    shard = frozen({"a": 0})
    shard.push("a", chunks=[0, 1])
    shard.install(record({"a": 0, "b": 1}, generation=4))

    assert len(shard.of(ApplyChunk)) == 2


def test_a_record_or_abort_of_an_older_fence_leaves_the_open_one() -> None:
    shard = DrivenShard({"a": 0}, [0])
    shard.freeze(7)
    shard.install(record({"a": 0}))
    shard.core.abort_fence(6)
    shard.push("a", chunks=[0])

    assert shard.of(ApplyChunk) == []


def test_the_record_that_is_known_already_ends_its_fence() -> None:
    shard = frozen({"a": 0})
    again = record({"a": 0}, generation=2)
    shard.install(again)
    shard.install(again)
    shard.push("a", chunks=[0, 1])

    assert len(shard.of(ApplyChunk)) == 2


# Start


def test_the_start_is_reported_when_the_seed_is_complete() -> None:
    shard = DrivenShard({}, [0, 1])
    shard.freeze(1, FenceKind.START, "a")
    shard.core.seed_chunk_staged(0)
    shard.core.seed_chunk_staged(0)
    assert shard.reports() == []

    shard.core.seed_chunk_staged(1)

    assert len(shard.reports()) == 1
    assert shard.of(CommitSeed) == []
    shard.install(record({"a": 0}))
    assert len(shard.of(CommitSeed)) == 1


def test_a_shard_without_chunks_needs_no_seed() -> None:
    shard = DrivenShard({}, [])
    shard.freeze(1, FenceKind.START, "a")
    assert len(shard.reports()) == 1


def test_an_aborted_start_throws_the_seed_away() -> None:
    shard = DrivenShard({}, [0])
    shard.freeze(1, FenceKind.START, "a")
    shard.core.seed_chunk_staged(0)
    shard.core.abort_fence(1)
    shard.freeze(2, FenceKind.START, "b")

    assert [report.fence_number for report in shard.reports()] == [1]
    assert len(shard.of(DiscardSeed)) == 3  # at each beginning, and at the abort
    shard.core.seed_chunk_staged(0)
    assert [report.fence_number for report in shard.reports()] == [1, 2]


def test_only_the_seeder_of_the_open_fence_may_seed() -> None:
    shard = DrivenShard({}, [0])
    shard.freeze(2, FenceKind.START, "a")

    shard.core.check_seeder(key("a"), 2)
    for worker, fence_number in ((key("b"), 2), (key("a/2"), 2), (key("a"), 1)):
        with refused(ErrorReason.WORKER_INCARNATION_STALE):
            shard.core.check_seeder(worker, fence_number)
    assert shard.core.is_seeding(1)
    assert shard.core.is_seeding(2)
    assert not shard.core.is_seeding(3)


def test_only_the_first_record_commits_a_seed() -> None:
    shard = DrivenShard({"a": 0}, [0])
    shard.install(record({"a": 0, "b": 0}, generation=2))
    assert shard.of(CommitSeed) == []


# Cuts


def cut_at(clock: int, shard: DrivenShard) -> None:
    shard.freeze(2, FenceKind.CUT)
    shard.core.decide_cut(2, Cut(9, clock))


def test_a_cut_at_the_applied_clock_is_copied_at_once() -> None:
    shard = DrivenShard({"a": 0}, [0])
    shard.step("a", 1, [0])
    cut_at(1, shard)

    assert [(copy.cut.snapshot_id, copy.clock) for copy in shard.copies()] == [(9, 1)]


def test_the_image_of_a_cut_is_ordered_between_what_is_in_it_and_what_is_not() -> None:
    """Nothing waits for the copy itself: the owner makes it beside what follows."""
    shard = DrivenShard({"a": 0}, [0, 1])
    cut_at(1, shard)
    assert shard.copies() == []
    shard.push("a", 1, chunks=[0, 1])
    assert [order.clock for order in shard.of(ApplyChunk)] == [1, 1]
    assert shard.copies() == []
    shard.apply_all()
    shard.push("a", 2, chunks=[0, 1])

    assert [(copy.cut.snapshot_id, copy.clock) for copy in shard.copies()] == [(9, 1)]
    orders = shard.image_orders()
    assert [each.clock for each in orders] == [1, 1, 1, 2, 2]
    assert isinstance(orders[2], CopyImage)
    assert not shard.core.is_frozen


def test_a_cut_yields_to_any_other_fence() -> None:
    shard = DrivenShard({"a": 0}, [0])
    cut_at(1, shard)
    shard.freeze(3)
    shard.core.abort_fence(3)
    shard.step("a", 1, [0])
    shard.step("a", 2, [0])

    assert shard.copies() == []
    assert shard.core.clocks.applied_clock == 2


def test_a_repeated_prepare_of_the_cut_itself_does_not_end_it() -> None:
    shard = DrivenShard({"a": 0}, [0])
    cut_at(1, shard)
    shard.freeze(2, FenceKind.CUT)
    shard.step("a", 1, [0])

    assert len(shard.copies()) == 1


def test_a_fence_does_not_wait_for_a_copy() -> None:
    shard = DrivenShard({"a": 0}, [0])
    cut_at(0, shard)
    shard.forget()
    shard.freeze(3)

    assert [report.fence_number for report in shard.reports()] == [3]


def test_a_decision_about_a_cut_that_is_over_is_ignored() -> None:
    shard = DrivenShard({"a": 0}, [0])
    shard.freeze(2, FenceKind.CUT)
    shard.core.abort_fence(2)
    shard.core.decide_cut(2, Cut(9, 0))
    assert shard.copies() == []


def test_a_cut_that_nobody_wants_any_more_is_not_made() -> None:
    shard = DrivenShard({"a": 0}, [0])
    cut_at(1, shard)
    shard.core.withdraw_cut(8)
    shard.core.withdraw_cut(9)
    shard.step("a", 1, [0])
    assert shard.copies() == []


def test_the_last_snapshot_of_a_job_passes_what_a_dead_worker_began() -> None:
    """One shard had applied its last step, this one never got it."""
    shard = DrivenShard({"a": 0}, [0])
    shard.step("a", 1, [0])
    gone = departure("a", last_clock=1, evicted=True)
    shard.depart({}, gone, steps=1)
    shard.freeze(3, FenceKind.CUT)
    shard.core.decide_cut(3, Cut(9, 2))

    assert [(copy.cut.snapshot_id, copy.clock) for copy in shard.copies()] == [(9, 2)]
    assert shard.core.clocks.version == 1
