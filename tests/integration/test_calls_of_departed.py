"""Calls that wait for a worker which is gone meanwhile: they end, and lose nothing.

The worker's own library cancels such calls. These come from one that does not.
"""

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from pswire.error_details import refusal_from_rpc_error
from pswire.limits import PROTOCOL_VERSION
from pswire.reasons import ErrorReason
from pswire.v1.coordinator_service_pb2 import (
    LeaseDataRequest,
    LeaseDataResponse,
    OpenEpochRequest,
)
from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from pswire.v1.membership_pb2 import WorkerIdentity
from pswire.v1.parameter_service_pb2 import AwaitContributionRequest, PullRequest
from pswire.v1.parameter_service_pb2_grpc import ParameterServiceStub
from psworker import Connection
from tests.integration.job import Job, connect, key

TIMEOUT_S = 30.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, sockets=True) as job:
        yield job


def member(job: Job, worker_id: str) -> Connection:
    connection = connect(job, worker_id)
    model = nn.ParameterList([torch.zeros(8)])
    connection.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return connection


def identity(worker_id: str) -> WorkerIdentity:
    return WorkerIdentity(worker_id=worker_id, incarnation=1)


def reason_of(call: Any) -> ErrorReason | None:  # noqa: ANN401, grpc's future
    error = call.exception(timeout=TIMEOUT_S)
    assert isinstance(error, grpc.RpcError)
    refusal = refusal_from_rpc_error(error)
    return None if refusal is None else refusal.reason


def reason_of_stream(call: Iterable[object]) -> ErrorReason | None:
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    refusal = refusal_from_rpc_error(caught.value)
    return None if refusal is None else refusal.reason


def pull_request(job: Job, worker_id: str) -> PullRequest:
    """For a clock that never comes."""
    host = job.shards[0]
    return PullRequest(
        protocol_version=PROTOCOL_VERSION,
        job_id=host.job_id,
        shard_incarnation=host.incarnation,
        worker=identity(worker_id),
        clock=1_000,
    )


def test_a_lease_that_waits_ends_when_its_worker_leaves(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, waits = job.coordinator.data, threading.Event()
    lease_of = data.lease

    async def noted(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401, as its
        waits.set()
        return await lease_of(*arguments, **options)

    def open_epoch(epoch: int) -> OpenEpochRequest:
        return OpenEpochRequest(
            job_id=job.shards[0].job_id,
            worker=identity("w0"),
            loader="l",
            epoch=epoch,
            position_count=1,
            batch_size=1,
        )

    def lease(worker_id: str, *, wait: bool) -> LeaseDataRequest:
        return LeaseDataRequest(
            job_id=job.shards[0].job_id,
            worker=identity(worker_id),
            loader="l",
            order_digest=1,
            batch_count_max=1,
            wait=wait,
        )

    with grpc.insecure_channel(job.address) as channel, member(job, "w0"):
        coordinator = CoordinatorServiceStub(channel)
        leaver = member(job, "w1")
        coordinator.OpenEpoch(open_epoch(0), timeout=TIMEOUT_S)
        held: LeaseDataResponse = coordinator.LeaseData(
            lease("w0", wait=False), timeout=TIMEOUT_S
        )
        assert len(held.ranges) == 1
        monkeypatch.setattr(data, "lease", noted)
        waiting = coordinator.LeaseData.future(
            lease("w1", wait=True), timeout=2 * TIMEOUT_S
        )
        assert waits.wait(TIMEOUT_S)
        leaver.close()
        assert reason_of(waiting) is ErrorReason.WORKER_INCARNATION_STALE

        # What the other gives back now is still there for those who stay.
        coordinator.OpenEpoch(open_epoch(1), timeout=TIMEOUT_S)
        again = coordinator.LeaseData(lease("w0", wait=False), timeout=TIMEOUT_S)
        assert list(again.ranges) == list(held.ranges)


def test_an_idle_worker_hears_that_it_is_no_member_any_more(job: Job) -> None:
    leaver = member(job, "w0")
    with grpc.insecure_channel(job.shard_addresses()[0]) as channel:
        shard = ParameterServiceStub(channel)
        host = job.shards[0]
        request = AwaitContributionRequest(
            protocol_version=PROTOCOL_VERSION,
            job_id=host.job_id,
            shard_incarnation=host.incarnation,
            worker=identity("w0"),
            sequence=1_000,
        )
        replaced = shard.AwaitContribution.future(request, timeout=2 * TIMEOUT_S)
        assert job.run(
            host.changes.wait_until(
                lambda: host.members.of(key("w0")).idle is not None, TIMEOUT_S
            )
        )
        idle = shard.AwaitContribution.future(request, timeout=2 * TIMEOUT_S)
        assert reason_of(replaced) is ErrorReason.DRAINING
        pull = shard.Pull(pull_request(job, "w0"), timeout=2 * TIMEOUT_S)
        leaver.close()
        assert reason_of(idle) is ErrorReason.WORKER_INCARNATION_STALE
        assert reason_of_stream(pull) is ErrorReason.WORKER_INCARNATION_STALE


def test_who_will_never_see_a_clock_does_not_wait_for_it(job: Job) -> None:
    with (
        member(job, "w0"),
        grpc.insecure_channel(job.shard_addresses()[0]) as channel,
    ):
        request = pull_request(job, "stranger")
        pull = ParameterServiceStub(channel).Pull(request, timeout=TIMEOUT_S)
        assert reason_of_stream(pull) is ErrorReason.WORKER_INCARNATION_STALE
