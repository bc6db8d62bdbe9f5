import contextlib
import logging
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

import psworker
from psserver.shard.core.shard import ShardCore
from pswire import channels
from pswire.addresses import Address, parse_address
from pswire.channels import ChannelKind
from pswire.keepalive import Keepalive
from pswire.membership import Mode, WorkerKey, WorkerState
from pswire.reasons import ErrorReason, Refusal
from psworker.connection import Connection
from tests.doubles.child_process import killed_at_end
from tests.doubles.children import Completed, Nursery, wait_until
from tests.doubles.fault_proxy import FaultProxy
from tests.integration.job import WAIT_TIMEOUT_S, Crew, Job, connect, short_steps

SCRIPT = """
import os, sys, torch, psworker
from torch import nn

ps = psworker.connect({address!r}, worker_id="w0")
model = nn.Linear(2, 1)
model, optimizer = ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1, 2)).sum().backward()
{body}
"""

FORKING = """
import psutil, warnings
warnings.simplefilter("ignore")  # that forking beside threads is risky is known

def held():
    connections = psutil.Process().net_connections()
    return sum(each.raddr != () and each.raddr.port == PORT for each in connections)

before = held()
ends = set()
for _ in range(20):
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
        except psworker.ClosedError as error:
            os._exit(10 + held() if "forked" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    ends.add(os.waitstatus_to_exitcode(status))
    optimizer.step()
print(before, ends, held())
"""

FORKING_AFTER_LEAVING = """
import warnings
warnings.simplefilter("ignore")  # that forking beside threads is risky is known

def train():
    with psworker.connect(ADDRESS, worker_id="w1") as ps:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

def end_of_child():
    child = os.fork()
    if child == 0:
        try:
            train()
        except psworker.ClosedError as error:
            os._exit(10 if "forked" in str(error) else 11)
        os._exit(12)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)

optimizer.step()
ps.close()
ends = [end_of_child()]
del ps, optimizer
ends.append(end_of_child())
print(ends)
"""


def script(address: str, body: str) -> list[str]:
    return [
        sys.executable,
        "-W",
        "error",
        "-c",
        SCRIPT.format(address=address, body=body),
    ]


def run_script(job: Job, body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        script(job.address, body), capture_output=True, text=True, timeout=110
    )


def fork_script(nursery: Nursery, job: Job, body: str) -> Completed:
    """As `run_script`, for what is not of how a process starts and ends."""
    return nursery.run(*script(job.address, body)[1:], environment={})


def member(
    address: str, worker_id: str = "w0", step_timeout_s: float = 60
) -> tuple[Connection, torch.optim.Optimizer]:
    ps = psworker.connect(address, worker_id=worker_id, step_timeout_s=step_timeout_s)
    model = nn.Linear(2, 1)
    model, optimizer = ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return ps, optimizer


def assert_lost_and_replaced(job: Job) -> None:
    """The job's only worker is not taken out before another one takes its place."""
    job.wait_workers(1, WorkerState.LOST)
    ps, optimizer = member(job.address)
    with ps:
        record = job.wait_record(lambda record: bool(record.departures))
        assert [(d.last_clock, d.evicted) for d in record.departures] == [(1, True)]
        optimizer.step()
        assert (ps.worker_id, ps.clock) == ("w0", 2)


@pytest.fixture(name="job")
def one_worker_job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path / "state", sockets=True) as job:
        yield job


def test_a_script_that_ends_well_leaves_though_it_never_closed(job: Job) -> None:
    done = run_script(job, "optimizer.step()")

    assert (done.returncode, done.stderr) == (0, "")
    record = job.wait_record(lambda record: not record.members)
    assert [(d.last_clock, d.evicted) for d in record.departures] == [(1, False)]


def test_a_script_that_ends_with_an_exception_counts_as_lost(job: Job) -> None:
    done = run_script(job, "optimizer.step(); raise RuntimeError('of the user')")

    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert_lost_and_replaced(job)


def test_an_exception_through_the_context_counts_as_lost(job: Job) -> None:
    ps, optimizer = member(job.address)
    optimizer.step()
    with pytest.raises(ZeroDivisionError), ps:
        _ = 1 / 0

    assert_lost_and_replaced(job)


def test_a_shard_that_does_not_know_of_the_start_yet_takes_first_values_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses them while word of who seeds is on its way to it."""
    check_seeder = ShardCore.check_seeder
    refusals = [Refusal(ErrorReason.WORKER_INCARNATION_STALE, "who is w0/1?")]

    def check(core: ShardCore, worker: WorkerKey, fence_number: int) -> None:
        if refusals:
            raise refusals.pop()
        check_seeder(core, worker, fence_number)

    monkeypatch.setattr(ShardCore, "check_seeder", check)
    with Job(tmp_path) as job, connect(job, "w0", start_timeout_s=20.0) as ps:
        _, optimizer = prepared(ps)
        optimizer.step()
        assert ps.clock == 1

    assert not refusals


def test_closing_twice_leaves_once(job: Job) -> None:
    ps, optimizer = member(job.address)
    optimizer.step()

    ps.close()
    ps.close()

    record = job.wait_record(lambda record: not record.members)
    assert not record.departures[0].evicted


def test_ctrl_c_ends_a_step_that_waits(tmp_path: Path) -> None:
    with Job(tmp_path / "state", workers_min=2, sockets=True) as job:
        blocked = subprocess.Popen(
            script(
                job.address,
                # A run of the tests in the background has interrupts ignored.
                "import signal; "
                "signal.signal(signal.SIGINT, signal.default_int_handler); "
                "print('stepping', flush=True); optimizer.step()",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with killed_at_end(blocked):
            ps, _ = member(job.address, "w1")
            with ps:
                assert blocked.stdout is not None
                assert blocked.stdout.readline() == "stepping\n"
                job.wait_pushed("w0", 1)
                began = time.monotonic()
                blocked.send_signal(signal.SIGINT)
                _, stderr = blocked.communicate(timeout=60)

        assert time.monotonic() - began < 60  # of the 600 s that a step may take
        assert blocked.returncode in (1, -signal.SIGINT, 130)
        assert "KeyboardInterrupt" in stderr
        assert stderr.count("Traceback") == 1


def test_a_forked_child_lives_and_holds_no_connection(
    job: Job, nursery: Nursery
) -> None:
    body = FORKING.replace("PORT", job.address.rsplit(":", 1)[1])
    done = fork_script(nursery, job, body)

    assert done.stderr == ""
    assert done.stdout == "1 {10} 1\n"


def test_a_child_that_was_forked_after_leaving_joins_or_is_told_why_not(
    job: Job, nursery: Nursery
) -> None:
    """It can't while its parent still holds what it was connected by."""
    body = FORKING_AFTER_LEAVING.replace("ADDRESS", repr(job.address))
    done = fork_script(nursery, job, body)

    assert done.stdout == "[10, 12]\n"
    (warning,) = done.stderr.splitlines()
    assert "this job is finished: all of its workers have left" in warning


def test_a_broken_watch_is_opened_again_and_training_goes_on(job: Job) -> None:
    with FaultProxy(job.address) as proxy:
        ps, optimizer = member(proxy.address)
        with ps:
            for count in range(2, 5):
                proxy.reset()
                optimizer.step()
                while proxy.connection_count < count:
                    time.sleep(0.01)
            job.wait_record(lambda record: len(record.members) == 1)
            optimizer.step()
            assert ps.clock == 4
            assert ps.generation == 1


def test_an_evicted_worker_that_can_not_come_back_is_told_why(tmp_path: Path) -> None:
    with (
        Job(tmp_path / "state", sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):
        other, other_optimizer = member(job.address, "w1")
        ps, optimizer = member(proxy.address, "w0")
        with other:
            proxy.refuse()
            job.wait_record(lambda record: len(record.members) == 1)

            with short_steps(ps, 4):
                with pytest.raises(psworker.StepTimeoutError) as caught:
                    optimizer.step()
                ps.close()
            other_optimizer.step()

    assert "worker w0 was evicted and could not join again" in str(caught.value)
    assert f"the coordinator at {proxy.address}" in str(caught.value)


def test_closing_does_not_wait_for_a_coordinator_that_is_gone(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psworker.member.session.LEAVE_TIMEOUT_S", 60.0)
    with FaultProxy(job.address) as proxy:
        ps, optimizer = member(proxy.address)
        optimizer.step()
        proxy.refuse()

        began = time.monotonic()
        ps.close()

    assert time.monotonic() - began < 60
    assert "could not leave the job in good order" in caplog.text


def test_the_loss_of_another_worker_is_told_once(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    ps, optimizer = member(job.address, "w0")
    with ps, FaultProxy(job.address) as proxy:
        lost, _ = member(proxy.address, "w1")
        proxy.refuse()
        job.wait_record(lambda record: len(record.members) == 1)
        for _ in range(3):
            optimizer.step()
        wait_until(lambda: bool(told_of_loss(caplog)), "word of the loss")
        lost.close()
    told = told_of_loss(caplog)
    assert told == [
        "worker w1 (start 1) was lost after clock 0: the job goes on with this worker "
        "alone in generation 3"
    ]


def told_of_loss(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if each.startswith("worker w1 (start 1)")]


def test_a_shard_that_is_silent_is_named_with_its_last_answer(tmp_path: Path) -> None:
    with ExitStack() as stack:
        proxies: list[FaultProxy] = []

        def through_proxy(address: Address) -> Address:
            proxies.append(stack.enter_context(FaultProxy(str(address))))
            return parse_address(proxies[0].address)

        job = stack.enter_context(Job(tmp_path / "state", advertise={1: through_proxy}))
        ps, optimizer = member(job.address)
        stack.enter_context(ps)
        optimizer.step()
        proxies[0].refuse()
        with (
            short_steps(ps, 4),
            pytest.raises(psworker.StepTimeoutError) as caught,
        ):
            optimizer.step()
        proxies[0].heal()
        optimizer.step()  # the same push
        assert ps.clock == 2

    text = str(caught.value)
    assert text.startswith("the step to clock 2 was not complete within 4 s: ")
    assert f"waiting for shard 1 at {proxies[0].address}, which gives no answer" in text
    assert "last answers: shard 0 at clock" in text
    assert "shard 1 at clock 1" in text


def test_shards_that_were_stopped_are_told_while_a_step_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at `psserver local`: the worker's terminal says whom it waits for."""
    for module in ("member.shard_reach", "transport.waiting_log"):
        monkeypatch.setattr(f"psworker.{module}.WAITING_INTERVAL_MS", 200)
    with Job(tmp_path, workers_min=2) as job:
        addresses = job.shard_addresses()

        def step_alone(worker_id: str) -> None:
            with (
                contextlib.suppress(psworker.PsError),  # nobody is there to leave
                # Lines come at 0.2 s, and each at twice the time of the one before.
                connect(job, worker_id, step_timeout_s=8.0) as ps,
            ):
                model, optimizer = prepared(ps)
                both_in.wait()
                model(torch.ones(1, 2)).sum().backward()
                with pytest.raises(psworker.StepTimeoutError) as caught:
                    optimizer.step()
                errors.append(str(caught.value))

        def wait_alone(worker_id: str) -> None:
            with (
                contextlib.suppress(psworker.PsError),
                connect(job, worker_id) as ps,
            ):
                prepared(ps)
                both_in.wait()
                is_over.wait(WAIT_TIMEOUT_S)

        both_in = threading.Barrier(2)
        is_over = threading.Event()
        errors: list[str] = []
        with Crew({"w0": step_alone, "w1": wait_alone}) as crew:
            job.wait_pushed("w0", 1)
            for index in range(2):
                job.end_shard(index)
            job.stop_coordinator()
            crew.futures["w0"].result(WAIT_TIMEOUT_S)
            is_over.set()

    wanted = [
        f"shard {index} at {address}, which gives no answer"
        for index, address in enumerate(addresses)
    ]
    warnings = [
        each.getMessage() for each in caplog.records if each.levelno == logging.WARNING
    ]
    told = [each for each in warnings if each.startswith("waiting for shard")]
    both = [each for each in told if all(shard in each for shard in wanted)]
    assert len(both) >= 2, warnings
    (error,) = errors
    assert all(each in error for each in wanted), error
    lost = [each for each in warnings if "no connection to the coordinator" in each]
    assert lost
    assert "Cancelling all calls" not in caplog.text


def prepared(ps: psworker.Connection) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    model, optimizer = ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, optimizer


PATIENT: Final = Keepalive(interval_ms=1_000, timeout_ms=4_000)
"""Of both ends, so that it takes a stall of the machine of 4 s to break a stream: who
holds its interpreter can't open another one."""

HOLDING: Final = """
import ctypes, torch, psworker
from torch import nn
from pswire import channels, keepalive

channels._KEEPALIVES[channels.ChannelKind.CONTROL] = keepalive.{patient!r}
ps = psworker.connect({address!r}, "w1", connect_timeout_s=60, step_timeout_s=60)
model = nn.ParameterList([torch.zeros(2_000_000), torch.zeros(2_000_000)])
model, optimizer = ps.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
def step():
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
step()
print("holding", flush=True)
# Unlike Python's own sleep, this one keeps the interpreter's lock.
ctypes.PyDLL(None).sleep(8)
step()
print(ps.generation, ps.last_push.outcome, ps.last_push.rejoined, flush=True)
ps.close()
"""


def test_a_step_that_holds_the_interpreter_keeps_its_place_under_bulk_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than a silent one would, while another worker moves all the bytes it
    can."""
    monkeypatch.setitem(channels._KEEPALIVES, ChannelKind.CONTROL, PATIENT)
    monkeypatch.setattr(
        "psserver.coordinator.daemon.coordinator_keepalive", lambda _: PATIENT
    )
    with (
        Job(tmp_path / "state", mode=Mode.ASP, sockets=True) as job,
        psworker.connect(job.address, "w0", step_timeout_s=60) as ps,
    ):
        model = nn.ParameterList([torch.zeros(2_000_000), torch.zeros(2_000_000)])
        model, optimizer = ps.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0)
        )
        command = [
            sys.executable,
            "-c",
            HOLDING.format(address=job.address, patient=PATIENT),
        ]
        with killed_at_end(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ) as holding:
            assert holding.stdout is not None
            assert holding.stdout.readline() == "holding\n"
            # Not `select`, which takes no descriptor above 1,023.
            has_said_more = select.poll()
            has_said_more.register(holding.stdout, select.POLLIN)
            generation = ps.generation
            while holding.poll() is None and not has_said_more.poll(0):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            assert holding.stdout.readline() == f"{generation} applied False\n"


def test_a_lost_shard_ends_the_job_with_its_name(job: Job) -> None:
    ps, optimizer = member(job.address)
    with ps:
        optimizer.step()
        job.end_shard(1)

        with pytest.raises(psworker.JobFailedError, match="shard 1"):
            optimizer.step()
        with pytest.raises(psworker.JobFailedError, match="shard 1"):
            optimizer.step()


def test_a_step_that_waits_is_told_of_the_coordinators_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a worker whose place nobody can take: that is why."""
    for module in ("parameter_service", "progress_report"):
        monkeypatch.setattr(f"psserver.shard.rpc.{module}.WAITING_INTERVAL_MS", 100)
    both_in, is_over = threading.Barrier(2), threading.Event()
    errors: list[str] = []
    with Job(tmp_path, workers_min=2) as job:

        def wait_alone(worker_id: str) -> None:
            with connect(job, worker_id) as ps:
                prepared(ps)
                both_in.wait()
                is_over.wait(WAIT_TIMEOUT_S)

        def step_alone(worker_id: str) -> None:
            with connect(job, worker_id, step_timeout_s=8.0) as ps:
                model, optimizer = prepared(ps)
                both_in.wait()
                write_nothing(job, is_full=True)
                wait_until(lambda: has_failed_to_write(job), "a refused write")
                model(torch.ones(1, 2)).sum().backward()
                with pytest.raises(psworker.StepTimeoutError) as caught:
                    optimizer.step()
                errors.append(str(caught.value))
                write_nothing(job, is_full=False)
                is_over.set()

        with Crew({"w0": step_alone, "w1": wait_alone}) as crew:
            for future in crew.futures.values():
                future.result(WAIT_TIMEOUT_S)
    (error,) = errors
    assert "waiting for room on the coordinator's disk, or its repair (" in error, error


def has_failed_to_write(job: Job) -> bool:
    """Whether the coordinator knows, of one whom it could not register."""
    with pytest.raises(psworker.PsError):
        connect(job, "w2", connect_timeout_s=0.1)
    return job.ask(lambda: bool(job.coordinator.core.writes.failure))


def write_nothing(job: Job, *, is_full: bool) -> None:
    """SQLite itself refuses every change, or takes them again."""
    word = "ON" if is_full else "OFF"
    job.ask(lambda: job.coordinator._store._db.execute(f"PRAGMA query_only={word}"))
