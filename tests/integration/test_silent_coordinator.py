"""A shard whose coordinator is silent stops acknowledging within a lease (G11)."""

import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
import torch

import psworker
from tests.doubles.children import Nursery
from tests.integration.processes import Processes

LEASE_S: Final = 6
TIMEOUT_S: Final = 60.0


@dataclass
class Worker:
    """A worker that steps in a thread of its own until it is told to stop.

    Attributes:
        parameter: Lowered by one with each step.
        stepped_s: When each step was done.
        clock: Its last one.
    """

    coordinator: str
    parameter: torch.nn.Parameter = field(
        default_factory=lambda: torch.nn.Parameter(torch.zeros(8))
    )
    stepped_s: list[float] = field(default_factory=list)
    clock: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)

    def train(self) -> None:
        model = torch.nn.ParameterList([self.parameter])
        with psworker.connect(
            self.coordinator, "w0", step_timeout_s=60.0, start_timeout_s=TIMEOUT_S
        ) as ps:
            model, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=1.0)
            )
            while not self.stopping.is_set():
                self.parameter.grad = torch.ones(8)
                optimizer.step()
                self.stepped_s.append(time.monotonic())
            self.clock = ps.clock


def test_steps_are_held_after_a_lease_and_go_on(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Processes(tmp_path, nursery) as processes:
        processes.start_daemon(
            "coordinator",
            *("coordinator", "--listen=127.0.0.1:0", "--shards=1"),
            f"--lease-ttl={LEASE_S}",
        )
        worker = Worker(processes.address("coordinator"))
        processes.start_daemon("shard", "shard", f"--coordinator={worker.coordinator}")
        processes.address("shard")
        thread = threading.Thread(target=worker.train)
        thread.start()
        try:
            _wait(lambda: bool(worker.stepped_s))
            stopped_s = time.monotonic()
            processes.send("coordinator", signal.SIGSTOP)
            # The worker hears so when its step has been held for 5 s.
            _wait(lambda: "the coordinator, which has been silent" in caplog.text)
            held_s = worker.stepped_s[-1]
            assert re.search(
                "waiting for the coordinator, which has been silent for longer than a "
                r"lease, \d+ s so far$",
                caplog.text,
                re.MULTILINE,
            )
            assert f"silent for a lease of {LEASE_S:.1f} s" in processes.log("shard")
            processes.send("coordinator", signal.SIGCONT)
            _wait(lambda: worker.stepped_s[-1] > held_s)
            assert "the coordinator answers again" in processes.log("shard")
        finally:
            processes.send("coordinator", signal.SIGCONT)
            worker.stopping.set()
            thread.join(TIMEOUT_S)

    assert not thread.is_alive()
    # That it is not sooner is for `test_coordinator_outage.py`, which has a clock.
    assert held_s - stopped_s < 2 * LEASE_S
    assert worker.parameter.detach().tolist() == [-float(worker.clock)] * 8


def _wait(is_reached: Callable[[], bool]) -> None:
    """Looks until it is so: processes tell nobody when they write to their logs."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
