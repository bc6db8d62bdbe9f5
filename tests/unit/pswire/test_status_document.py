"""The documents of a job, with every name filled in: `tests/samples` has them.

Pages and terminals are built and tested against the samples. `PS_WRITE_SAMPLES=1` has
this test write them anew.
"""

import json
import os
import re
from pathlib import Path

import pytest

from pswire.job_settings import JobSettings
from pswire.membership import Mode
from pswire.membership_codec import settings_message
from pswire.reasons import Refusal
from pswire.status_document import (
    Document,
    event_document,
    events_document,
    history_document,
    status_document,
)
from pswire.v1 import coordinator_service_pb2 as pb
from pswire.v1 import membership_pb2, push_pb2

SAMPLES = Path(__file__).parents[2] / "samples"

BEGAN_UNIX_S = 1_767_225_600.0


def _identity(worker_id: str) -> membership_pb2.WorkerIdentity:
    return membership_pb2.WorkerIdentity(worker_id=worker_id, incarnation=1)


def _worker(rank: int, compute_ms: float, peer_wait_ms: float) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        worker=_identity(f"worker-{rank}"),
        rank=rank,
        state="member",
        clock=1200,
        silent_ms=0,
        address=f"10.0.0.{rank + 3}:51234",
        lead=0,
        step_ms=900,
        shared_memory_shard_count=0,
        brought_other=["values"],
        unreached_shards=[1],
        gradients=pb.GradientCounts(bad_count=rank, clipped_count=2, left_out_count=1),
        work=pb.WorkStatus(
            step_count=1200 - rank,
            sample_count=76_800,
            steps_per_s=0.32,
            samples_per_s=20.6,
            compute_ms=compute_ms,
            load_ms=12.5,
            send_ms=20.0,
            wait_ms=peer_wait_ms + 90.0,
            peer_wait_ms=peer_wait_ms,
            activity=pb.ACTIVITY_WAITING if rank else pb.ACTIVITY_COMPUTING,
            activity_ms=850,
            traffic=pb.Traffic(
                sent_bytes=3_000_000_000,
                received_bytes=6_000_000_000,
                encodings=[
                    pb.EncodedBytes(
                        encoding="int8",
                        sent_bytes=2_900_000_000,
                        received_bytes=5_900_000_000,
                    )
                ],
            ),
            resident_bytes=1_200_000_000,
            round_step_count=50,
            steps_since_push=12,
            fragment_under_way=2,
            metrics=[
                pb.Metric(name="accuracy", value=0.91, step=1199),
                pb.Metric(name="loss", value=0.25 + rank / 100, step=1199),
            ],
        ),
    )


def _shard(index: int) -> pb.ShardStatus:
    return pb.ShardStatus(
        shard=membership_pb2.ShardAddress(
            shard_index=index, address=f"10.0.0.{index + 1}:7071", incarnation=1
        ),
        state="ready",
        silent_ms=0,
        parameter_bytes=150_000_000,
        optimizer_bytes=300_000_000,
        applied_clock=1200,
        version=3600,
        frontier=1200,
        queued_push_count=2,
        torn_step_count=1,
        staleness_counts=[3500, 80, 20, 0, 0],
        waiting=push_pb2.Waiting(
            clock=1201,
            waited_ms=7000,
            reason="clock 1201 to be complete",
            awaited=[
                push_pb2.Awaited(name="worker-0", clock=1200, step_ms=6900, lost_ms=0)
            ],
        ),
        resident_bytes=900_000_000,
        apply_ms=34.5,
        received_bytes=4_500_000_000,
        sent_bytes=9_000_000_000,
        duplicate_count=3,
        chunk_count=150,
        recording_end="No space left on device",
    )


def _metrics(loss: float) -> list[pb.Metric]:
    return [
        pb.Metric(name="accuracy", value=1 - loss / 4),
        pb.Metric(name="loss", value=loss),
    ]


def _status() -> pb.GetStatusResponse:
    """A job with something of everything."""
    settings = JobSettings(
        job_id="digits-1f2e3d",
        shard_count=2,
        workers_min=3,
        lease_ttl_ms=10_000,
        chunk_bytes=1 << 20,
        gradient_norm_max=50.0,
    )
    response = pb.GetStatusResponse(
        settings=settings_message(settings),
        phase=pb.JOB_PHASE_RUNNING,
        generation=4,
        workers=[_worker(0, 2900, 0)],
        shards=[_shard(0)],
        waiting_for="worker-0 (alive, in step 1201 for 7 s), for 7 s",
        snapshot_version=3000,
        tensor_count=62,
        parameter_bytes=300_000_000,
        failure="shard 1 at 10.0.0.2:7071 was lost",
        mode=membership_pb2.MODE_SSP,
        staleness_bound=3,
        mode_clock=600,
        workers_floor=3,
        evicted_count=1,
        clip_grad_norm=1.0,
        compression="push=int8 pull=int8 ratio=0.01",
        strategy="DiLoCo, outer SGD(lr=0.7, momentum=0.9), 50 local steps a round",
        diagnosis=pb.Diagnosis(
            cause="straggler",
            sentence=(
                "worker-0 is the straggler: its step takes 3.0 s, of which it computes "
                "2.9 s; the others compute 405 ms and wait for it"
            ),
            who=["worker-0"],
            others_wait=True,
        ),
        elapsed_ms=3_600_000,
        steps_per_s=0.96,
        samples_per_s=61.8,
        metrics=_metrics(0.26),
        admin_url="http://10.0.0.1:8080/",
    )
    response.MergeFrom(_data_and_checkpoints())
    return response


def _data_and_checkpoints() -> pb.GetStatusResponse:
    return pb.GetStatusResponse(
        splits=[
            pb.SplitRecord(
                name="holdout", digest="ab" * 32, item_count=1797, recorder="worker-0"
            )
        ],
        epochs=[
            pb.EpochAccount(
                loader="loader",
                epoch=1,
                position_count=1797,
                left_out_count=5,
                seen_once_count=1000,
                seen_again_count=2,
                torn_count=1,
                dropped_count=3,
                skipped_count=6,
                never_count=780,
                held_count=96,
            )
        ],
        checkpoints=pb.CheckpointStatus(
            url="/srv/checkpoints",
            interval="500steps",
            newest=pb.SavedCheckpoint(
                place=membership_pb2.CheckpointPlace(
                    url="/srv/checkpoints", name="step-000000003000"
                ),
                version=3000,
                clock=1000,
                byte_count=900_000_000,
                age_ms=61_000,
            ),
            failure="shard 1: No space left on device",
        ),
        privacy=pb.PrivacyStatus(
            noise_multiplier=4.0,
            max_grad_norm=1.0,
            delta=1e-5,
            participation_count=10,
            participation_max=13,
            epsilon=3.3414,
            epsilon_max=3.8976,
        ),
    )


def _history() -> pb.GetHistoryResponse:
    return pb.GetHistoryResponse(
        interval_s=16.0,
        points=[
            pb.HistoryPoint(
                at_unix_s=BEGAN_UNIX_S + 16 * number,
                clock=5 * number,
                steps_per_s=0.9 + (number % 7) / 50,
                samples_per_s=58.0 + number % 7,
                metrics=_metrics(0.25 + 2.0 * 0.97**number),
            )
            for number in (1, 2)
        ],
    )


def _events() -> pb.WatchEventsResponse:
    return pb.WatchEventsResponse(
        events=[
            pb.JobEvent(
                number=1,
                at_unix_s=BEGAN_UNIX_S + 60,
                kind="worker_joined",
                text="worker-0 has joined",
                worker_id="worker-0",
                clock=0,
            ),
            pb.JobEvent(
                number=2,
                at_unix_s=BEGAN_UNIX_S + 120,
                kind="shard_lost",
                text="the connection to shard 1 broke",
                shard_index=1,
                clock=700,
            ),
        ]
    )


DOCUMENTS: dict[str, Document] = {
    "status": status_document(_status(), "10.0.0.1:7070"),
    "history": history_document(_history()),
    "events": events_document(_events()),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_samples_are_what_a_coordinator_answers(name: str) -> None:
    path = SAMPLES / f"{name}.json"
    text = json.dumps(DOCUMENTS[name], indent=1, allow_nan=False) + "\n"
    if os.environ.get("PS_WRITE_SAMPLES"):
        path.write_text(text)
    assert path.read_text() == text


def _unfilled(value: object, name: str = "") -> set[str]:
    if isinstance(value, dict):
        return {n for key, each in value.items() for n in _unfilled(each, key)}
    if isinstance(value, list):
        return {n for each in value for n in _unfilled(each, name)}
    return {name} if value in (None, "") else set()


def test_the_sample_of_a_status_has_everything() -> None:
    assert _unfilled(DOCUMENTS["status"]) == {"quorum", "grace_window_s"}  # it is SSP


def _names(value: object) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(name for each in value.values() for name in _names(each))}
    if isinstance(value, list):
        return {name for each in value for name in _names(each)}
    return set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_name_is_documented(name: str, repository: Path) -> None:
    text = (repository / "docs" / "psctl.md").read_text()
    documented = set(re.findall(r"`(?:[a-z]+\.|\.)?([a-z_]+)(?:\[\])?`", text))
    assert _names(DOCUMENTS[name]) - {"job", "accuracy"} <= documented


def test_unknown_is_null_and_what_is_no_finite_number_too() -> None:
    response = _status()
    response.snapshot_version = response.elapsed_ms = -1
    response.ClearField("steps_per_s")
    response.metrics[1].value = float("nan")
    response.privacy.epsilon = float("inf")
    response.workers.append(_worker(1, 400, 2500))
    worker, shard = response.workers[0], response.shards[0]
    worker.ClearField("work")
    worker.rank = worker.silent_ms = worker.step_ms = -1
    worker.address = ""
    shard.ClearField("waiting")
    shard.ClearField("apply_ms")
    for name in ("checkpoints", "privacy", "failure", "waiting_for", "admin_url"):
        response.ClearField(name)
    read = json.loads(json.dumps(status_document(response, "h:1"), allow_nan=False))
    nulls = ("snapshot_version", "elapsed_s", "steps_per_s", "checkpoints", "privacy")
    assert [read[name] for name in nulls] == [None] * len(nulls)
    assert read["metrics"] == {"accuracy": 0.935, "loss": None}
    found = read["workers"][0]
    for name in ("rank", "clock", "lag", "lead", "silent_ms", "step_ms", "address"):
        assert found[name] is None
    for name in ("step_count", "loss", "compute_ms", "activity", "sent_bytes"):
        assert found[name] is None
    assert (found["metrics"], found["encodings"]) == ({}, [])
    assert [w["lag"] for w in read["workers"]] == [None, 0]
    assert read["shards"][0]["waiting"] is None
    assert read["shards"][0]["apply_ms"] is None


def test_the_clock_of_a_shard_and_its_counts_are_those_that_mean_something() -> None:
    response = _status()
    response.shards[0].applied_clock = 9
    (shard,) = status_document(response, "h:1")["shards"]
    assert (shard["clock"], shard["frontier"]) == (1200, 1200)
    assert shard["staleness_counts"] == [3500, 80, 20]
    response.mode = membership_pb2.Mode.ValueType(Mode.BSP)
    document = status_document(response, "h:1")
    assert document["shards"][0]["clock"] == 9
    assert document["staleness_bound"] == 0
    response.mode = membership_pb2.Mode.ValueType(Mode.ASP)
    assert status_document(response, "h:1")["staleness_bound"] is None
    response.mode = membership_pb2.Mode.ValueType(Mode.QUORUM)
    response.quorum, response.grace_window_ms = 6, 500
    document = status_document(response, "h:1")
    assert (document["quorum"], document["grace_window_s"]) == (6, 0.5)


def test_what_only_a_newer_release_knows_is_a_number_or_refused() -> None:
    response = _status()
    response.phase = pb.JobPhase.ValueType(77)
    response.workers[0].work.activity = pb.Activity.ValueType(78)
    document = status_document(response, "h:1")
    assert document["phase"] == "unknown (77)"
    assert document["workers"][0]["activity"] == "unknown (78)"
    response.mode = membership_pb2.Mode.ValueType(79)
    with pytest.raises(Refusal):
        status_document(response, "h:1")


def test_an_event_of_nobody_is_about_nobody() -> None:
    document = event_document(pb.JobEvent(number=3, kind="job_started"))
    assert document["worker_id"] is None
    assert document["shard_index"] is None
    assert document["clock"] is None
    about_first = event_document(pb.JobEvent(shard_index=0, clock=0))
    assert (about_first["shard_index"], about_first["clock"]) == (0, 0)
