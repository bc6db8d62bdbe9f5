"""Answers that nobody reads cost a shard 8 MiB each, however large its part is.

Real processes: a reader of a snapshot and a member that pulls, which stop to read, and
which stop altogether.
"""

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import pytest
import torch
from torch import nn

import psworker
from pswire.frames import bits_to_bytes
from pswire.limits import PROTOCOL_VERSION
from pswire.optimizers import flatten_group
from pswire.placement import place
from pswire.schema_codec import schema_from_message
from pswire.v1 import (
    coordinator_service_pb2,
    membership_pb2,
    push_pb2,
    schema_pb2,
)
from pswire.v1 import parameter_service_pb2 as messages
from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from tests.doubles.resident_memory import MIB, PeakMemory
from tests.integration.processes import Processes

MODEL_MIB: Final = 128
"""Sixteen times what an answer may cost."""

READER_COUNT: Final = 3
"""With the first one as many as a worker may have: one more would wait."""

SETTLE_TIMEOUT_S: Final = 60.0

UNREAD_MIB_MAX: Final = 8
"""As the design has it. It is gRPC's: what it sends before the other side has said
that there is room, and the message that waits behind it."""

WATCHED_S: Final = 0.5
"""Time in which a shard that sends into its own memory would have sent all of it: it
sends a GiB in a second."""

SETTLED_MIB: Final = 0.5
"""By which its memory differs from one such time to the next, once it sends no more."""


@dataclass
class Target:
    """A job of real processes with one shard.

    Attributes:
        processes: All of them.
        address: Of its shard.
        requests: What a reader of the newest snapshot sends, and a member that pulls.
    """

    processes: Processes
    address: str
    requests: dict[str, bytes]

    def resident(self) -> int:
        """The shard's own memory in bytes, once it does not change any more."""
        found = [self._peak(), self._peak()]
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while abs(found[-1] - found[-2]) > SETTLED_MIB * MIB:
            assert time.monotonic() < deadline_s, found
            found.append(self._peak())
        return found[-1]

    def _peak(self) -> int:
        with PeakMemory({"shard": self.processes.pids()["shard"]}) as peak:
            threading.Event().wait(WATCHED_S)
        return peak.by_name["shard"].own


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with Processes(tmp_path) as processes:
        listen = "--listen=127.0.0.1:0"
        processes.start_daemon(
            "coordinator", "coordinator", listen, "--shards=1", "--mode=asp"
        )
        coordinator = processes.address("coordinator")
        to_it = f"--coordinator={coordinator}"
        processes.start_daemon("shard", "shard", listen, to_it, PS_SHARED_MEMORY="0")
        address = processes.address("shard")
        model = nn.ParameterList([torch.zeros(MODEL_MIB << 18)])
        with psworker.connect(coordinator, "w0") as ps:
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            values = flatten_group("SGD", optimizer.param_groups[0], optimizer.defaults)
            model, optimizer = ps.prepare(model, optimizer)
            yield Target(processes, address, requests_of(coordinator, values))


def requests_of(coordinator: str, values: tuple[float, ...]) -> dict[str, bytes]:
    with grpc.insecure_channel(coordinator) as channel:
        (found,) = CoordinatorServiceStub(channel).RequestSnapshot(
            coordinator_service_pb2.RequestSnapshotRequest(
                protocol_version=PROTOCOL_VERSION, newer_than=-1, timeout_ms=20_000
            )
        )
    (shard,) = found.shards
    chunk_count = len(place(schema_from_message(found.schema), 1).chunks)
    worker = membership_pb2.WorkerIdentity(worker_id="w0", incarnation=1)
    header = push_pb2.PushHeader(
        protocol_version=PROTOCOL_VERSION,
        job_id=found.job_id,
        optimizer="optimizer",
        worker=worker,
        shard_incarnation=shard.incarnation,
        generation=found.generation,
        sequence=1,
        sequence_unacknowledged_min=1,
        clock=1,
    )
    # Without a chunk; in ASP all values come back.
    trailer = push_pb2.PushTrailer(
        weight=1.0,
        groups=[schema_pb2.GroupHyperparameters(values=values)],
        finite=True,
        chunk_bitmap=bits_to_bytes((False,) * chunk_count),
    )
    return {
        "PullSnapshot": messages.PullSnapshotRequest(
            protocol_version=PROTOCOL_VERSION,
            job_id=found.job_id,
            snapshot_id=found.snapshot_id,
            shard_incarnation=shard.incarnation,
        ).SerializeToString(),
        "Pull": messages.PullRequest(
            protocol_version=PROTOCOL_VERSION,
            job_id=found.job_id,
            worker=worker,
            shard_incarnation=shard.incarnation,
            generation=found.generation,
        ).SerializeToString(),
        "PushPull": messages.PushPullRequest(
            header=header, trailer=trailer
        ).SerializeToString(),
    }


def test_an_answer_that_is_not_read_costs_8_mib(target: Target) -> None:
    for method in ("PullSnapshot", "Pull"):
        # The first one also makes the process grow once: by threads, by buffers that
        # it keeps and uses again. What each further one adds is what an answer costs.
        begin(target, "first", method, 1)
        before = target.resident()
        begin(target, "further", method, READER_COUNT)
        check_cost(target, method, before, READER_COUNT)
    # Of several calls for one push all but the newest are ended.
    before = target.resident()
    begin(target, "only", "PushPull", 1)
    check_cost(target, "PushPull", before, 1)


def begin(target: Target, name: str, method: str, count: int) -> None:
    """Has a process begin calls, read the first message of each, and no more."""
    name = f"{name} {method}"
    script = str(Path(__file__).with_name("unread_calls.py"))
    calls = [method, target.requests[method].hex()] * count
    target.processes.start(name, script, target.address, *calls)
    for _ in range(count):
        called, size = target.processes.line(name).split()
        assert called == method
        assert int(size) > MIB
    if method == "PullSnapshot":
        target.processes.send(name, signal.SIGSTOP)


def check_cost(target: Target, method: str, before: int, count: int) -> None:
    cost = (target.resident() - before) / count / MIB
    print(f"\nan unread answer of {method} costs {cost:.1f} MiB")
    assert cost < UNREAD_MIB_MAX
