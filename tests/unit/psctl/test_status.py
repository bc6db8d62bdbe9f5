"""The text of `psctl status`, made of the document of a job."""

import math
from typing import Any

import pytest

from psctl.status import status_text
from psserver.coordinator.core.checkpoints import CommittedCheckpoint
from psserver.coordinator.host.job_waits import JobWaits
from psserver.coordinator.rpc.status_report import status_message
from psserver.edge.coordinator_settings import CheckpointSettings, CoordinatorSettings
from pswire.job_settings import JobSettings
from pswire.limits import STALENESS_COUNTED_MAX
from pswire.membership import Mode
from pswire.membership_codec import settings_message
from pswire.status_document import status_document
from pswire.v1 import coordinator_service_pb2 as pb
from pswire.v1 import membership_pb2, push_pb2
from tests.doubles.driven_coordinator import DrivenCoordinator


def _worker(worker_id: str, **changes: Any) -> pb.WorkerStatus:  # noqa: ANN401, fields
    values: dict[str, Any] = {
        "rank": 0,
        "state": "member",
        "clock": 12,
        "lead": 3,
        "step_ms": 400,
        "address": "127.0.0.1:5000",
    }
    return pb.WorkerStatus(
        worker=membership_pb2.WorkerIdentity(worker_id=worker_id, incarnation=1),
        **{**values, **changes},
    )


def _shard(index: int = 0, **changes: Any) -> pb.ShardStatus:  # noqa: ANN401, fields
    values: dict[str, Any] = {
        "state": "ready",
        "silent_ms": 100,
        "parameter_bytes": 3 << 20,
        "applied_clock": 9,
        "frontier": 9,
        "version": 21,
        "queued_push_count": 3,
        "torn_step_count": 1,
    }
    return pb.ShardStatus(
        shard=membership_pb2.ShardAddress(
            shard_index=index, address="127.0.0.1:60000", incarnation=1
        ),
        **{**values, **changes},
    )


WORKERS = (
    _worker("w0"),
    _worker("w1", rank=1, clock=9, lead=0, silent_ms=2300, step_ms=8100),
)


def _text(mode: Mode = Mode.BSP, **changes: Any) -> str:  # noqa: ANN401, fields
    """Of a job of two shards and two workers, and some changed fields."""
    values: dict[str, Any] = {
        "settings": settings_message(
            JobSettings(
                job_id="job-1", shard_count=2, workers_min=2, lease_ttl_ms=10_000
            )
        ),
        "workers_floor": 2,
        "evicted_count": 1,
        "phase": pb.JOB_PHASE_RUNNING,
        "generation": 3,
        "workers": WORKERS,
        "shards": [
            _shard(
                waiting=push_pb2.Waiting(
                    clock=10,
                    waited_ms=7000,
                    awaited=[
                        push_pb2.Awaited(name="w1", clock=9, step_ms=8000),
                        push_pb2.Awaited(name="w2", clock=9, step_ms=-1),
                    ],
                ),
            ),
            pb.ShardStatus(
                shard=membership_pb2.ShardAddress(shard_index=1),
                state="missing",
                silent_ms=-1,
            ),
        ],
        "waiting_for": "w1 (lost 2 s ago in step 10)",
        "snapshot_version": -1,
        "tensor_count": 4,
        "parameter_bytes": 3 << 20,
        "epochs": [
            pb.EpochAccount(
                loader="loader",
                epoch=2,
                position_count=60,
                seen_once_count=50,
                torn_count=2,
                skipped_count=4,
                never_count=4,
            )
        ],
    }
    response = pb.GetStatusResponse(
        mode=membership_pb2.Mode.ValueType(mode), **{**values, **changes}
    )
    return status_text(status_document(response, "127.0.0.1:7070"))


def test_who_is_no_member_has_no_clock_and_changes_nobodys() -> None:
    joiner = _worker("w2", rank=-1, state="joining", clock=0, lead=0)
    text = _text(workers=[*WORKERS, joiner])
    assert text.splitlines()[-1].split()[3:6] == ["-", "-", "-"]


def test_the_text_tells_whom_the_job_waits_for_and_who_lags() -> None:
    text = _text()
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
    assert line in _text()
    assert "data  " not in _text(epochs=())


def test_names_of_workers_cant_steer_the_terminal() -> None:
    hostile = _worker("\x1b[2J\x1b]0;owned\x07[bold]w")
    text = _text(workers=(hostile,))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]w" in text


def test_the_text_tells_who_brought_other_values() -> None:
    assert "brought other" not in _text()
    other = _worker("w1", rank=1, brought_other=("values", "optimizer state"))
    text = _text(workers=(_worker("w0"), other))
    assert "w1 brought other values and optimizer state" in text
    assert "the values of the worker of rank 0" in text


def test_the_text_begins_with_what_the_job_does_and_how_fast() -> None:
    sentence = "w1 waits for its loader: 2.6 s of its step of 3.1 s"
    text = _text(
        diagnosis=pb.Diagnosis(sentence=sentence),
        steps_per_s=0.6451,
        samples_per_s=41.29,
        metrics=[
            pb.Metric(name="accuracy", value=float("nan")),
            pb.Metric(name="loss", value=1.23456),
        ],
    )
    assert text.splitlines()[:4] == [
        "now         w1 waits for its loader: 2.6 s of its step of 3.1 s",
        "speed       0.645 steps/s, 41.29 samples/s",
        "logged      accuracy -, loss 1.235",
        "job         job-1",
    ]


def test_a_job_without_workers_says_so() -> None:
    assert "no workers" in _text(workers=())


def test_of_a_job_that_is_over_nothing_is_said_of_further_losses() -> None:
    def evictions(phase: pb.JobPhase.ValueType, floor: int) -> str:
        text = _text(phase=phase, workers_floor=floor)
        return next(line for line in text.splitlines() if line.startswith("evictions"))

    rest = ", never below 2; on a loss: continue"
    assert (
        evictions(pb.JOB_PHASE_RUNNING, 2)
        == "evictions   1 worker evicted or replaced" + rest
    )
    assert (
        evictions(pb.JOB_PHASE_FINISHED, 0)
        == "evictions   1 worker evicted or replaced"
    )
    assert (
        evictions(pb.JOB_PHASE_FAILED, 2) == "evictions   1 worker evicted or replaced"
    )


def test_a_failed_job_shows_its_failure_and_no_wait() -> None:
    failed = _text(phase=pb.JOB_PHASE_FAILED, failure="shard 1 is lost")
    assert "failure     shard 1 is lost" in failed
    assert "waits for" not in failed
    assert "awaited" not in failed


def test_outside_bsp_the_clock_of_a_shard_is_its_frontier() -> None:
    ssp = _text(Mode.SSP, staleness_bound=3, shards=[_shard(frontier=40)])
    (row,) = [x for x in ssp.splitlines() if "ready" in x]
    assert row.split()[2] == "40"


def test_the_tables_fit_an_ordinary_terminal() -> None:
    long = _shard(
        state="suspect",
        applied_clock=10_000_000,
        version=80_000_000,
        parameter_bytes=1000 << 20,
        silent_ms=2_000_000,
    )
    text = _text(shards=[long, _shard(1)])
    assert max(map(len, text.splitlines())) <= 80
    assert "127.0.0.1:60000" in text
    assert "1 worker evicted or replaced" in text
    assert "TORN" not in text
    assert "TORN" in _text()


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
    found = _text(
        workers=[
            _worker(f"w{rank}", rank=rank, shared_memory_shard_count=count)
            for rank, count in enumerate(counts)
        ]
    )
    lines = [x for x in found.splitlines() if x.startswith("tensors")]
    assert lines == ([text] if text else [])


def test_the_bound_is_part_of_the_mode() -> None:
    ssp = _text(Mode.SSP, staleness_bound=3, mode_clock=7)
    assert "ssp, at most 3 clocks apart, after clock 7" in ssp
    assert "mode        asp\n" in _text(Mode.ASP)


def test_recordings_that_have_ended_early_are_named() -> None:
    text = _text(shards=[_shard(), _shard(1, recording_end="the disk is full")])
    assert "recording   that of shard 1 has ended: the disk is full" in text
    assert "recording" not in _text(shards=[_shard()])


def test_the_staleness_of_all_pushes_is_summed_up() -> None:
    counts = [3, *[0] * (STALENESS_COUNTED_MAX - 1), 1]
    shards = [_shard(staleness_counts=counts), _shard(staleness_counts=[3, 0, 1, 0])]
    assert "staleness   0: 75.0%, 2: 12.5%, 63+: 12.5%" in _text(shards=shards)
    assert "staleness " not in _text()


def test_a_strategy_has_one_line_that_no_name_can_end() -> None:
    told = "DiLoCo, outer SGD(lr=0.7), 50 local steps a round"
    assert f"strategy    {told}\n" in _text(strategy=told)
    assert r"strategy    a\x1b[2J\nb" in _text(strategy="a\x1b[2J\nb")
    assert "strategy" not in _text()


def test_a_job_that_clips_says_so() -> None:
    assert "gradients   clipped to a norm of 0.5" in _text(clip_grad_norm=0.5)
    assert "gradients" not in _text()


PRIVACY = pb.PrivacyStatus(
    noise_multiplier=4.0,
    max_grad_norm=1.0,
    delta=1e-5,
    participation_count=10,
    participation_max=13,
    epsilon=3.3414,
    epsilon_max=3.8976,
)


def test_the_privacy_that_is_spent_is_shown() -> None:
    assert (
        "privacy     epsilon 3.341 of 3.898 spent for each sample, at delta 1e-05: "
        "10 of 13 participations, noise 4 x 1"
    ) in _text(privacy=PRIVACY)
    # As after a return to a checkpoint: more may be spent than there are figures.
    over = pb.PrivacyStatus(epsilon=math.inf, epsilon_max=3.8976)
    assert "epsilon more than all of 3.898" in _text(privacy=over)
    assert "privacy" not in _text()


def test_a_job_that_sends_fewer_bytes_says_so() -> None:
    fewer = "push=int8 pull=raw ratio=0.01"
    assert f"compressed  {fewer}" in _text(compression=fewer)
    assert "compressed" not in _text()


def test_the_newest_checkpoint_is_shown_with_its_age_and_the_last_failure() -> None:
    checkpoints = pb.CheckpointStatus(interval="10min")
    assert "checkpoint  none yet, one every 10min\n" in _text(checkpoints=checkpoints)
    checkpoints.failure = "shard 1: No space"
    checkpoints.newest.MergeFrom(
        pb.SavedCheckpoint(
            place=membership_pb2.CheckpointPlace(name="step-000000000500"),
            version=500,
            byte_count=3 << 20,
            age_ms=61_000,
        )
    )
    assert (
        "checkpoint  version 500, 61 s ago (step-000000000500, 3.0 MiB); the last try "
        "has failed: shard 1: No space\n"
    ) in _text(checkpoints=checkpoints)


def test_a_job_that_makes_no_checkpoints_shows_none() -> None:
    assert "checkpoint" not in _text()


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
    message = status_message(core, JobWaits(core), now_ms=5_000)

    assert status_document(message, "h:1")["checkpoints"] == {
        "url": "s3://...@bucket/run",
        "interval": "10min",
        "newest": {
            "url": "s3://...@bucket/run",
            "name": "step-000000000500",
            "version": 500,
            "clock": 250,
            "byte_count": 9,
            "age_ms": 4_000,
        },
        "failure": "no space",
    }
