"""Lost workers: who may be taken out, whom the job waits for, who comes back."""

from dataclasses import replace

import pytest

from psserver.coordinator.core.coordinator_effects import Abort, DecideCut, Prepare
from psserver.coordinator.core.roster import ENDED_KEPT_LEASES, WorkerEntry
from psserver.edge.coordinator_settings import CoordinatorSettings, JobPhase
from pswire.membership import (
    ClockChoice,
    FenceKind,
    LossPolicy,
    Mode,
    StepAtomicity,
    WorkerState,
)
from pswire.reasons import ErrorReason
from tests.doubles.core_values import TERMS, key
from tests.doubles.driven_coordinator import DrivenCoordinator, WritingCore
from tests.refusals import refused

SETTINGS = CoordinatorSettings(job_id="job", shard_count=2)
WAITING = replace(
    SETTINGS,
    worker_loss_policy=LossPolicy.WAIT,
    step_atomicity=StepAtomicity.CLOCK,
)


def running(*names: str, workers_min: int = 1) -> DrivenCoordinator:
    settings = replace(SETTINGS, workers_min=workers_min)
    return DrivenCoordinator.running(*names, settings=settings)


def entry_of(job: DrivenCoordinator, name: str) -> WorkerEntry:
    return job.core.roster.entry(key(name))


def lose(job: DrivenCoordinator, name: str) -> WorkerEntry:
    entry = entry_of(job, name)
    job.lose(entry)
    return entry


def state_of(entry: WorkerEntry) -> WorkerState:
    return entry.state


# The floor


def test_a_lost_worker_is_taken_out_when_enough_are_left() -> None:
    job = running("a", "b", "c", workers_min=2)
    entry = lose(job, "b")
    assert state_of(entry) is WorkerState.LOST
    job.report_all(applied=3)

    assert state_of(entry) is WorkerState.EVICTED
    assert job.bases.keys() == {"a/1", "c/1"}
    assert job.core.progress.workers_floor == 2
    assert job.core.waiting_for() == ""


def test_below_the_floor_it_stays_a_member_and_the_job_says_for_whom_it_waits() -> None:
    job = running("a", "b", workers_min=2)
    entry = lose(job, "b")
    job.pass_time(7_000)

    assert job.fence_kinds() == []
    assert state_of(entry) is WorkerState.LOST
    assert job.bases.keys() == {"a/1", "b/1"}
    assert job.phase() is JobPhase.RUNNING
    assert job.core.waiting_for() == (
        "b (lost 8 s ago in step 1), until it comes back, or another worker joins: "
        "without it there would be 1, the job wants 2"
    )


@pytest.mark.parametrize(("quorum", "is_evicted"), [(2, True), (3, False), (9, False)])
def test_in_mode_quorum_a_lost_one_is_evicted_where_a_quorum_is_left(
    quorum: int, is_evicted: bool
) -> None:
    """It keeps no clock open there, and the others train what it had."""
    settings = replace(SETTINGS, workers_min=3, mode=Mode.QUORUM, quorum=quorum)
    job = DrivenCoordinator.running("a", "b", "c", settings=settings)
    entry = lose(job, "b")
    if is_evicted:
        job.report_all(applied=3)
    assert (state_of(entry) is WorkerState.EVICTED) is is_evicted
    assert ("the job wants 3" in job.core.waiting_for()) is not is_evicted
    # For another mode the floor is what it was.
    assert job.core.record is not None
    assert job.core.record.workers_floor == 3


def test_a_job_whose_last_member_is_lost_waits_and_is_not_finished() -> None:
    job = running("a")
    entry = lose(job, "a")
    job.pass_time(1_000_000)

    assert job.phase() is JobPhase.RUNNING
    assert job.bases.keys() == {"a/1"}
    assert state_of(entry) is WorkerState.LOST


def test_of_two_lost_ones_neither_is_taken_out_while_too_few_would_be_left() -> None:
    job = running("a", "b", "c", workers_min=2)
    first, second = (entry_of(job, name) for name in "bc")
    job.core.have_patience(job.now_ms)
    for entry in (first, second):
        job.core.worker_broken(entry, job.now_ms)
    job.pass_time(10_000)

    assert {state_of(first), state_of(second)} == {WorkerState.LOST}
    assert job.fence_kinds() == []
    assert job.core.waiting_for().count("or another worker joins") == 2
    job.watch(first)
    assert job.fence_kinds() == [FenceKind.MEMBERSHIP]
    job.report_all(applied=1)
    assert job.bases.keys() == {"a/1", "b/1"}


def test_a_suspect_does_not_count_as_left() -> None:
    job = running("a", "b", "c", workers_min=2)
    job.core.worker_broken(entry_of(job, "b"), job.now_ms)
    job.pass_time(499)
    suspect = entry_of(job, "c")
    job.core.worker_broken(suspect, job.now_ms)
    job.core.have_patience(-20_000)  # as if nothing spoke for the network
    job.pass_time(1)
    assert job.fence_kinds() == []

    job.watch(suspect)
    job.pass_time(1)
    assert job.fence_kinds() == [FenceKind.MEMBERSHIP]


def test_a_joiner_that_waits_counts_and_comes_in_as_the_lost_one_goes() -> None:
    job = running("a", "b", workers_min=2)
    lose(job, "b")
    job.add_worker("c")
    job.report_all(applied=4, trailer=5)

    assert job.bases == {"a/1": 0, "c/1": 5}
    assert [r.kind for r in job.announced()] == [FenceKind.MEMBERSHIP]


def test_each_one_that_leaves_lowers_the_floor_and_who_comes_raises_it() -> None:
    job = running("a", "b", "c", workers_min=3)
    floors = [job.core.progress.workers_floor]
    job.leave(entry_of(job, "c"), 1)
    job.report_all(applied=1)
    floors.append(job.core.progress.workers_floor)
    job.leave(entry_of(job, "b"), 1)
    job.report_all(applied=1)
    floors.append(job.core.progress.workers_floor)
    for name in "defg":
        job.add_worker(name)
        job.report_all(applied=1)
        floors.append(job.core.progress.workers_floor)

    assert floors == [3, 2, 1, 2, 3, 3, 3]
    assert len(job.bases) == 5


def test_a_worker_that_is_taken_out_does_not_lower_the_floor() -> None:
    job = running("a", "b", "c", workers_min=2)
    lose(job, "b")
    job.report_all()
    lose(job, "c")
    assert job.core.progress.workers_floor == 2
    assert job.bases.keys() == {"a/1", "c/1"}


def test_who_leaves_in_the_same_fence_lowers_the_floor_for_it() -> None:
    job = running("a", "b", "c", "d", workers_min=4)
    lose(job, "b")
    assert job.fence_kinds() == []
    job.core.want_cut(0)  # keeps a fence open while the others leave
    job.leave(entry_of(job, "c"), 1)
    job.leave(entry_of(job, "d"), 1)
    job.report_all(applied=1)
    job.report_all(applied=1)

    # Two are members now, one of them lost: the job waits for it.
    assert job.bases.keys() == {"a/1", "b/1"}
    assert job.core.progress.workers_floor == 2
    assert "b (lost" in job.core.waiting_for()


def test_a_coordinator_started_again_with_a_lower_minimum_goes_on() -> None:
    job = running("a", "b", workers_min=2)
    newest = job.record
    assert newest.workers_floor == 2
    job.core = WritingCore(SETTINGS, start_count=1)
    job.core.restore(
        terms=TERMS,
        record=newest,
        incarnations={"a": 1, "b": 1},
        processes={key("a"): "process-a", key("b"): "process-b"},
        now_ms=0,
    )
    job.add_shards()
    job.watch(job.register("a"))
    job.pass_time(10_500)
    job.report_all()

    assert job.core.progress.workers_floor == 1
    assert job.bases.keys() == {"a/1"}


# Coming back


def test_a_lost_worker_whose_stream_comes_back_is_a_member_again() -> None:
    job = running("a", "b", workers_min=2)
    entry = lose(job, "b")
    job.pass_time(60_000)
    job.watch(entry)

    assert state_of(entry) is WorkerState.MEMBER
    assert job.core.waiting_for() == ""


def test_one_that_is_back_before_the_record_ends_the_fence_that_took_it_out() -> None:
    job = running("a", "b")
    entry = lose(job, "b")
    job.report(0, applied=3)
    job.watch(entry)
    job.report(1, applied=3)

    assert [abort.reason for abort in job.of(Abort)] == ["b/1 is back"]
    assert job.announced() == []
    assert job.core.fence is None
    assert state_of(entry) is WorkerState.MEMBER


def test_no_record_takes_out_more_than_the_floor_allows_when_it_is_written() -> None:
    job = running("a", "b")
    lose(job, "b")
    job.report(0, applied=3)
    job.core.worker_broken(entry_of(job, "a"), job.now_ms)
    job.report(1, applied=3)

    assert "too few would be left" in job.of(Abort)[-1].reason
    assert job.bases.keys() == {"a/1", "b/1"}
    assert job.core.fence is None
    job.watch(entry_of(job, "a"))
    job.pass_time(1)
    job.report_all(applied=3)
    assert job.bases.keys() == {"a/1"}


def test_the_id_of_a_lost_worker_is_free_at_once() -> None:
    job = running("a", "b", workers_min=2)
    old = lose(job, "b")
    new = job.register("b", process_id="another")

    assert new.worker == key("b/2")
    for act in (
        lambda: job.watch(old),
        lambda: job.core.roster.entry(key("b")),
        lambda: job.core.check_present(old),
    ):
        with refused(ErrorReason.WORKER_INCARNATION_STALE):
            act()


def test_a_lost_one_whose_replacement_gave_up_may_come_back() -> None:
    job = running("a", "b", workers_min=2)
    old = lose(job, "b")
    new = job.register("b", process_id="another")
    job.leave(new)
    job.watch(old)
    assert state_of(old) is WorkerState.MEMBER


@pytest.mark.parametrize("is_leaving", [False, True])
def test_the_id_of_a_suspect_or_leaving_worker_is_refused_for_the_moment(
    is_leaving: bool,
) -> None:
    job = running("a", "b")
    entry = entry_of(job, "b")
    if is_leaving:
        job.leave(entry)
    else:
        job.core.worker_broken(entry, job.now_ms)
    with refused(ErrorReason.WORKER_ID_TAKEN):
        job.register("b", process_id="another")


def test_an_id_of_the_coordinators_choice_replaces_nobody() -> None:
    job = running("w0", "w1", workers_min=2)
    lose(job, "w1")
    assert job.register("", process_id="another").worker == key("w2")


def test_a_process_whose_start_was_taken_out_gets_a_new_one() -> None:
    job = running("a", "b")
    lose(job, "b")
    job.report_all()
    again = job.register("b")
    assert again.worker == key("b/2")
    assert job.register("b") is again


def test_with_continue_a_replacement_joins_as_anybody_does() -> None:
    job = running("a", "b", workers_min=2)
    lose(job, "b")
    job.add_worker("b", process_id="another")
    assert job.fence_kinds() == [FenceKind.MEMBERSHIP]
    job.report(0, applied=6, trailer=7, complete={"b": 7})
    job.report(1, applied=6)

    assert job.bases == {"a/1": 0, "b/2": 7}
    (gone,) = job.record.departures
    assert (gone.last_clock, gone.evicted) == (6, True)


def test_nobody_is_a_member_twice() -> None:
    """Its replacement waits until the lost one may go."""
    job = running("a", "b", "c", workers_min=3)
    for name in "bc":
        lose(job, name)
    job.add_worker("b", process_id="another")
    assert job.fence_kinds() == []
    job.add_worker("c", process_id="another too")
    job.report_all(applied=1)
    assert job.bases.keys() == {"a/1", "b/2", "c/2"}


# Waiting for a replacement


def test_with_wait_a_lost_worker_goes_only_as_its_replacement_comes() -> None:
    job = DrivenCoordinator.running("a", "b", "c", settings=WAITING)
    lose(job, "b")
    job.add_worker("d")
    job.report_all(applied=6)
    assert job.bases.keys() == {"a/1", "b/1", "c/1", "d/1"}
    assert job.core.waiting_for() == (
        "b (lost 0 s ago in step 1), until it comes back, or a new worker joins with "
        "--worker-id b"
    )

    job.add_worker("b", process_id="another")
    assert job.core.waiting_for().endswith("until the job goes on without it")
    job.report_all(applied=6, trailer=7)
    assert job.bases == {"a/1": 0, "b/2": 6, "c/1": 0, "d/1": 6}


def test_a_replacement_takes_over_the_clock_that_was_open() -> None:
    job = DrivenCoordinator.running("a", "b", settings=WAITING)
    lose(job, "b")
    job.add_worker("b", process_id="another")
    job.report(0, applied=6, trailer=7, complete={"b": 7})
    job.report(1, applied=6, trailer=7)

    assert job.bases == {"a/1": 0, "b/2": 6}
    assert job.record.member_of(key("b/2")) is not None
    assert job.record.departed_step_count == 6


def test_a_replacement_does_not_take_over_a_clock_that_some_shard_has_skipped() -> None:
    job = DrivenCoordinator.running("a", "b", settings=WAITING)
    lose(job, "b")
    job.add_worker("b", process_id="another")
    job.report(0, applied=7)
    job.report(1, applied=6, trailer=7)
    assert job.bases == {"a/1": 0, "b/2": 7}
    assert [end.last_clock for end in job.record.departures] == [6]


def test_a_replacement_does_not_take_over_a_clock_that_was_committed_without_it() -> (
    None
):
    settings = replace(WAITING, backup_worker_count=1)
    job = DrivenCoordinator.running("a", "b", settings=settings)
    lose(job, "b")
    job.add_worker("b", process_id="another")
    committed = ClockChoice(7, (key("a"),))
    job.send(0, replace(job.report_of(applied=7), committed=committed))
    job.send(1, job.report_of(applied=6, trailer=7))

    assert job.record.commit == committed
    assert job.bases == {"a/1": 0, "b/2": 7}
    assert [end.last_clock for end in job.record.departures] == [6]


def test_what_waiting_needs_is_held() -> None:
    for settings in (
        {"worker_loss_policy": LossPolicy.WAIT},
        {"backup_worker_count": 1},
    ):
        with pytest.raises(AssertionError, match="may be applied before"):
            replace(SETTINGS, **settings)


# Taken out alive


def test_one_that_contradicts_itself_is_taken_out_though_it_lives() -> None:
    job = running("a", "b")
    entry = entry_of(job, "b")
    job.core.evict(entry, job.now_ms)
    job.core.evict(entry, job.now_ms)
    assert [p.evicting for p in job.of(Prepare)] == [(key("b"),)]
    job.report_all(applied=2)

    assert state_of(entry) is WorkerState.EVICTED
    assert job.bases.keys() == {"a/1"}


def test_it_stays_when_too_few_would_be_left() -> None:
    job = running("a", "b", workers_min=2)
    job.core.evict(entry_of(job, "b"), job.now_ms)
    assert job.fence_kinds() == []


# Patience


@pytest.mark.parametrize(
    ("worker_count", "broken_count", "is_patient"),
    [
        (2, 1, False),
        (2, 2, True),
        (3, 1, False),
        (3, 2, True),
        (4, 2, False),
        (5, 2, False),
        (5, 3, True),
        (5, 5, True),
    ],
)
def test_when_most_streams_break_together_nobody_is_lost_for_a_lease(
    worker_count: int, broken_count: int, is_patient: bool
) -> None:
    job = running(*"abcde"[:worker_count])
    entries = [entry_of(job, name) for name in "abcde"[:broken_count]]
    for entry in entries:
        job.core.worker_broken(entry, job.now_ms)
        job.pass_time(100 // broken_count)
    job.pass_time(9_000)
    assert {state_of(entry) for entry in entries} == {
        WorkerState.SUSPECT if is_patient else WorkerState.LOST
    }

    job.pass_time(1_000)
    assert {state_of(entry) for entry in entries} == {WorkerState.LOST}


def test_streams_that_break_one_after_the_other_are_the_workers_own() -> None:
    job = running("a", "b", "c")
    for name in "ab":
        lose(job, name)
        job.pass_time(1_000)
    assert job.core.roster.in_state(WorkerState.LOST)


# What is remembered


def test_starts_that_are_over_are_forgotten() -> None:
    job = running("a", "b")
    gone = entry_of(job, "b")
    job.leave(gone, 3)
    job.report_all(applied=3)
    lease_ttl_ms = job.core.settings.lease_ttl_ms
    job.pass_time(ENDED_KEPT_LEASES * lease_ttl_ms - 1)
    assert job.core.roster.entry(key("b")) is gone  # asks again to leave
    job.pass_time(1)

    assert job.core.roster.find(key("b")) is None
    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        job.core.roster.entry(key("b"))
    assert job.register("b", process_id="another").worker == key("b/2")


def test_a_newer_start_lets_the_ones_before_be_forgotten() -> None:
    job = running("a")
    for incarnation in range(1, 50):
        entry = job.register("b", process_id=f"process {incarnation}")
        assert entry.worker == key(f"b/{incarnation}")
        job.leave(entry)
    assert len(job.core.roster.in_state(*WorkerState)) == 2
    assert job.core.roster.incarnations == {"a": 1, "b": 49}


# Nobody left


def test_with_the_last_living_one_go_those_that_are_lost() -> None:
    job = running("a", "b", workers_min=2)
    lose(job, "b")
    job.leave(entry_of(job, "a"), sequence=3)
    job.report_all(applied=3)

    assert job.record.members == ()
    assert [end.evicted for end in job.record.departures] == [False, True]
    assert job.phase() is JobPhase.FINISHED


def test_a_place_of_one_that_may_come_back_ends_with_its_lease() -> None:
    """As after a restart of the coordinator: the dead are not told from others yet."""
    job = running("a", "b")
    other = entry_of(job, "b")
    job.core.worker_broken(other, job.now_ms)
    job.leave(entry_of(job, "a"), sequence=3)
    job.report_all(applied=3)
    assert job.bases.keys() == {"b/1"}
    assert job.core.progress.workers_floor == 0

    job.pass_time(job.core.settings.reconnect_grace_ms)
    job.report(0, applied=4)
    job.report(1, applied=3)
    assert job.record.members == ()


def test_who_is_back_by_then_goes_on() -> None:
    job = running("a", "b")
    other = entry_of(job, "b")
    job.core.worker_broken(other, job.now_ms)
    job.leave(entry_of(job, "a"), sequence=3)
    job.report_all(applied=3)
    job.watch(other)
    job.pass_time(100_000)

    assert job.bases.keys() == {"b/1"}
    assert job.core.fence is None


def test_while_one_that_lives_stays_the_lost_keep_their_places() -> None:
    job = running("a", "b", "c", workers_min=3)
    lose(job, "b")
    job.leave(entry_of(job, "a"), sequence=3)
    job.report_all(applied=3)

    assert job.bases.keys() == {"b/1", "c/1"}
    assert job.core.progress.workers_floor == 2


def test_a_snapshot_waits_for_the_dead_no_longer_than_they_keep_their_places() -> None:
    job = running("a", "b")
    job.core.worker_broken(entry_of(job, "b"), job.now_ms)
    job.leave(entry_of(job, "a"), sequence=3)
    job.report_all(applied=3)
    wanted = job.core.want_cut(job.now_ms)
    job.report(0, applied=4)  # the last clock of `b` is closed on one shard alone
    job.report(1, applied=3)
    assert job.core.snapshots.pending is not None
    job.pass_time(job.core.settings.reconnect_grace_ms)
    job.report(0, applied=4)
    job.report(1, applied=3)
    job.report_all(applied=4)
    (*_, decided) = job.of(DecideCut)
    job.copy_all(decided.snapshot_id)

    snapshots = job.core.snapshots
    assert snapshots.newest is not None
    assert snapshots.newest.snapshot_id == decided.snapshot_id
    assert snapshots.finished_cut_count >= wanted


@pytest.mark.parametrize("mode", [Mode.BSP, Mode.ASP])
def test_with_nobody_alive_what_the_shards_have_is_a_cut(mode: Mode) -> None:
    settings = replace(SETTINGS, mode=mode, workers_min=2)
    job = DrivenCoordinator.running("a", "b", settings=settings)
    lose(job, "a")
    lose(job, "b")
    job.core.want_cut(job.now_ms)
    assert job.fence_kinds() == [FenceKind.CUT]
    job.report(0, applied=4)
    job.report(1, applied=3, complete={"b": 3}, trailer=4)
    assert job.fence_kinds() == [FenceKind.CUT, FenceKind.MEMBERSHIP]
    job.report(0, applied=4)
    job.report(1, applied=3, complete={"b": 3}, trailer=4)
    assert job.record.members == ()
    job.report_all(applied=4)
    (decided,) = job.of(DecideCut)
    job.copy_all(decided.snapshot_id)

    assert job.core.snapshots.newest is not None
    assert job.phase() is JobPhase.RUNNING
    assert job.core.waiting_for() == "a worker to go on: the last ones were lost"
    job.add_worker("c")
    job.report_all(applied=4)
    assert job.bases == {"c/1": 4}
    lose(job, "c")  # which went on alone, and so may the next one
    job.add_worker("d")
    job.report_all(applied=4)
    assert job.bases == {"d/1": 4}


def test_a_cut_that_has_all_it_needs_takes_nobody_out() -> None:
    job = running("a", "b", workers_min=2)
    lose(job, "a")
    lose(job, "b")
    job.core.want_cut(job.now_ms)
    job.report_all(applied=4)

    assert job.fence_kinds() == [FenceKind.CUT]
    assert len(job.of(DecideCut)) == 1
    assert job.bases.keys() == {"a/1", "b/1"}


def test_a_cut_that_waits_for_one_that_lives_waits() -> None:
    job = running("a", "b", workers_min=2)
    lose(job, "b")
    job.core.want_cut(job.now_ms)
    job.report(0, applied=4)
    job.report(1, applied=3)
    job.pass_time(1_000)

    assert job.fence_kinds() == [FenceKind.CUT]
    assert job.core.snapshots.pending is not None


def test_with_wait_the_dead_keep_their_places_for_those_that_replace_them() -> None:
    job = DrivenCoordinator.running("a", settings=WAITING)
    lose(job, "a")
    job.core.want_cut(job.now_ms)
    job.report(0, applied=4)
    job.report(1, applied=3)
    job.pass_time(1_000)

    assert FenceKind.MEMBERSHIP not in job.fence_kinds()
    assert job.bases.keys() == {"a/1"}
