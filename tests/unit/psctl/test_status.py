import math
from dataclasses import replace

import pytest

from psctl.status import status_text
from psserver.coordinator.core.checkpoints import CommittedCheckpoint
from psserver.coordinator.host.job_waits import JobWaits
from psserver.coordinator.rpc.status_report import status_message
from psserver.edge.coordinator_settings import CheckpointSettings, CoordinatorSettings
from pswire.addresses import Address
from pswire.awaited import Awaited
from pswire.job_settings import JobSettings
from pswire.leased_data import EpochReport
from pswire.membership import LossPolicy, Mode, StepAtomicity, WorkerState
from pswire.v1 import coordinator_service_pb2 as pb
from pswire.v1 import membership_pb2
from psworker.transport.status_client import (
    CheckpointStatus,
    JobStatus,
    PrivacyStatus,
    SavedCheckpoint,
    ShardStatus,
    WorkerStatus,
    status_of,
)
from psworker.transport.values import Waiting
from tests.doubles.driven_coordinator import DrivenCoordinator

COORDINATOR = Address("127.0.0.1", 7070)


def _worker(worker_id: str, **changes: object) -> WorkerStatus:
    worker = WorkerStatus(
        worker_id=worker_id,
        incarnation=1,
        rank=0,
        state=WorkerState.MEMBER,
        clock=12,
        lead=3,
        silent_ms=0,
        step_ms=400,
        address="127.0.0.1:5000",
    )
    return replace(worker, **changes)  # type: ignore[arg-type]


STATUS = JobStatus(
    settings=JobSettings(
        job_id="job-1",
        shard_count=2,
        workers_min=2,
        lease_ttl_ms=10_000,
    ),
    mode=Mode.BSP,
    staleness_bound=0,
    mode_clock=0,
    workers_floor=2,
    evicted_count=1,
    phase="running",
    generation=3,
    workers=(
        _worker("w0"),
        _worker("w1", rank=1, clock=9, lead=0, silent_ms=2300, step_ms=8100),
    ),
    shards=(
        ShardStatus(
            shard_index=0,
            incarnation=1,
            state="ready",
            address="127.0.0.1:6000",
            silent_ms=100,
            parameter_bytes=3 << 20,
            optimizer_bytes=0,
            clock=9,
            frontier=9,
            version=21,
            queued_push_count=3,
            torn_step_count=1,
            staleness_counts=(),
            waiting=Waiting(
                clock=10,
                waited_ms=7000,
                reason="",
                awaited=(Awaited("w1", 9, 8000, 2300), Awaited("w2", 9, -1)),
            ),
        ),
        ShardStatus(
            shard_index=1,
            incarnation=0,
            state="missing",
            address="",
            silent_ms=-1,
            parameter_bytes=0,
            optimizer_bytes=0,
            clock=0,
            frontier=0,
            version=0,
            queued_push_count=0,
            torn_step_count=0,
            staleness_counts=(),
            waiting=None,
        ),
    ),
    waiting_for="w1 (lost 2 s ago in step 10)",
    snapshot_version=-1,
    tensor_count=4,
    parameter_bytes=3 << 20,
    failure="",
    epochs=(
        EpochReport(
            loader="loader",
            epoch=2,
            count=60,
            seen_once=50,
            seen_again=0,
            torn=2,
            dropped=0,
            skipped=4,
            never=4,
            left_out=0,
            is_over=False,
        ),
    ),
)


def test_who_is_no_member_has_no_clock_and_changes_nobodys() -> None:
    joiner = _worker("w2", rank=-1, state=WorkerState.JOINING, clock=0, lead=0)
    status = replace(STATUS, workers=(*STATUS.workers, joiner))
    assert status_text(status).splitlines()[-1].split()[3:6] == ["-", "-", "-"]


def test_the_text_tells_whom_the_job_waits_for_and_who_lags() -> None:
    text = status_text(STATUS)
    assert "waits for   w1 (lost 2 s ago in step 10)" in text
    lines = text.splitlines()
    (laggard,) = [line for line in lines if line.startswith("w1 ")]
    assert laggard.split()[3:6] == ["9", "0", "3"]
    assert "8.1 s" in laggard
    assert "2.3 s" in laggard
    assert any(line.strip().startswith("1  missing") for line in lines)
    assert " never " in text
    assert " awaited " in laggard
    assert "none (`psctl snapshot get` makes one)" in text


def test_the_text_tells_how_far_the_newest_epoch_is() -> None:
    line = "data        epoch 2 of loader: 50 of 60 seen once, 2 torn, 4 skipped\n"
    assert line in status_text(STATUS)
    assert "data  " not in status_text(replace(STATUS, epochs=()))


def test_names_of_workers_cant_steer_the_terminal() -> None:
    hostile = _worker("\x1b[2J\x1b]0;owned\x07[bold]w")
    text = status_text(replace(STATUS, workers=(hostile,)))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]w" in text


def test_the_text_tells_who_brought_other_values() -> None:
    assert "brought other" not in status_text(STATUS)
    other = _worker("w1", rank=1, brought_other=("values", "optimizer state"))
    text = status_text(replace(STATUS, workers=(_worker("w0"), other)))
    assert "w1 brought other values and optimizer state" in text
    assert "the values of the worker of rank 0" in text


def test_the_text_begins_with_what_the_job_does_and_how_fast() -> None:
    status = replace(
        STATUS,
        diagnosis="w1 waits for its loader: 2.6 s of its step of 3.1 s",
        steps_per_s=0.6451,
        samples_per_s=41.29,
        metrics={"accuracy": 0.5, "loss": 1.23456},
    )
    assert status_text(status).splitlines()[:4] == [
        "now         w1 waits for its loader: 2.6 s of its step of 3.1 s",
        "speed       0.645 steps/s, 41.29 samples/s",
        "logged      accuracy 0.5, loss 1.235",
        "job         job-1",
    ]


def test_a_job_without_workers_and_a_failed_one_say_so() -> None:
    assert "no workers" in status_text(replace(STATUS, workers=()))
    failed = replace(STATUS, phase="failed", failure="shard 1 is lost")
    assert "failure     shard 1 is lost" in status_text(failed)


def test_of_a_job_that_is_over_nothing_is_said_of_further_losses() -> None:
    def evictions(phase: str, floor: int) -> str:
        text = status_text(replace(STATUS, phase=phase, workers_floor=floor))
        return next(line for line in text.splitlines() if line.startswith("evictions"))

    rest = ", never below 2; on a loss: continue"
    assert evictions("running", 2) == "evictions   1 worker evicted or replaced" + rest
    assert evictions("finished", 0) == "evictions   1 worker evicted or replaced"
    assert evictions("failed", 2) == "evictions   1 worker evicted or replaced"


def test_a_failed_job_shows_its_failure_and_no_wait() -> None:
    failed = replace(STATUS, phase="failed", failure="shard 1 is lost")
    assert "waits for" not in status_text(failed)
    assert "awaited" not in status_text(failed)


def test_outside_bsp_the_clock_of_a_shard_is_its_frontier() -> None:
    shard = replace(STATUS.shards[0], clock=9, frontier=40)
    ssp = replace(STATUS, mode=Mode.SSP, staleness_bound=3, shards=(shard,))
    (row,) = [x for x in status_text(ssp).splitlines() if "ready" in x]
    assert row.split()[2] == "40"


def test_the_tables_fit_an_ordinary_terminal() -> None:
    long = replace(
        STATUS.shards[0],
        state=WorkerState.SUSPECT,
        address="127.0.0.1:60000",
        clock=10_000_000,
        version=80_000_000,
        parameter_bytes=1000 << 20,
        silent_ms=2_000_000,
    )
    text = status_text(replace(STATUS, shards=(long, *STATUS.shards)))
    assert max(map(len, text.splitlines())) <= 80
    assert "127.0.0.1:60000" in text
    assert "1 worker evicted or replaced" in text
    assert "TORN" not in text
    assert "TORN" in status_text(STATUS)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((0, 0), None),
        ((2, 2), "tensors     through shared memory"),
        ((1, 0), "tensors     through shared memory: w0 with 1 of 2 shards"),
    ],
)
def test_it_says_whose_tensors_go_through_shared_memory(
    counts: tuple[int, int], text: str | None
) -> None:
    workers = tuple(
        replace(worker, shared_memory_shard_count=count)
        for worker, count in zip(STATUS.workers, counts, strict=True)
    )
    status = replace(STATUS, workers=workers)

    lines = [x for x in status_text(status).splitlines() if x.startswith("tensors")]
    assert lines == ([text] if text else [])


def test_the_bound_is_part_of_the_mode() -> None:
    ssp = replace(STATUS, mode=Mode.SSP, staleness_bound=3, mode_clock=7)
    assert "ssp, at most 3 clocks apart, after clock 7" in status_text(ssp)
    asp = replace(STATUS, mode=Mode.ASP)
    assert "mode        asp\n" in status_text(asp)


def test_the_staleness_of_all_pushes_is_summed_up() -> None:
    shards = tuple(
        replace(shard, staleness_counts=counts)
        for shard, counts in zip(STATUS.shards, [(3, 0, 1), (4, 0, 0)], strict=True)
    )
    text = status_text(replace(STATUS, shards=shards))
    assert "staleness   0: 87.5%, 2+: 12.5%" in text
    assert "staleness " not in status_text(STATUS)


def test_an_answer_becomes_a_status() -> None:
    message = pb.GetStatusResponse(
        settings=membership_pb2.JobSettings(
            mode=membership_pb2.MODE_BSP,
            worker_loss_policy=membership_pb2.WORKER_LOSS_POLICY_WAIT,
            step_atomicity=membership_pb2.STEP_ATOMICITY_CLOCK,
        ),
        phase=pb.JOB_PHASE_RUNNING,
        mode=membership_pb2.MODE_ASP,
        shards=[pb.ShardStatus(staleness_counts=[5, 1], queued_push_count=2)],
        clip_grad_norm=0.5,
        epochs=[pb.EpochAccount(loader="x", epoch=3, torn_count=7, closed=True)],
    )
    status = status_of(message)
    assert (status.phase, status.mode) == ("running", Mode.ASP)
    assert (status.settings.worker_loss_policy, status.settings.step_atomicity) == (
        LossPolicy.WAIT,
        StepAtomicity.CLOCK,
    )
    assert status.shards[0].staleness_counts == (5, 1)
    assert status.shards[0].waiting is None
    assert status.clip_grad_norm == 0.5
    (epoch,) = status.epochs
    assert (epoch.loader, epoch.epoch, epoch.torn, epoch.is_over) == ("x", 3, 7, True)


def test_a_job_that_clips_says_so() -> None:
    clipping = replace(STATUS, clip_grad_norm=0.5)
    assert "gradients   clipped to a norm of 0.5" in status_text(clipping)
    assert "gradients" not in status_text(STATUS)


PRIVACY = PrivacyStatus(
    noise_multiplier=4.0,
    max_grad_norm=1.0,
    delta=1e-5,
    participation_count=10,
    participation_max=13,
    epsilon=3.3414,
    epsilon_max=3.8976,
)


def test_the_privacy_that_is_spent_is_shown() -> None:
    private = replace(STATUS, privacy=PRIVACY)
    assert (
        "privacy     epsilon 3.341 of 3.898 spent for each sample, at delta 1e-05: "
        "10 of 13 participations, noise 4 x 1"
    ) in status_text(private)
    # As after a return to a checkpoint: more may be spent than there are figures.
    over = replace(PRIVACY, epsilon=math.inf, participation_count=14)
    private = replace(STATUS, privacy=over)
    assert "epsilon more than all of 3.898" in status_text(private)
    assert "privacy" not in status_text(STATUS)


def test_a_job_that_sends_fewer_bytes_says_so() -> None:
    fewer = replace(STATUS, compression="push=int8 pull=raw ratio=0.01")
    assert "compressed  push=int8 pull=raw ratio=0.01" in status_text(fewer)
    assert "compressed" not in status_text(STATUS)


def test_the_newest_checkpoint_is_shown_with_its_age_and_the_last_failure() -> None:
    saved = SavedCheckpoint(
        url="/checkpoints",
        name="step-000000000500",
        version=500,
        clock=250,
        byte_count=3 << 20,
        age_ms=61_000,
    )
    checkpoints = CheckpointStatus(
        url="/checkpoints", interval="10min", newest=None, failure=""
    )
    assert "checkpoint  none yet, one every 10min\n" in status_text(
        replace(STATUS, checkpoints=checkpoints)
    )
    checkpoints = replace(checkpoints, newest=saved, failure="shard 1: No space")
    status = replace(STATUS, checkpoints=checkpoints)
    assert (
        "checkpoint  version 500, 61 s ago (step-000000000500, 3.0 MiB); the last try "
        "has failed: shard 1: No space\n"
    ) in status_text(status)


def test_a_job_that_makes_no_checkpoints_shows_none() -> None:
    assert "checkpoint" not in status_text(STATUS)


def test_where_checkpoints_stand_is_read_as_it_was_written() -> None:
    core = DrivenCoordinator.running(
        "a",
        settings=CoordinatorSettings(
            job_id="job",
            shard_count=1,
            checkpoints=CheckpointSettings(url="s3://key:secret@bucket/run"),
        ),
    ).core
    core.checkpoints.failure = "no space"
    core.checkpoints.newest = CommittedCheckpoint(
        name="step-000000000500",
        version=500,
        clock=250,
        byte_count=9,
        committed_ms=1_000,
    )
    status = status_of(status_message(core, JobWaits(core), now_ms=5_000))

    assert status.checkpoints == CheckpointStatus(
        url="s3://...@bucket/run",
        interval="10min",
        newest=SavedCheckpoint(
            url="s3://...@bucket/run",
            name="step-000000000500",
            version=500,
            clock=250,
            byte_count=9,
            age_ms=4_000,
        ),
        failure="no space",
    )
