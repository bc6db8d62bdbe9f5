"""How soon a lost worker is noticed."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from unittest import mock

import pytest

from pswire.security.credentials import Credentials
from tests.doubles.children import Nursery
from tests.doubles.made_certificates import SERVER, MadeCertificates
from tests.integration.job import Job
from tests.integration.processes import Processes

SHORT_LEASE_MS: Final = 2_000

GO_ON_TIMEOUT_S: Final = 20.0
"""Shards tell where they stand every second."""

WORKER: Final = """
import ctypes, sys, torch, psworker
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with psworker.connect(
    connect_timeout_s=60, step_timeout_s=60, start_timeout_s=60
) as ps:
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
    nursery: Nursery,
    folder: Path,
    lease_ms: int,
    *arguments: str,
    made: MadeCertificates | None = None,
) -> Iterator[tuple[Job, Processes]]:
    """A job in which `w0` and `w1` train, `w1` with these arguments."""
    script = folder / "train.py"
    script.write_text(WORKER)
    job = Job(
        folder / "state",
        lease_ttl_ms=lease_ms,
        sockets=True,
        credentials=made.credentials(SERVER) if made else Credentials(),
    )
    own = made.environment(SERVER) if made else {}
    with (
        mock.patch.dict(os.environ, own),
        job,
        Processes(folder, nursery) as processes,
    ):
        for name, given in (("w0", ()), ("w1", arguments)):
            processes.start(
                name,
                *(str(script), *given),
                PS_COORDINATOR=job.address,
                PS_WORKER_ID=name,
                **(made.environment(f"worker-{name}") if made else {}),
            )
        for name in ("w0", "w1"):
            assert processes.line(name) == "step 3"
        job.wait_record(lambda record: len(record.members) == 2)
        yield job, processes


@pytest.mark.parametrize(
    ("number", "lease_ms", "has_tls"),
    [
        (signal.SIGSTOP, 10_000, False),
        (signal.SIGKILL, 120_000, False),
        pytest.param(signal.SIGSTOP, 10_000, True, marks=pytest.mark.repeat),
        (signal.SIGKILL, 120_000, True),
    ],
    ids=["stopped", "killed", "stopped with TLS", "killed with TLS"],
)
def test_a_lost_worker_is_taken_out(
    nursery: Nursery,
    tmp_path: Path,
    number: signal.Signals,
    lease_ms: int,
    has_tls: bool,
) -> None:
    """Long before the lease is over when it is dead, and when it hangs long before gRPC
    itself would notice, which takes a minute.

    However long the lease is, it takes three seconds and a quarter, and on a busy
    machine less than the wait for it is limited to.
    """
    made = MadeCertificates(tmp_path / "certificates") if has_tls else None
    with two_workers(nursery, tmp_path, lease_ms, made=made) as (job, processes):
        processes.send("w1", number)
        record = job.wait_record(lambda record: len(record.members) == 1)
        (end,) = record.departures
        assert end.evicted
        slots = job.coordinator.core.shards.slots
        assert job.run(
            job.coordinator.changes.wait_until(
                lambda: all(s.standing.applied_clock > end.last_clock for s in slots),
                GO_ON_TIMEOUT_S,
            )
        ), "the other one does not go on"


# In `test_worker_lifecycle.py` another worker moves all the bytes it can meanwhile.
@pytest.mark.repeat
@pytest.mark.parametrize("has_tls", [False, True])
def test_a_worker_that_keeps_its_interpreter_busy_keeps_its_place(
    nursery: Nursery, tmp_path: Path, has_tls: bool
) -> None:
    """Pings are answered by gRPC's own threads, for longer than two leases."""
    made = MadeCertificates(tmp_path / "certificates") if has_tls else None
    with two_workers(nursery, tmp_path, SHORT_LEASE_MS, "hold", made=made) as (
        job,
        processes,
    ):
        record = job.wait_record(lambda record: len(record.members) == 2)
        assert processes.line("w1") == "step 203"
        assert job.ask(lambda: job.coordinator.core.record) == record
