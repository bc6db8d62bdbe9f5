"""Starts in any order, losses, ends and exit codes, with real processes."""

import signal
import socket
import time
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

import psworker
from pswire.exit_codes import ExitCode
from tests.doubles.children import Nursery, wait_until
from tests.doubles.free_addresses import free_address
from tests.doubles.job_tokens import JobTokens
from tests.integration.job import Job, connect, run_workers
from tests.integration.processes import Processes

STOP_TIMEOUT_S: Final = 45.0

WORKER: Final = """
import sys, torch, psworker
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with psworker.connect(
    connect_timeout_s=60, step_timeout_s=60, start_timeout_s=60
) as ps:
    model, optimizer = ps.prepare(model, optimizer)
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        print("clock", ps.clock, flush=True)
"""


def test_the_order_of_starting_is_free_and_sigterm_ends_cleanly(tmp_path: Path) -> None:
    """Worker first, coordinator last: everybody waits, and says for whom."""
    coordinator = free_address()
    waiting = f"waiting for the coordinator at {coordinator}"
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    with Processes(tmp_path) as processes:
        processes.start(
            "worker",
            *("-m", "psworker", "run", "--coordinator", str(coordinator)),
            *("--", str(script), "3"),
        )
        for index in range(2):
            processes.start_daemon(
                f"shard-{index}", "shard", f"--coordinator={coordinator}"
            )
            assert processes.address(f"shard-{index}")
        for name in ("worker", "shard-0"):
            wait_until(
                lambda name=name: waiting in processes.log(name),  # type: ignore[misc]
                f"{name} to wait",
            )
        processes.start_daemon(
            "coordinator", "coordinator", f"--listen={coordinator}", "--shards=2"
        )
        assert processes.address("coordinator") == str(coordinator)
        assert [processes.line("worker") for _ in range(3)] == [
            f"clock {clock}" for clock in (1, 2, 3)
        ]
        assert processes.code("worker") == ExitCode.DONE
        assert "without ever connecting" not in processes.log("worker")
        for name in ("coordinator", "shard-0", "shard-1"):
            processes.send(name, signal.SIGTERM)
        for name in ("coordinator", "shard-0", "shard-1"):
            assert processes.code(name, STOP_TIMEOUT_S) == ExitCode.DONE
        assert "Traceback" not in processes.logs()


def test_a_killed_shard_ends_the_job_and_is_named(
    tmp_path: Path, nursery: Nursery
) -> None:
    with Processes(tmp_path, nursery) as processes:
        processes.start_daemon(
            "coordinator",
            *("coordinator", "--listen=127.0.0.1:0", "--shards=2", "--lease-ttl=4"),
        )
        address = processes.address("coordinator")
        for index in range(2):
            processes.start_daemon(
                f"shard-{index}", "shard", f"--coordinator={address}"
            )
            processes.address(f"shard-{index}")
        ps = psworker.connect(address, "w0", step_timeout_s=30, start_timeout_s=30)
        with pytest.raises(psworker.JobFailedError) as caught, ps:
            train_and_kill(ps, processes)
        # Which of the two processes has which index is a race of their starts.
        assert "shard 0 at " in str(caught.value) or "shard 1 at " in str(caught.value)
        assert "was lost" in str(caught.value)
        for name in ("shard-0", "coordinator"):
            assert processes.code(name) == ExitCode.PEER_UNAVAILABLE
            assert "was lost" in processes.log(name)
        assert "Traceback" not in processes.logs()


def test_a_shard_that_has_outlived_its_job_ends(
    tmp_path: Path, nursery: Nursery
) -> None:
    """Another job, that a new coordinator serves at the same address, has its own."""
    coordinator = free_address()
    with Processes(tmp_path, nursery) as processes:
        serve = ("coordinator", f"--listen={coordinator}", "--shards=1")
        processes.start_daemon("first", *serve)
        processes.address("first")
        processes.start_daemon("shard", "shard", f"--coordinator={coordinator}")
        processes.address("shard")
        while "shard 0 registered at" not in processes.log("first"):
            time.sleep(0.05)
        processes.send("first", signal.SIGKILL)
        processes.code("first")
        processes.start_daemon("second", *serve)
        processes.address("second")
        assert processes.code("shard") == ExitCode.PEER_UNAVAILABLE
        text = processes.log("shard")
        assert "psserver: the caller belongs to job" in text
        assert "Traceback" not in text


def train_and_kill(ps: psworker.WorkerConnection, processes: Processes) -> None:
    """Steps for ever, and kills a shard after the third step."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ps.prepare(model, optimizer)
    while True:
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        if ps.clock == 3:
            processes.send("shard-1", signal.SIGKILL)


def test_a_killed_worker_is_evicted_in_seconds_and_the_others_go_on(
    tmp_path: Path, nursery: Nursery
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    # Without the end of its connection it would be noticed after the lease at best.
    with (
        Job(tmp_path, lease_ttl_ms=120_000, sockets=True) as job,
        Processes(tmp_path, nursery) as processes,
    ):
        processes.start(
            "doomed",
            str(script),
            "1000000",
            PS_COORDINATOR=job.address,
            PS_WORKER_ID="doomed",
        )
        job.wait_record(lambda record: len(record.members) == 1)

        def work(worker_id: str) -> float:
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with connect(job, worker_id, start_timeout_s=40) as ps:
                model, optimizer = ps.prepare(model, optimizer)
                began, step = 0.0, 0
                while ps.generation < 3 or step < 30:
                    optimizer.zero_grad()
                    model(torch.ones(4, 3)).sum().backward()
                    optimizer.step()
                    step += 1
                    if step == 10:
                        processes.send("doomed", signal.SIGKILL)
                        began = time.monotonic()
                return time.monotonic() - began

        waited_s = run_workers({"w0": work})["w0"]
        assert waited_s < 60, "a SIGKILL is noticed in about a second"
        assert job.ask(lambda: job.coordinator.core.roster.present("doomed")) is None


def test_a_port_in_use_is_told_without_a_traceback(
    tmp_path: Path, nursery: Nursery
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Processes(tmp_path, nursery) as processes,
    ):
        port = listener.getsockname()[1]
        for role, arguments in (
            ("coordinator", ["--shards=1"]),
            ("shard", ["--coordinator=127.0.0.1:1"]),
        ):
            processes.start_daemon(role, role, f"--listen=127.0.0.1:{port}", *arguments)
            assert processes.code(role) == ExitCode.BAD_CONFIGURATION
            text = processes.log(role)
            assert f"can't listen on 127.0.0.1:{port}: port {port} is in use" in text
            assert "Traceback" not in text


def test_a_local_job_that_is_stopped_has_not_failed(
    tmp_path: Path, nursery: Nursery
) -> None:
    """Nor has one that asks for tokens: its shards have the supervisor's."""
    tokens = JobTokens(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    with Processes(tmp_path, nursery, launches=True) as processes:
        processes.start_daemon(
            "local",
            *("local", "--listen=127.0.0.1:0", "--shards=2", "--lease-ttl=5"),
            *(f"--tokens={tokens.store}", f"--token-file={tokens.path('shard')}"),
        )
        coordinator = processes.address("local")
        processes.start(
            *("worker", str(script), str(1_000_000)),
            PS_COORDINATOR=coordinator,
            PS_TOKEN_FILE=str(tokens.path("worker")),
        )
        assert processes.line("worker") == "clock 1"
        processes.send("local", signal.SIGINT)
        assert processes.code("local") == ExitCode.DONE
        log = processes.log("local")
    # The supervisor, the coordinator and two shards.
    assert log.count("draining") == 4
    assert "has failed" not in log
