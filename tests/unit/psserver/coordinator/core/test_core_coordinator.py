"""The coordinator: start, membership, losses; one fence at a time."""

from dataclasses import replace

import pytest

from psserver.coordinator.core.coordinator_effects import (
    Abort,
    EndJob,
    OrderSeed,
    Prepare,
)
from psserver.coordinator.core.roster import WorkerEntry
from psserver.edge.coordinator_settings import JobPhase
from pswire.membership import FenceKind, WorkerState
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import key
from tests.doubles.driven_coordinator import DrivenCoordinator
from tests.refusals import refused


def state_of(entry: WorkerEntry) -> WorkerState:
    return entry.state


# Start


def test_the_start_waits_for_all_shards_and_enough_workers() -> None:
    job = DrivenCoordinator(shard_count=2, workers_min=2)
    job.add_shards(but=1)
    job.add_worker("a")
    assert job.core.waiting_for() == (
        "shard 1 (not connected yet), 1 more worker to call prepare() (1 of 2 have)"
    )
    job.add_worker("b")
    assert job.core.waiting_for() == "shard 1 (not connected yet)"
    assert job.fence_kinds() == []
    assert job.phase() is JobPhase.WAITING

    job.add_shards()

    assert job.fence_kinds() == [FenceKind.START]
    assert job.phase() is JobPhase.SEEDING
    assert job.core.waiting_for() == "the first values from a"


def test_all_start_together_at_clock_0_in_the_order_of_their_ids() -> None:
    job = DrivenCoordinator(workers_min=3)
    job.add_shards()
    for name in "cab":
        job.add_worker(name)
    job.report_all()

    (record,) = job.announced()
    assert [(str(m.worker), m.rank) for m in record.members] == [
        ("a/1", 0),
        ("b/1", 1),
        ("c/1", 2),
    ]
    assert {m.base_clock for m in record.members} == {0}
    assert (record.generation, record.kind) == (1, FenceKind.START)
    assert job.phase() is JobPhase.RUNNING


def test_rank_0_seeds() -> None:
    job = DrivenCoordinator(workers_min=2)
    job.add_shards()
    job.add_worker("b")
    job.add_worker("a")

    (order,) = job.of(OrderSeed)
    (prepare,) = job.of(Prepare)
    assert order.worker == prepare.seeder == key("a")
    assert order.fence_number == prepare.fence_number


def test_a_seeder_whose_stream_was_away_is_told_again() -> None:
    job = DrivenCoordinator()
    job.add_shards()
    entry = job.add_worker("a")
    job.core.worker_broken(entry, job.now_ms)
    job.watch(entry)

    assert [order.worker for order in job.of(OrderSeed)] == [key("a")] * 2


def test_when_the_seeder_is_lost_the_next_rank_seeds() -> None:
    job = DrivenCoordinator(workers_min=1)
    job.add_shards(but=1)
    seeder = job.add_worker("a")
    job.add_worker("b")
    job.add_shards()
    job.report(0)
    job.lose(seeder)

    (abort,) = job.of(Abort)
    first, second = job.of(Prepare)
    assert abort.fence_number == first.fence_number < second.fence_number
    assert [order.worker for order in job.of(OrderSeed)] == [key("a"), key("b")]
    job.report_all()
    assert job.bases == {"b/1": 0}


def test_without_enough_workers_left_the_start_waits_again() -> None:
    job = DrivenCoordinator(workers_min=2)
    job.add_shards()
    job.add_worker("a")
    lost = job.add_worker("b")
    job.lose(lost)

    assert job.core.fence is None
    assert job.phase() is JobPhase.WAITING


def test_a_shard_lost_before_the_start_aborts_it_and_may_be_replaced() -> None:
    job = DrivenCoordinator()
    job.add_shards()
    job.add_worker("a")
    job.break_shard(1)
    assert len(job.of(Abort)) == 1
    assert job.core.waiting_for() == "shard 1 (lost 0 s ago at clock 0)"

    slot = job.core.register_shard(process_id="new", address="host:9", now_ms=0)
    job.core.shard_watching(slot, 0)

    assert (slot.index, slot.incarnation) == (1, 2)
    job.report_all()
    assert job.bases == {"a/1": 0}


def test_a_start_never_times_out() -> None:
    job = DrivenCoordinator()
    job.add_shards()
    job.add_worker("a")
    job.pass_time(1_000_000)
    assert job.of(Abort) == []


# Joining


def test_a_joiners_base_is_the_highest_clock_of_which_any_shard_has_a_trailer() -> None:
    job = DrivenCoordinator.running("a")
    job.add_worker("b")
    job.report(0, applied=6, trailer=7)
    job.report(1, applied=6)

    assert job.bases == {"a/1": 0, "b/1": 7}
    assert [r.generation for r in job.announced()] == [2]


def test_joining_is_asked_for_once() -> None:
    job = DrivenCoordinator.running("a")
    entry = job.add_worker("b")
    job.join(entry)
    job.report_all()
    job.join(entry)

    assert job.bases.keys() == {"a/1", "b/1"}
    assert job.fence_kinds() == [FenceKind.MEMBERSHIP]


def test_who_joins_while_a_fence_is_open_comes_with_the_next() -> None:
    job = DrivenCoordinator.running("a")
    job.add_worker("b")
    job.add_worker("c")
    job.report_all(applied=3)
    assert job.bases == {"a/1": 0, "b/1": 3}
    job.report_all(applied=4)
    assert job.bases == {"a/1": 0, "b/1": 3, "c/1": 4}


def test_a_joiner_that_is_lost_before_the_record_does_not_become_a_member() -> None:
    job = DrivenCoordinator.running("a")
    entry = job.add_worker("b")
    job.report(0)
    job.lose(entry)
    assert len(job.of(Abort)) == 1

    job.report(1)

    assert job.core.fence is None
    assert job.bases == {"a/1": 0}


@pytest.mark.parametrize("has_watched", [False, True])
def test_a_joiner_whose_stream_is_away_as_it_becomes_a_member_is_lost_in_time(
    has_watched: bool,
) -> None:
    """Everybody would wait for it for ever."""
    job = DrivenCoordinator.running("a")
    entry = job.register("b")
    if has_watched:
        job.watch(entry)
    job.join(entry)
    if has_watched:
        job.core.worker_broken(entry, job.now_ms)
    job.report_all()
    assert job.bases == {"a/1": 0, "b/1": 0}

    job.pass_time(500 if has_watched else 10_000)
    job.report_all()

    assert job.bases == {"a/1": 0}


def test_a_joiner_that_gives_up_before_the_record_does_not_become_a_member() -> None:
    job = DrivenCoordinator.running("a")
    entry = job.add_worker("b")
    job.leave(entry)
    assert job.core.fence is None
    assert state_of(entry) is WorkerState.LEFT


def test_one_that_has_left_can_not_come_back_under_the_same_start() -> None:
    """Its pushes are done: new ones would be taken for the old."""
    job = DrivenCoordinator.running("a", "b")
    entry = job.core.roster.entry(key("b"))
    job.leave(entry, 3)
    job.report_all(applied=3)

    for act in (job.join, job.watch):
        with refused(ErrorReason.WORKER_INCARNATION_STALE):
            act(entry)
    again = job.add_worker("b", process_id="another")
    assert again.worker == key("b/2")


# Leaving and losses


def test_one_that_leaves_says_what_was_its_last_push() -> None:
    job = DrivenCoordinator.running("a", "b")
    job.leave(job.core.roster.entry(key("b")), 4)
    job.report(0, applied=4, complete={"b": 5})
    job.report(1, applied=4, complete={"b": 5})

    assert job.bases == {"a/1": 0}
    (gone,) = job.record.departures
    assert (gone.last_clock, gone.evicted) == (4, False)
    assert job.record.departed_step_count == 4


def test_one_that_leaves_can_not_promise_pushes_that_nobody_has() -> None:
    job = DrivenCoordinator.running("a", "b")
    job.leave(job.core.roster.entry(key("b")), 1_000)
    job.report(0, applied=4, complete={"b": 5})
    job.report(1, applied=4)

    assert [gone.last_clock for gone in job.record.departures] == [4]


def test_a_last_push_whose_answer_was_lost_counts_once_it_is_applied() -> None:
    """A version that went back would be below snapshots that are out already."""
    job = DrivenCoordinator.running("a", "b")
    job.leave(job.core.roster.entry(key("b")), 4)
    job.report(0, applied=5, complete={"b": 5})
    job.report(1, applied=4, complete={"b": 5})

    assert [gone.last_clock for gone in job.record.departures] == [5]
    assert job.record.departed_step_count == 5


def test_of_an_evicted_worker_counts_what_every_shard_has_complete() -> None:
    job = DrivenCoordinator.running("a", "b")
    job.lose(job.core.roster.entry(key("b")))
    job.report(0, applied=6, complete={"b": 7})
    job.report(1, applied=6, complete={"b": 6})

    (gone,) = job.record.departures
    assert (str(gone.member.worker), gone.last_clock, gone.evicted) == ("b/1", 6, True)
    assert job.record.departed_step_count == 6


def test_departures_are_told_again_while_their_last_clock_is_open() -> None:
    job = DrivenCoordinator.running("a", "b")
    job.lose(job.core.roster.entry(key("b")))
    job.report_all(applied=6, trailer=7)
    job.add_worker("c")
    job.report(0, applied=5)
    job.report(1, applied=6)
    assert [str(d.member.worker) for d in job.record.departures] == ["b/1"]
    assert job.record.departed_step_count == 6

    job.add_worker("d")
    job.report_all(applied=6)
    assert job.record.departures == ()
    assert job.record.departed_step_count == 6


def test_a_skip_that_one_shard_saw_is_for_all() -> None:
    job = DrivenCoordinator.running("a", "b")
    job.lose(job.core.roster.entry(key("b")))
    job.send(0, replace(job.report_of(applied=6), skip_clocks=(7,)))
    job.send(1, replace(job.report_of(applied=6), skip_clocks=(7, 6)))

    assert job.record.skipped_clocks == (6, 7)


def test_one_fence_carries_many_changes() -> None:
    job = DrivenCoordinator.running("a", "b", "c")
    job.core.want_cut(0)  # keeps a fence open while the changes come in
    job.leave(job.core.roster.entry(key("a")), 2)
    job.lose(job.core.roster.entry(key("b")))
    job.add_worker("d")
    job.report_all(applied=2)
    assert job.record.generation == 1
    job.report_all(applied=2)

    assert job.record.generation == 2
    assert job.bases == {"c/1": 0, "d/1": 2}
    assert [(str(d.member.worker), d.evicted) for d in job.record.departures] == [
        ("a/1", False),
        ("b/1", True),
    ]
    # A joiner takes the lowest rank that is free.
    assert [(str(m.worker), m.rank) for m in job.record.members] == [
        ("d/1", 0),
        ("c/1", 2),
    ]


def test_a_suspect_that_comes_back_within_the_grace_stays() -> None:
    job = DrivenCoordinator.running("a")
    entry = job.core.roster.entry(key("a"))
    job.core.worker_broken(entry, job.now_ms)
    assert state_of(entry) is WorkerState.SUSPECT
    job.pass_time(job.core.settings.reconnect_grace_ms - 1)
    job.watch(entry)
    job.pass_time(1_000_000)

    assert state_of(entry) is WorkerState.MEMBER
    assert job.fence_kinds() == []


def test_a_suspect_that_does_not_come_back_is_evicted() -> None:
    job = DrivenCoordinator.running("a", "b")
    entry = job.core.roster.entry(key("b"))
    job.lose(entry)

    assert state_of(entry) is WorkerState.LOST
    assert job.fence_kinds() == [FenceKind.MEMBERSHIP]
    job.report_all()
    assert state_of(entry) is WorkerState.EVICTED
    assert job.core.progress.evicted_count == 1
    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        job.core.roster.entry(key("b"))


def test_a_worker_that_never_opens_its_watch_gives_its_id_back() -> None:
    job = DrivenCoordinator(lease_ttl_ms=10_000)
    job.register("a")
    job.pass_time(9_999)
    with refused(ErrorReason.WORKER_ID_TAKEN):
        job.register("a", process_id="another")
    job.pass_time(1)
    assert job.register("a", process_id="another").worker == key("a/2")


def test_when_everybody_has_left_the_job_is_finished_and_takes_newcomers() -> None:
    job = DrivenCoordinator.running("a")
    job.leave(job.core.roster.entry(key("a")), 5)
    job.report_all(applied=5)
    assert job.phase() is JobPhase.FINISHED

    job.add_worker("b")
    assert job.phase() is JobPhase.RUNNING
    job.report_all(applied=5)
    assert job.bases == {"b/1": 5}


# Time


def test_a_fence_without_all_reports_is_aborted_and_tried_again() -> None:
    job = DrivenCoordinator.running("a")
    job.add_worker("b")
    job.report(0)
    job.pass_time(job.core.settings.fence_timeout_ms - 1)
    assert job.of(Abort) == []
    job.pass_time(1)

    (abort,) = job.of(Abort)
    assert abort.reason == "no report from shard 1"
    assert job.fence_kinds() == [FenceKind.MEMBERSHIP] * 2
    assert job.announced() == []
    job.send(1, replace(job.report_of(), fence_number=abort.fence_number))
    assert job.announced() == []
    job.report_all()
    assert job.bases.keys() == {"a/1", "b/1"}


def test_a_repeated_report_counts_once() -> None:
    job = DrivenCoordinator.running("a")
    job.add_worker("b")
    job.report(0)
    job.report(0)
    assert job.announced() == []


def test_a_shard_that_comes_back_in_time_costs_nothing() -> None:
    job = DrivenCoordinator.running("a")
    job.break_shard(0)
    job.pass_time(job.core.settings.lease_ttl_ms // 2 - 1)
    job.core.shard_watching(job.core.shards.slots[0], job.now_ms)
    job.pass_time(1_000_000)
    assert job.core.progress.failure == ""


def test_a_lost_shard_ends_the_job_with_its_name() -> None:
    job = DrivenCoordinator.running("a")
    job.break_shard(1)
    job.pass_time(job.core.settings.lease_ttl_ms // 2)
    job.pass_time(1)

    (end,) = job.of(EndJob)
    assert end.reason == "shard 1 at host:1 was lost"
    assert job.phase() is JobPhase.FAILED
    for act in (
        lambda: job.register("z"),
        lambda: job.join(job.core.roster.entry(key("a"))),
        lambda: job.core.want_cut(0),
        lambda: job.core.register_shard(process_id="p", address="h:1", now_ms=0),
    ):
        with refused(ErrorReason.SHARD_LOST, "shard 1 at host:1"):
            act()


# Shards


def test_a_shard_that_asks_again_gets_the_same_place() -> None:
    job = DrivenCoordinator()
    job.add_shards()
    job.add_shards()
    assert [slot.incarnation for slot in job.core.shards.slots] == [1, 1]


def test_a_shard_too_many_is_refused_with_who_has_the_places() -> None:
    job = DrivenCoordinator()
    job.add_shards()
    with refused(ErrorReason.SHARD_UNKNOWN, r"2 shards and all are taken.*host:1"):
        job.core.register_shard(process_id="third", address="host:9", now_ms=0)


def test_a_place_is_kept_for_a_shard_that_is_about_to_open_its_watch() -> None:
    job = DrivenCoordinator(shard_count=1)
    job.core.register_shard(process_id="first", address="host:1", now_ms=0)
    with pytest.raises(Refusal):
        job.core.register_shard(process_id="second", address="host:2", now_ms=1_999)
    slot = job.core.register_shard(process_id="second", address="host:2", now_ms=2_000)
    assert (slot.index, slot.incarnation, slot.address) == (0, 2, "host:2")


def test_after_the_start_no_place_is_given_away() -> None:
    job = DrivenCoordinator.running("a")
    job.break_shard(0)
    with pytest.raises(Refusal, match=r"no answer from shard 0, .*another --state-dir"):
        job.core.register_shard(process_id="new", address="host:9", now_ms=0)


@pytest.mark.parametrize(
    ("index", "incarnation", "process_id", "reason"),
    [
        (2, 1, "shard-0", ErrorReason.SHARD_UNKNOWN),
        (-1, 1, "shard-0", ErrorReason.SHARD_UNKNOWN),
        (0, 2, "shard-0", ErrorReason.SHARD_INCARNATION_STALE),
        (0, 1, "shard-1", ErrorReason.SHARD_INCARNATION_STALE),
        (0, 1, "", ErrorReason.SHARD_INCARNATION_STALE),
    ],
)
def test_a_call_of_another_start_of_a_shard_is_refused(
    index: int, incarnation: int, process_id: str, reason: ErrorReason
) -> None:
    job = DrivenCoordinator.running("a")
    with refused(reason):
        job.core.shards.slot(index, incarnation, process_id)
    assert job.core.shards.slot(1, 1, "shard-1").index == 1
