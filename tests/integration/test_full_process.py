"""A shard without memory or descriptors refuses new work, trains on, and recovers."""

import re
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import torch
from torch import nn

import psworker
from pswire.error_details import refusal_from_rpc_error
from pswire.limits import PROTOCOL_VERSION
from pswire.reasons import ErrorReason
from pswire.v1 import parameter_service_pb2 as messages
from tests.doubles.children import Nursery, wait_until
from tests.integration.processes import Processes

TIMEOUT_S: Final = 30.0
LEFT_BYTES: Final = 48 << 20
"""Below what a daemon wants to be left, and above what steps of this model take."""


@contextmanager
def limited(pid: int, kind: int, limit: int) -> Iterator[None]:
    """A process may have only so much meanwhile."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


def address_space(pid: int) -> int:
    found = re.search(r"VmSize:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def descriptor_count(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def asked(address: str) -> ErrorReason | None:
    """Why a snapshot that there is not is refused, by a connection of its own."""
    request = messages.PullSnapshotRequest(
        protocol_version=PROTOCOL_VERSION, job_id="another"
    )
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        call: Any = channel.unary_stream("/pswire.v1.ParameterService/PullSnapshot")
        with pytest.raises(grpc.RpcError) as caught:
            list(
                call(
                    request.SerializeToString(), timeout=TIMEOUT_S, wait_for_ready=True
                )
            )
    refusal = refusal_from_rpc_error(caught.value)
    return None if refusal is None else refusal.reason


@pytest.fixture
def job(
    tmp_path: Path, nursery: Nursery
) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """The process of a shard, its address, and a step that is checked."""
    with Processes(tmp_path, nursery) as processes:
        listen = "--listen=127.0.0.1:0"
        processes.start_daemon("coordinator", "coordinator", listen, "--shards=1")
        coordinator = processes.address("coordinator")
        processes.start_daemon(
            *("shard", "shard", listen, f"--coordinator={coordinator}"),
            PS_SHARED_MEMORY="0",
        )
        address = processes.address("shard")
        with psworker.connect(coordinator, "w0") as ps:
            model = nn.ParameterList([torch.zeros(1024)])
            model, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=1.0)
            )
            count = 0

            def step() -> None:
                nonlocal count
                model[0].grad = torch.ones(1024)
                optimizer.step()
                ps.wait()
                count += 1
                assert bool((model[0] == -float(count)).all())

            for _ in range(3):
                step()
            yield processes.pids()["shard"], address, step


def test_without_memory(job: tuple[int, str, Callable[[], None]]) -> None:
    pid, address, step = job
    assert asked(address) is ErrorReason.JOB_UNKNOWN
    with limited(pid, resource.RLIMIT_AS, address_space(pid) + LEFT_BYTES):
        wait_until(lambda: asked(address) is ErrorReason.BUSY, "it is full", TIMEOUT_S)
        for _ in range(20):
            step()
    wait_until(
        lambda: asked(address) is ErrorReason.JOB_UNKNOWN, "there is room", TIMEOUT_S
    )
    step()


def test_without_descriptors(job: tuple[int, str, Callable[[], None]]) -> None:
    pid, address, step = job
    host, _, port = address.rpartition(":")
    with limited(pid, resource.RLIMIT_NOFILE, descriptor_count(pid)):
        held = [socket.create_connection((host, int(port))) for _ in range(16)]
        for _ in range(20):
            step()
        for each in held:
            each.close()
    assert asked(address) is ErrorReason.JOB_UNKNOWN
    step()
