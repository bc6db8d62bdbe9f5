"""How soon a lost worker is noticed."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.doubles.children import Nursery
from tests.integration.job import Job
from tests.integration.processes import Processes

SHORT_LEASE_MS: Final = 2_000

GO_ON_TIMEOUT_S: Final = 20.0
"""Shards tell where they stand every second."""

WORKER: Final = """
import ctypes, sys, torch, psworker
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with psworker.connect(step_timeout_s=60, start_timeout_s=60) as ps:
    model, optimizer = ps.prepare(model, optimizer)
    for step in range(1_000_000):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        if step == 3 and "hold" in sys.argv:
            # Unlike Python's own sleep, this one keeps the interpreter's lock.
            ctypes.PyDLL(None).sleep(5)
        if step % 200 == 3:
            print("step", step, flush=True)
"""


@contextmanager
def two_workers(
    nursery: Nursery, folder: Path, lease_ms: int, *arguments: str
) -> Iterator[tuple[Job, Processes]]:
    """A job in which `w0` and `w1` train, `w1` with these arguments."""
    script = folder / "train.py"
    script.write_text(WORKER)
    job = Job(folder / "state", lease_ttl_ms=lease_ms, sockets=True)
    with job, Processes(folder, nursery) as processes:
        for name, given in (("w0", ()), ("w1", arguments)):
            processes.start(
                name,
                *(str(script), *given),
                PS_COORDINATOR=job.address,
                PS_WORKER_ID=name,
            )
        for name in ("w0", "w1"):
            assert processes.line(name) == "step 3"
        job.wait_record(lambda record: len(record.members) == 2)
        yield job, processes


@pytest.mark.parametrize(
    ("number", "lease_ms", "bound_s"),
    [(signal.SIGSTOP, 6_000, 6.0), (signal.SIGKILL, 30_000, 15.0)],
    ids=["stopped", "killed"],
)
@pytest.mark.timeout(240)
def test_a_lost_worker_is_taken_out(
    nursery: Nursery,
    tmp_path: Path,
    number: signal.Signals,
    lease_ms: int,
    bound_s: float,
) -> None:
    """Within the lease when it hangs, long before when it is dead.

    The leases are long beside what a busy machine adds: it takes 0.6 of one, and a
    quarter of a second.
    """
    with two_workers(nursery, tmp_path, lease_ms) as (job, processes):
        processes.send("w1", number)
        began = time.monotonic()
        record = job.wait_record(lambda record: len(record.members) == 1)
        noticed_after_s = time.monotonic() - began
        (end,) = record.departures
        assert end.evicted
        assert noticed_after_s < bound_s
        slots = job.coordinator.core.shards.slots
        assert job.run(
            job.coordinator.changes.wait_until(
                lambda: all(s.standing.applied_clock > end.last_clock for s in slots),
                GO_ON_TIMEOUT_S,
            )
        ), "the other one does not go on"


# In `test_worker_lifecycle.py` another worker moves all the bytes it can meanwhile.
@pytest.mark.repeat
@pytest.mark.timeout(240)
def test_a_worker_that_keeps_its_interpreter_busy_keeps_its_place(
    nursery: Nursery,
    tmp_path: Path,
) -> None:
    """Pings are answered by gRPC's own threads, for longer than two leases."""
    with two_workers(nursery, tmp_path, SHORT_LEASE_MS, "hold") as (job, processes):
        record = job.wait_record(lambda record: len(record.members) == 2)
        assert processes.line("w1") == "step 203"
        assert job.ask(lambda: job.coordinator.core.record) == record
