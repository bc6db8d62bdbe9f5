"""Resident memory stays flat over 100,000 steps and over 10,000 reconnects.

The slope is that of least squares over the smallest resident memory in each of twenty
windows, after a warm-up: an allocator goes up and down, and a leak only up.
"""

import logging
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import pytest
import torch
from torch import nn

import psworker
from pswire.limits import PROTOCOL_VERSION
from pswire.v1.coordinator_service_pb2 import GetStatusRequest
from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from tests.doubles.resident_memory import resident_of
from tests.integration.processes import Processes

STEP_COUNT: Final = 100_000
BYTES_A_STEP_MAX: Final = 10.0
"""A megabyte in all."""

VISIT_COUNT: Final = 10_000
"""Of each of four kinds."""

BYTES_A_VISIT_MAX: Final = 250.0
"""A visit is one of each kind. One call that is cancelled and then answered even so
costs the coordinator 560 bytes (grpc/grpc#43360)."""

WINDOW_COUNT: Final = 20


class Samples:
    """Resident memory of processes over time."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._own: dict[str, list[int]] = {name: [] for name in pids}

    def take(self) -> None:
        for name, pid in self._pids.items():
            self._own[name].append(resident_of(pid).own)

    @property
    def count(self) -> int:
        """How often they were taken."""
        return len(next(iter(self._own.values())))

    def assert_flat(self, events_a_sample: float, bytes_max: float, unit: str) -> None:
        """Holds the second half against the bound."""
        slopes = {}
        for name, taken in self._own.items():
            kept = np.array(taken[len(taken) // 2 :], dtype=float)
            lows = [window.min() for window in np.array_split(kept, WINDOW_COUNT)]
            events = events_a_sample * len(kept) / WINDOW_COUNT
            slopes[name] = np.polyfit(np.arange(WINDOW_COUNT) * events, lows, 1)[0]
            print(
                f"\n{name:12} {slopes[name]:8.2f} bytes a {unit}, "
                f"{taken[0] >> 20} to {taken[-1] >> 20} MiB",
                end="",
            )
        assert max(slopes.values()) < bytes_max, slopes


@contextmanager
def job(folder: Path, shard_count: int, *rules: str) -> Iterator[tuple[Processes, str]]:
    with Processes(folder) as processes:
        listen = "--listen=127.0.0.1:0"
        rules = (listen, f"--shards={shard_count}", *rules)
        processes.start_daemon("coordinator", "coordinator", *rules)
        address = processes.address("coordinator")
        for index in range(shard_count):
            name = f"shard-{index}"
            processes.start_daemon(name, "shard", listen, f"--coordinator={address}")
            processes.address(name)
        yield processes, address


@pytest.mark.timeout(2400)  # for 42 steps a second, on a busy machine
def test_steps_leave_memory_flat(tmp_path: Path) -> None:
    each = 500
    with job(tmp_path, 1) as (processes, address):
        script = str(Path(__file__).with_name("steady_worker.py"))
        processes.start("worker", script, address, str(STEP_COUNT), str(each))
        samples = Samples(processes.pids())
        while processes.line("worker", 60) != "over":
            samples.take()
    assert samples.count * each == STEP_COUNT
    samples.assert_flat(each, BYTES_A_STEP_MAX, "step")


@pytest.fixture
def _no_log() -> Iterator[None]:
    """What pytest keeps of this process's log grows."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_no_log")
@pytest.mark.timeout(2400)  # for 4 visits a second
def test_reconnects_leave_memory_flat(tmp_path: Path) -> None:
    """Of members, of readers, of connections that are closed and that are reset."""
    with (
        job(tmp_path, 1, "--mode=asp") as (processes, address),
        psworker.connect(address, "w0") as ps,
    ):
        model = nn.Linear(20, 10)
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = ps.prepare(model, optimizer)
        samples = Samples({**processes.pids(), "this process": os.getpid()})
        for visit in range(VISIT_COUNT):
            step(model, optimizer)
            come_and_go(address)
            with psworker.SnapshotReader(address) as reader:
                reader.latest()
            with grpc.insecure_channel(address) as channel:
                CoordinatorServiceStub(channel).GetStatus(
                    GetStatusRequest(protocol_version=PROTOCOL_VERSION)
                )
            reset(address)
            if visit % 10 == 0:
                samples.take()
    samples.assert_flat(10, BYTES_A_VISIT_MAX, "visit")


def come_and_go(address: str) -> None:
    with psworker.connect(address, "guest") as guest:
        model = nn.Linear(20, 10)
        optimizer = torch.optim.Adam(model.parameters())
        step(*guest.prepare(model, optimizer))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def reset(address: str) -> None:
    """Opens a connection, begins HTTP/2, and resets it within a frame."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x40\x04")
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
