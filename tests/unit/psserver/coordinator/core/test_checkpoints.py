"""When a checkpoint is made, what is in it, and what ends one that is being made."""

from dataclasses import replace

import pytest

from psserver.coordinator.core.checkpoints import (
    BATCHES_MS,
    LAST_STATE_WAIT_MS,
    POSTPONED_MS,
    RETRY_MS,
    STATE_WAIT_MS,
)
from psserver.coordinator.core.coordinator_effects import (
    Abort,
    CheckpointFailed,
    CommitCheckpoint,
    DecideCut,
    NameCheckpoint,
    ReleaseImage,
    WantState,
    WriteCheckpoint,
)
from psserver.coordinator.core.shard_map import ShardStanding
from psserver.coordinator.core.start_point import SavedJob, StartPoint
from psserver.edge.checkpoint_interval import CheckpointInterval
from psserver.edge.coordinator_settings import CheckpointSettings, CoordinatorSettings
from psserver.edge.cut_report import CutReport, PartReport
from pswire.checkpoint.manifest import FilePart
from pswire.checkpoint.place import CheckpointPlace
from pswire.membership import (
    CutPurpose,
    FenceKind,
    LossPolicy,
    Mode,
    StepAtomicity,
    WorkerState,
)
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import departure, key
from tests.doubles.driven_coordinator import DrivenCoordinator
from tests.refusals import refused

PLACE = CheckpointPlace("/checkpoints", "step-000000000006")
PART = FilePart("part", 100, "0" * 32)

SETTINGS = CoordinatorSettings(
    job_id="job",
    shard_count=2,
    checkpoints=CheckpointSettings(
        url=PLACE.url, interval=CheckpointInterval(duration_ms=60_000)
    ),
)


def running(*names: str, settings: CoordinatorSettings = SETTINGS) -> DrivenCoordinator:
    return DrivenCoordinator.running(*(names or ("a", "b")), settings=settings)


def by_steps(step_count: int) -> CoordinatorSettings:
    interval = CheckpointInterval(step_count=step_count)
    checkpoints = CheckpointSettings(url=PLACE.url, interval=interval)
    return replace(SETTINGS, checkpoints=checkpoints)


def reach(job: DrivenCoordinator, version: int) -> None:
    """All shards report that their values have this version."""
    for slot in job.core.shards.slots:
        slot.standing = ShardStanding(heard_ms=job.now_ms, version=version)
    job.pass_time(1)


def want(job: DrivenCoordinator) -> int:
    return job.core.want_checkpoint(job.now_ms)


def decide(job: DrivenCoordinator, *, applied: int = 3) -> DecideCut:
    job.report_all(applied=applied)
    return job.of(DecideCut)[-1]


def copied(job: DrivenCoordinator, *, applied: int = 3) -> int:
    """A checkpoint that all shards have copied; the name of its cut."""
    want(job)
    snapshot_id = decide(job, applied=applied).snapshot_id
    assert job.of(WantState) == [], "the ledger is not settled yet"
    job.copy_all(snapshot_id)
    return snapshot_id


def written(job: DrivenCoordinator, *, but: int = 0) -> int:
    """One that all shards but some have written; the name of its cut."""
    snapshot_id = copied(job)
    write(job, snapshot_id, but=but)
    return snapshot_id


def write(job: DrivenCoordinator, snapshot_id: int, *, but: int = 0) -> None:
    """The checkpoint gets its name, and all shards but some have written."""
    job.core.checkpoint_named(snapshot_id, PLACE)
    for slot in job.core.shards.slots[: len(job.core.shards.slots) - but]:
        job.core.report_checkpoint(slot, PartReport(snapshot_id, PART), job.now_ms)


def commit(job: DrivenCoordinator, snapshot_id: int) -> SavedJob:
    """The manifest is durable."""
    checkpoint = job.core.checkpoints.of(snapshot_id)
    assert checkpoint is not None
    saved = SavedJob(
        job_id="job",
        job_seed=0,
        point=StartPoint(
            place=PLACE,
            clock=checkpoint.cut.clock,
            version=checkpoint.cut.version,
            mode=Mode.BSP,
            staleness_bound=0,
            generation=1,
        ),
        terms=checkpoint.terms,
        epochs=checkpoint.ledger.epochs(),
    )
    job.core.checkpoint_committed(snapshot_id, saved, job.now_ms)
    return saved


def make(job: DrivenCoordinator, *, applied: int = 3) -> None:
    """A checkpoint from the wish to its manifest."""
    snapshot_id = copied(job, applied=applied)
    write(job, snapshot_id)
    commit(job, snapshot_id)


# When


def test_one_is_due_after_so_much_time_if_there_are_steps_since() -> None:
    job = running()
    job.pass_time(60_000)
    assert job.fence_kinds() == []
    reach(job, 1)
    assert job.fence_kinds() == [FenceKind.CUT]


def test_one_is_due_after_so_many_steps_on_every_shard() -> None:
    job = running(settings=by_steps(10))
    reach(job, 9)
    job.core.shards.slots[0].standing = ShardStanding(version=20)
    job.pass_time(3_600_000)
    assert job.fence_kinds() == []
    reach(job, 10)
    assert job.fence_kinds() == [FenceKind.CUT]


def test_the_next_one_is_due_so_long_after_the_cut_of_the_last() -> None:
    job = running()
    make(job)
    job.forget()
    reach(job, 7)
    job.pass_time(59_000)
    assert job.fence_kinds() == []
    job.pass_time(1_000)
    assert job.fence_kinds() == [FenceKind.CUT]


def test_a_job_without_a_folder_makes_none() -> None:
    job = running(settings=replace(SETTINGS, checkpoints=None))
    reach(job, 1_000_000)
    job.pass_time(3_600_000)
    assert job.fence_kinds() == []
    with pytest.raises(Refusal, match="makes no checkpoints") as caught:
        want(job)
    assert caught.value.reason is ErrorReason.UNSUPPORTED
    assert "--checkpoint-dir" in caught.value.cure


def test_before_the_start_there_is_nothing_to_save() -> None:
    with refused(ErrorReason.NOT_STARTED, "no values yet"):
        want(DrivenCoordinator(settings=SETTINGS))


def test_wishes_share_one_and_those_that_come_during_it_the_next() -> None:
    job = running()
    first, second = want(job), want(job)
    decided = decide(job)
    third, fourth = want(job), want(job)
    job.copy_all(decided.snapshot_id)
    write(job, decided.snapshot_id)
    assert job.fence_kinds() == [FenceKind.CUT]
    assert job.core.checkpoints.answered < first
    commit(job, decided.snapshot_id)

    # The second was asked for while the fence of the first was open.
    assert first <= job.core.checkpoints.answered < second
    assert job.fence_kinds() == [FenceKind.CUT] * 2
    job.report_all(applied=3)
    assert job.of(Abort)[-1].reason == "nothing changed"
    assert job.core.checkpoints.answered == fourth > third
    assert job.core.checkpoints.failure == ""


def test_the_last_worker_that_leaves_has_one_made() -> None:
    job = running("a")
    job.leave(job.core.roster.entry(key("a")), 3)
    job.report_all(applied=3)
    assert job.fence_kinds() == [FenceKind.MEMBERSHIP, FenceKind.CUT]
    decided = decide(job)
    assert decided.purpose is CutPurpose.CHECKPOINT


def test_a_checkpoint_comes_before_readers_and_keeps_them_from_nothing() -> None:
    job = running()
    want(job)
    wanted = job.core.want_cut(job.now_ms)
    decided = decide(job)
    assert decided.purpose is CutPurpose.CHECKPOINT
    assert job.fence_kinds() == [FenceKind.CUT], "one cut is copied at a time"
    job.copy_all(decided.snapshot_id)

    assert job.fence_kinds() == [FenceKind.CUT] * 2, "the reader's, while shards write"
    reader = decide(job)
    assert reader.purpose is CutPurpose.SNAPSHOT
    assert reader.snapshot_id > decided.snapshot_id
    job.copy_all(reader.snapshot_id)
    newest = job.core.snapshots.newest
    assert newest is not None
    assert newest.snapshot_id == reader.snapshot_id
    assert job.core.snapshots.finished_cut_count == wanted


# What is in it


def test_it_is_named_when_all_have_copied_and_written_then() -> None:
    job = running()
    want(job)
    snapshot_id = decide(job).snapshot_id
    job.core.report_cut(job.core.shards.slots[0], CutReport(snapshot_id), job.now_ms)
    assert job.of(NameCheckpoint) == []
    job.copy_all(snapshot_id)
    assert len(job.of(NameCheckpoint)) == 1
    write(job, snapshot_id, but=1)
    assert job.of(WriteCheckpoint) == [
        WriteCheckpoint(snapshot_id=snapshot_id, place=PLACE)
    ]


def test_it_is_committed_when_every_shard_has_written_and_not_before() -> None:
    job = running()
    snapshot_id = written(job, but=1)
    slots = job.core.shards.slots
    job.core.report_checkpoint(slots[0], PartReport(snapshot_id, PART), job.now_ms)
    assert job.of(CommitCheckpoint) == []

    last = PartReport(snapshot_id, PART, is_finite=False)
    job.core.report_checkpoint(slots[1], last, job.now_ms)
    job.core.report_checkpoint(slots[1], last, job.now_ms)

    (found,) = job.of(CommitCheckpoint)
    assert found.checkpoint.parts == {0: PART, 1: PART}
    assert not found.checkpoint.is_finite
    assert job.core.checkpoints.newest is None
    commit(job, snapshot_id)
    newest = job.core.checkpoints.newest
    assert newest is not None
    assert (newest.name, newest.version, newest.clock) == (PLACE.name, 6, 3)
    assert newest.byte_count == 200


def test_the_record_and_the_ledger_are_those_of_the_cut() -> None:
    job = running()
    want(job)
    decide(job)
    pending = job.core.checkpoints.pending
    assert pending is not None
    assert pending.record is job.core.record
    assert pending.ledger is not job.core.ledger
    job.copy_all(pending.snapshot_id)
    write(job, pending.snapshot_id)
    job.add_worker("c")
    job.report_all(applied=4)

    assert job.core.record is not pending.record, "shards write while members change"
    assert job.core.checkpoints.pending is pending


@pytest.mark.parametrize("mode", [Mode.BSP, Mode.ASP])
def test_a_cut_that_the_ledger_is_ahead_of_is_tried_again(mode: Mode) -> None:
    """Of a worker that is gone something counts, and has not been applied yet."""
    job = running("a", "b", settings=replace(SETTINGS, mode=mode))
    record = job.record
    if mode is Mode.BSP:
        ended = departure("c", last_clock=4, evicted=True)
        job.core.progress.record = replace(record, departures=(ended,))
    else:
        # Clock 4 is of BSP, and nobody has pushed for it yet.
        job.core.progress.record = replace(record, mode_clock=4)
    wanted = want(job)
    job.report_all(applied=3)
    assert job.of(DecideCut) == []
    job.pass_time(POSTPONED_MS)
    job.report_all(applied=4)

    assert len(job.of(DecideCut)) == 1
    assert job.core.checkpoints.answered < wanted
    assert job.core.checkpoints.failure == ""


def test_one_that_can_not_be_decided_for_long_fails() -> None:
    job = running()
    ended = departure("c", last_clock=4, evicted=True)
    job.core.progress.record = replace(job.record, departures=(ended,))
    wanted = want(job)
    while job.core.checkpoints.answered < wanted:
        job.report_all(applied=3)
        job.pass_time(POSTPONED_MS)
    assert job.now_ms <= SETTINGS.cut_timeout_ms + POSTPONED_MS
    assert "count already" in job.core.checkpoints.failure


def in_batches(job: DrivenCoordinator, applied: int, *between: str) -> None:
    """All shards report: of these workers the next push begins a batch, or none does.

    The others may step again.
    """
    report = job.report_of(applied=applied)
    holdings = tuple(
        replace(
            each,
            batch_sequence=each.complete_sequence,
            is_between_batches=each.worker.worker_id in between,
            steps_again=True,
        )
        for each in report.holdings
    )
    job.send_all(replace(report, holdings=holdings))


@pytest.mark.parametrize("mode", [Mode.BSP, Mode.SSP, Mode.ASP])
def test_a_cut_waits_for_all_to_be_between_two_batches(mode: Mode) -> None:
    job = running(settings=replace(SETTINGS, mode=mode))
    want(job)
    in_batches(job, 3, "a")
    assert job.of(DecideCut) == []
    abort = job.of(Abort)[-1]
    assert "b/1 may step again on its batch" in abort.reason
    assert dict(abort.batch_floors) == {key("a"): 3, key("b"): 3}
    job.core.want_cut(job.now_ms)
    assert job.core.fence is None, "a cut for a reader would let workers go on"
    job.pass_time(BATCHES_MS)
    in_batches(job, 4, "a", "b")

    assert [each.clock for each in job.of(DecideCut)] == [4]
    assert len(job.of(Abort)) == 1
    assert not job.core.checkpoints.holds_batches


def test_one_whose_workers_never_end_a_batch_fails_and_holds_nobody() -> None:
    job = running()
    wanted = want(job)
    while job.core.checkpoints.answered < wanted:
        in_batches(job, 3, "b")
        job.pass_time(BATCHES_MS)
    assert job.now_ms <= SETTINGS.cut_timeout_ms + BATCHES_MS
    assert "a/1 may step again" in job.core.checkpoints.failure
    assert job.of(Abort)[-1].batch_floors == ()
    job.pass_time(RETRY_MS)
    in_batches(job, 4, "a", "b")
    assert len(job.of(DecideCut)) == 1, "it is made the next time"


def test_in_ssp_nobody_is_held_before_all_are_as_far_as_the_first() -> None:
    """The first waits for the answer to its push, before it ends its batch."""
    job = running(settings=replace(SETTINGS, mode=Mode.SSP, staleness_bound=1))
    want(job)
    report = job.report_of(applied=2)
    first, second = report.holdings
    first = replace(first, batch_sequence=3, trailer_sequence=3, steps_again=True)
    second = replace(second, batch_sequence=2, is_between_batches=True)
    job.send_all(replace(report, holdings=(first, second)))
    assert dict(job.of(Abort)[-1].batch_floors) == {key("a"): 3, key("b"): 3}


def test_who_was_lost_in_the_middle_of_a_batch_holds_up_no_cut() -> None:
    settings = replace(
        SETTINGS,
        workers_min=2,
        worker_loss_policy=LossPolicy.WAIT,
        step_atomicity=StepAtomicity.CLOCK,
    )
    job = running(settings=settings)
    job.lose(job.core.roster.in_state(WorkerState.MEMBER)[0])
    want(job)
    in_batches(job, 3, "b")
    assert len(job.of(DecideCut)) == 1


def test_before_its_second_step_two_optimizers_say_that_a_script_steps_again() -> None:
    job = running()
    terms = job.core.model.terms
    assert terms is not None
    second = replace(terms.optimizers[0], name="second")
    job.core.model.restore(replace(terms, optimizers=(*terms.optimizers, second)))
    want(job)
    job.report_all(applied=1)
    assert job.of(DecideCut) == []
    assert len(job.of(Abort)) == 1


@pytest.mark.parametrize("is_finite", [False, True])
def test_a_job_returns_to_the_newest_one_with_finite_values(is_finite: bool) -> None:
    job = running()
    snapshot_id = written(job, but=1)
    last = PartReport(snapshot_id, PART, is_finite=is_finite)
    job.core.report_checkpoint(job.core.shards.slots[1], last, job.now_ms)
    saved = commit(job, snapshot_id)
    assert job.core.way_back == (saved if is_finite else None)


def test_a_shard_that_watches_again_is_told_what_it_may_have_missed() -> None:
    job = running()
    snapshot_id = copied(job)
    first, last = job.core.shards.slots
    assert job.core.checkpoint_write(last) is None, "it has no name yet"
    write(job, snapshot_id, but=1)
    again = WriteCheckpoint(snapshot_id=snapshot_id, place=PLACE)
    assert job.core.checkpoint_write(last) == again
    assert job.core.checkpoint_write(first) is None


# What ends it


def test_one_that_is_copied_gives_way_to_membership_and_is_made_after_it() -> None:
    job = running()
    wanted = want(job)
    first = decide(job)
    job.add_worker("c")
    assert [each.snapshot_id for each in job.of(ReleaseImage)] == [first.snapshot_id]
    assert job.core.checkpoints.answered < wanted
    job.report_all(applied=3)
    assert job.fence_kinds() == [FenceKind.CUT, FenceKind.MEMBERSHIP, FenceKind.CUT]
    second = decide(job)
    assert second.purpose is CutPurpose.CHECKPOINT
    assert second.snapshot_id > first.snapshot_id


def test_a_shard_that_is_late_with_what_was_given_up_is_told_to_free_it() -> None:
    job = running()
    want(job)
    first = decide(job)
    job.add_worker("c")
    job.forget()
    slot = job.core.shards.slots[0]
    job.core.report_cut(slot, CutReport(first.snapshot_id), job.now_ms)
    job.core.report_checkpoint(slot, PartReport(first.snapshot_id, PART), job.now_ms)
    assert [each.snapshot_id for each in job.of(ReleaseImage)] == [first.snapshot_id]
    assert job.of(CommitCheckpoint) == []


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_shard_that_fails_ends_it_and_another_is_tried_later(is_copied: bool) -> None:
    job = running()
    wanted = want(job)
    snapshot_id = decide(job).snapshot_id
    slot = job.core.shards.slots[1]
    if is_copied:
        job.copy_all(snapshot_id)
        write(job, snapshot_id, but=1)
        failed = PartReport(snapshot_id, failure="No space left on device")
        job.core.report_checkpoint(slot, failed, job.now_ms)
    else:
        failed_copy = CutReport(snapshot_id, "No space left on device")
        job.core.report_cut(slot, failed_copy, job.now_ms)

    assert job.core.checkpoints.failure == "shard 1: No space left on device"
    assert job.core.checkpoints.answered == wanted
    assert [each.snapshot_id for each in job.of(ReleaseImage)] == [snapshot_id]
    assert len(job.of(CheckpointFailed)) == 1
    job.pass_time(RETRY_MS - 1)
    assert job.fence_kinds() == [FenceKind.CUT]
    job.pass_time(1)
    assert job.fence_kinds() == [FenceKind.CUT] * 2


def test_a_manifest_that_can_not_be_written_ends_it() -> None:
    job = running()
    snapshot_id = written(job)
    job.core.fail_checkpoint(snapshot_id, "Read-only file system", job.now_ms)
    job.core.fail_checkpoint(snapshot_id, "again", job.now_ms)
    assert job.core.checkpoints.failure == "Read-only file system"
    assert job.core.checkpoints.newest is None


def test_shards_that_write_for_too_long_are_given_up() -> None:
    job = running()
    snapshot_id = written(job, but=1)
    assert SETTINGS.checkpoints is not None
    job.pass_time(SETTINGS.checkpoints.timeout_ms)
    assert job.core.checkpoints.failure == "it was not written in time"
    assert [each.snapshot_id for each in job.of(ReleaseImage)] == [snapshot_id]


def test_one_that_is_being_committed_is_not_given_up() -> None:
    job = running()
    snapshot_id = written(job)
    assert SETTINGS.checkpoints is not None
    job.pass_time(SETTINGS.checkpoints.timeout_ms)
    commit(job, snapshot_id)
    assert job.core.checkpoints.newest is not None


def test_a_broken_connection_ends_one_that_the_shard_may_not_have_heard_of() -> None:
    job = running()
    want(job)
    decide(job)
    job.break_shard(1)
    assert "the connection to shard 1 broke" in job.core.checkpoints.failure


def test_a_lost_worker_in_the_middle_of_a_push_loses_no_place_for_one() -> None:
    settings = replace(SETTINGS, mode=Mode.ASP, workers_min=1)
    job = running("a", settings=settings)
    job.core.progress.record = replace(job.record, workers_floor=2)
    job.lose(job.core.roster.entry(key("a")))
    want(job)
    job.report(0, applied=5)
    job.report(1, applied=4, trailer=5)
    assert "lost in the middle of a push" in job.core.checkpoints.failure
    job.pass_time(100)
    assert FenceKind.MEMBERSHIP not in job.fence_kinds()


# What scripts have registered


def registered(job: DrivenCoordinator, *names: str) -> None:
    for name in names:
        job.core.take_state(job.core.roster.entry(key(name)), 0, b"", job.now_ms)


def take(job: DrivenCoordinator, name: str, snapshot_id: int, state: bytes) -> None:
    entry = job.core.roster.entry(key(name))
    job.core.take_state(entry, snapshot_id, state, job.now_ms)


def test_the_worker_that_leads_is_asked_for_its_state_as_of_the_cut() -> None:
    job = running()
    registered(job, "a", "b")
    snapshot_id = copied(job)
    assert job.of(WantState) == [
        WantState(worker=key("a"), snapshot_id=snapshot_id, sequence=3, epochs={})
    ]
    write(job, snapshot_id)
    assert job.of(CommitCheckpoint) == [], "its state is not there"
    take(job, "b", snapshot_id, b"of another worker")
    take(job, "a", snapshot_id + 1, b"of another cut")
    assert job.of(CommitCheckpoint) == []
    take(job, "a", snapshot_id, b"state")
    take(job, "a", snapshot_id, b"again")

    (found,) = job.of(CommitCheckpoint)
    assert found.checkpoint.state == b"state"
    assert found.checkpoint.lacks_state_of is None


def test_a_state_that_comes_before_the_parts_waits_for_them() -> None:
    job = running()
    registered(job, "a")
    snapshot_id = copied(job)
    take(job, "a", snapshot_id, b"state")
    assert job.of(CommitCheckpoint) == []
    write(job, snapshot_id)
    assert [each.checkpoint.state for each in job.of(CommitCheckpoint)] == [b"state"]


def test_a_job_that_has_registered_nothing_waits_for_nothing() -> None:
    job = running()
    registered(job, "b")  # which does not lead
    snapshot_id = copied(job)
    assert job.of(WantState) == []
    write(job, snapshot_id)
    assert len(job.of(CommitCheckpoint)) == 1


@pytest.mark.parametrize("is_last", [False, True])
def test_a_state_is_waited_for_so_long(is_last: bool) -> None:
    job = running()
    registered(job, "a")
    wait_ms = STATE_WAIT_MS
    if is_last:
        wait_ms = job.core.checkpoints.state_wait_ms = LAST_STATE_WAIT_MS
    snapshot_id = written(job)
    job.pass_time(wait_ms - 1)
    assert job.of(CommitCheckpoint) == []
    job.pass_time(1)

    (found,) = job.of(CommitCheckpoint)
    assert found.checkpoint.state == b""
    assert found.checkpoint.lacks_state_of == key("a")
    take(job, "a", snapshot_id, b"late")
    assert found.checkpoint.state == b""


def test_a_worker_without_a_copy_says_so_and_nobody_waits() -> None:
    job = running()
    registered(job, "a")
    snapshot_id = written(job)
    take(job, "a", snapshot_id, b"")
    (found,) = job.of(CommitCheckpoint)
    assert found.checkpoint.lacks_state_of == key("a")


def test_a_worker_that_watches_again_is_asked_again() -> None:
    job = running()
    registered(job, "a", "b")
    snapshot_id = copied(job)
    entry = job.core.roster.entry(key("a"))
    assert job.core.state_wanted(entry) == job.of(WantState)[0]
    assert job.core.state_wanted(job.core.roster.entry(key("b"))) is None
    take(job, "a", snapshot_id, b"state")
    assert job.core.state_wanted(entry) is None


def test_the_last_worker_leaves_its_state_for_the_last_checkpoint() -> None:
    job = running("a")
    take(job, "a", 0, b"as it leaves")
    take(job, "a", 0, b"")
    job.leave(job.core.roster.entry(key("a")), 3)
    job.report_all(applied=3)
    snapshot_id = decide(job).snapshot_id
    job.copy_all(snapshot_id)
    write(job, snapshot_id)
    (found,) = job.of(CommitCheckpoint)
    assert found.checkpoint.state == b"as it leaves"


def test_who_has_left_registers_nothing() -> None:
    job = running("a", "b")
    entry = job.core.roster.entry(key("a"))
    job.leave(entry, 3)
    job.report_all(applied=3)
    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        job.core.take_state(entry, 0, b"state", job.now_ms)
