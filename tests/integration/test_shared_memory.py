"""Jobs on one machine with tensors in shared memory: the same numbers as over gRPC."""

import os
import re
import secrets
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import torch
from torch import nn

from psserver.shard.host.hosted_members import HostedMembers
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import Mode, WorkerKey
from pswire.shared_memory.handshake import TOKEN_BYTES, Answer, Offer, address_of
from pswire.shared_memory.segments import (
    GradientLayout,
    MemorySegment,
    SegmentError,
    SegmentKind,
    boot_id,
)
from pswire.v1 import (
    membership_pb2,
    parameter_service_pb2,
    parameter_service_pb2_grpc,
)
from psworker.transport import shard_segments
from psworker.transport.shard_segments import ShardSegments
from tests.doubles.children import Nursery
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.fault_proxy import FaultProxy
from tests.integration.job import WAIT_TIMEOUT_S, Job, connect, key, run_workers
from tests.integration.ones_worker import Worker, run_all
from tests.integration.processes import Processes

pytestmark = pytest.mark.skipif(not boot_id(), reason="Linux only")

STEP_COUNT: Final = 12
SEED: Final = 20261128


small_chunks = cut_into(64, 256, autouse=False)


@pytest.fixture
def all_shared(monkeypatch: pytest.MonkeyPatch, small_chunks: None) -> None:
    """Chunks of any size go through shared memory."""
    monkeypatch.setattr("pswire.shared_memory.segments.SHARED_BYTES_MIN", 0)


class Net(nn.Module):
    """Parameters of two types, one frozen, one without a gradient in every other step,
    and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.first = nn.Linear(7, 33)
        self.norm = nn.BatchNorm1d(33)
        self.narrow = nn.Parameter(torch.randn(33, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(33), requires_grad=False)
        self.second = nn.Linear(33, 5)
        self.rare = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, *, is_rare: bool) -> torch.Tensor:
        x = self.norm(self.first(x)) * self.narrow.float() + self.frozen
        x = self.second(x)
        return self.rare(x) if is_rare else x


def train(
    job: Job,
    worker_id: str,
    *,
    net: Net,
    **options: Any,  # noqa: ANN401
) -> list[torch.Tensor]:
    optimizer = torch.optim.Adam(
        [p for p in net.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1
    )
    generator = torch.Generator().manual_seed(int(worker_id[1:]))
    with connect(job, worker_id) as ps:
        model, optimizer = ps.prepare(net, optimizer, **options)
        for step in range(STEP_COUNT):
            optimizer.zero_grad()
            x = torch.randn(6, 7, generator=generator)
            model(x, is_rare=step % 2 == 1).square().mean().backward()
            optimizer.step()
        if options.get("overlap"):
            ps.wait()
        return [each.detach().clone() for each in model.state_dict().values()]


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each chunk of a gradient: whether it went through shared memory."""
    seen: list[bool] = []
    encode = ShardSegments.encode

    def counted(*arguments: Any) -> bytes | None:  # noqa: ANN401
        message = encode(*arguments)
        seen.append(message is not None)
        return message

    def counted_ahead(*arguments: Any) -> bytes:  # noqa: ANN401
        seen.append(True)
        return message(*arguments)

    message = ShardSegments.message
    monkeypatch.setattr(ShardSegments, "encode", counted)
    monkeypatch.setattr(ShardSegments, "message", counted_ahead)
    return seen


@pytest.mark.usefixtures("all_shared")
@pytest.mark.parametrize(
    ("mode", "worker_count"),
    [
        (Mode.BSP, 2),
        pytest.param(Mode.SSP, 1, marks=pytest.mark.repeat),
        (Mode.ASP, 1),
    ],
)
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["plain", "overlap"])
def test_the_numbers_are_those_of_messages(
    tmp_path: Path,
    mode: Mode,
    worker_count: int,
    options: dict[str, Any],
    references: list[bool],
) -> None:
    results = []
    for shares_memory in (True, False):
        with Job(
            tmp_path / str(shares_memory),
            workers_min=worker_count,
            mode=mode,
            shares_memory=shares_memory,
        ) as job:
            # Before threads are there, which share torch's seed.
            nets = {f"w{rank}": Net() for rank in range(worker_count)}
            works = {name: partial(train, job, net=net) for name, net in nets.items()}
            found = run_workers(
                {name: partial(work, **options) for name, work in works.items()}
            )
            results.append(found["w0"])
            chunk_count = job.ask(lambda: len(job.shards[0].model.placement.chunks))
            wait_shared(job, set())  # all have left
        if shares_memory:
            assert len(references) >= (chunk_count - 1) * STEP_COUNT * worker_count // 2
            assert all(references)
            references.clear()

    assert not references
    for shared, sent in zip(*results, strict=True):
        assert torch.equal(shared, sent)


@pytest.mark.usefixtures("all_shared")
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        (Mode.SSP, {"staleness_bound": 1}),
        (Mode.ASP, {}),
        (Mode.ASP, {"delay_compensation": 0.1}),
    ],
)
def test_values_of_two_workers_at_once_are_never_mixed(
    tmp_path: Path, mode: Mode, settings: dict[str, Any]
) -> None:
    """Every update adds one everywhere: a torn chunk has elements that differ."""
    with Job(tmp_path, workers_min=2, mode=mode, **settings) as job:

        def work(worker_id: str) -> None:
            worker = Worker.of(job, worker_id, element_count=2_000)
            with worker.ps:
                for _ in range(30):
                    worker.step()
                    values = worker.model[1].detach().view(-1)  # type: ignore[index]
                    for chunk in values.split(8):
                        if not settings.get("delay_compensation"):
                            assert chunk.unique().numel() == 1

        run_workers({"w0": work, "w1": work})
        assert job.step_counts(1) == {60}


def test_an_evicted_worker_joins_with_new_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pswire.shared_memory.segments.SHARED_BYTES_MIN", 0)
    with (
        Job(tmp_path, sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):
        other = Worker.of(job, "w1", step_timeout_s=40)
        worker = Worker.of(job, "w0", address=proxy.address, step_timeout_s=40)
        with other.ps, worker.ps:
            proxy.refuse()
            job.wait_record(
                lambda record: {m.worker for m in record.members} == {key("w1")}
            )
            wait_shared(job, {key("w1")})
            proxy.heal()

            assert worker.step().rejoined
            run_all(worker.step, other.step)

            wait_shared(job, {key("w0", 2), key("w1")})
            assert worker.value == other.value == -1


def lose_segments(members: HostedMembers) -> None:
    for member in members:
        member.segments = None


@pytest.mark.usefixtures("all_shared")
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["plain", "overlap"])
def test_a_shard_that_lost_a_segment_gets_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    with Job(tmp_path, shard_count=2) as job:
        nets = [Net(), Net()]
        members = job.shards[1].members
        optimizer = torch.optim.SGD(nets[0].first.parameters(), lr=0.5)
        with connect(job, "w0") as ps:
            model, optimizer = ps.prepare(nets[0], optimizer, **options)
            for step in range(4):
                if step == 2:
                    job.ask(lambda: lose_segments(members))
                for each in model.first.parameters():
                    each.grad = torch.ones_like(each)
                optimizer.step()
            if options:
                ps.wait()
        for mine, plain in zip(
            model.first.parameters(), nets[1].first.parameters(), strict=True
        ):
            assert torch.allclose(mine, plain - 2.0)

    (line,) = [text for level, text in log_lines(caplog) if level == "WARNING"]
    assert line.startswith("tensors go over gRPC to shard 1 from now on: chunk ")


def wait_shared(job: Job, wanted: set[WorkerKey]) -> None:
    """Returns once every shard shares memory with these workers and no others."""
    for host in job.shards:
        reached = job.run(
            host.changes.wait_until(
                lambda host=host: set(host.members.sharing) == wanted,  # type: ignore[misc]
                WAIT_TIMEOUT_S / 2,
            )
        )
        assert reached, host.members.sharing


def log_lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """What workers have said of how tensors travel."""
    return [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == "psworker" and "tensors go" in record.getMessage()
    ]


def step_once(job: Job) -> None:
    worker = Worker.of(job, "w0", element_count=100_000)
    with worker.ps:
        worker.step()
        assert worker.value == -1


def test_a_shard_that_shares_none_is_served_over_grpc(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "psworker")
    with Job(tmp_path, shares_memory=False) as job:
        step_once(job)

    assert log_lines(caplog) == [
        (
            "INFO",
            "tensors go over gRPC to shard 0, 1: it is switched off there, or its "
            "system lacks it",
        )
    ]


def test_a_job_that_compresses_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "psworker")
    with Job(tmp_path, shares_memory=True) as job:
        worker = Worker.of(job, "w0", element_count=100_000, compression="bf16")
        with worker.ps:
            worker.step()
            assert worker.ps.is_leader

    ((_, line),) = log_lines(caplog)
    assert line == (
        "tensors go over gRPC to shard 0, 1: the job compresses what is sent"
    )


def test_it_is_switched_off_at_a_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "psworker")
    monkeypatch.setenv("PS_SHARED_MEMORY", "0")
    with Job(tmp_path, shares_memory=True) as job:
        step_once(job)

    assert log_lines(caplog) == [
        ("INFO", "tensors go over gRPC to shard 0, 1: it is switched off here")
    ]


def test_a_worker_on_another_machine_goes_over_grpc(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "psworker")
    monkeypatch.setattr("psworker.transport.shard_client.boot_id", lambda: "another")
    with Job(tmp_path) as job:
        step_once(job)

    assert log_lines(caplog) == [
        ("INFO", "tensors go over gRPC to shard 0, 1: it runs on another machine")
    ]


def test_another_user_on_this_machine_goes_over_grpc(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "psworker")
    mine = os.geteuid()
    monkeypatch.setattr("pswire.shared_memory.handshake.os.geteuid", lambda: mine + 1)
    with Job(tmp_path) as job:
        step_once(job)

    ((level, text),) = log_lines(caplog)
    assert level == "WARNING"
    assert text == (
        "tensors go over gRPC to shard 0, 1: it is on this machine, but the other "
        f"process is of user {mine}, this one of user {mine + 1}"
    )


def test_a_process_that_sees_other_sockets_goes_over_grpc(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another container of the machine, which has a network of its own."""
    caplog.set_level("INFO", "psworker")
    connected = shard_segments._connected
    monkeypatch.setattr(
        shard_segments, "_connected", lambda name: connected(f"{name}-elsewhere")
    )
    with Job(tmp_path) as job:
        step_once(job)

    assert log_lines(caplog) == [
        (
            "WARNING",
            "tensors go over gRPC to shard 0, 1: it is on this machine, but this "
            "process does not see its socket, as from another container",
        )
    ]


def offered(name: str, token: bytes, byte_count: int) -> Answer:
    segment = MemorySegment.create(SegmentKind.GRADIENT, byte_count)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(10)
        peer.connect(address_of(name))
        Offer(token, segment.header, segment.descriptor).send(peer)
        return Answer.receive(peer)


def test_hostile_offers_change_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=1) as job:
        worker = Worker.of(job, "w0", element_count=100_000)
        with worker.ps:
            worker.step()
            (host,) = job.shards
            name, placement = job.ask(
                lambda: (host.shared.socket_name, host.model.placement)
            )
            size = GradientLayout.of(placement, 0).byte_count
            token = secrets.token_bytes(TOKEN_BYTES)

            with pytest.raises(SegmentError, match="this token was not told, or too"):
                offered(name, token, size)
            job.ask(lambda: host.shared.expect(token, key("w0"), placement, 0))
            with pytest.raises(
                SegmentError,
                match=f"a gradient segment of this shard has {size} bytes, 8192 were",
            ):
                offered(name, token, 8192)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(10)
                peer.connect(address_of(name))
                peer.send(b"nonsense")
                with pytest.raises(SegmentError, match="of 8 bytes is malformed"):
                    Answer.receive(peer)

            worker.step()
            assert worker.value == -2


@pytest.mark.usefixtures("all_shared")
@pytest.mark.parametrize("mode", [Mode.BSP, Mode.ASP])
def test_values_that_change_too_often_are_asked_for(
    tmp_path: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardSegments, "_write_whole", lambda *_: False)
    with Job(tmp_path, mode=mode) as job:
        worker = Worker.of(job, "w0")
        with worker.ps:
            for _ in range(3):
                assert worker.step().staleness == 0

            assert worker.value == -3


def test_only_members_are_told_where_to_hand_over(tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=1, sockets=True) as job:
        worker = Worker.of(job, "w0")
        with worker.ps, grpc.insecure_channel(job.shard_addresses()[0]) as channel:
            ask = parameter_service_pb2_grpc.ParameterServiceStub(channel).OpenSegments
            request = parameter_service_pb2.OpenSegmentsRequest(
                protocol_version=PROTOCOL_VERSION,
                job_id=job.shards[0].job_id,
                worker=membership_pb2.WorkerIdentity(worker_id="w0", incarnation=1),
                shard_incarnation=1,
                boot_id=boot_id(),
            )
            assert ask(request, timeout=10).token
            request.worker.incarnation = 2
            with pytest.raises(grpc.RpcError, match="w0/2 is no member, and shares no"):
                ask(request, timeout=10)
            request.worker.incarnation = 1
            request.boot_id = ""
            response = ask(request, timeout=10)
            assert response.declined == "it runs on another machine"
            assert not response.token


WORKER: Final = """
import os, sys, torch, psworker
model = torch.nn.ParameterList([torch.zeros(1_000_000)])
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with psworker.connect(
    connect_timeout_s=60, step_timeout_s=60, start_timeout_s=60
) as ps:
    model, optimizer = ps.prepare(model, optimizer)
    maps = open("/proc/self/maps").read()
    print(os.getpid(), maps.count("memfd:paramserver-"), flush=True)
    while True:
        model[0].grad = torch.ones(1_000_000)
        optimizer.step()
        assert model[0].unique().numel() == 1
        print("clock", ps.clock, flush=True)
"""


def assert_nothing_has_a_name(processes: Processes) -> None:
    """Memory without a name ends with the last process that has it."""
    for name, pid in processes.pids().items():
        assert "/dev/shm/" not in Path(f"/proc/{pid}/maps").read_text(), name


def test_nothing_is_left_of_processes_that_are_killed(
    tmp_path: Path, nursery: Nursery
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    with Processes(tmp_path, nursery) as processes:
        processes.start_daemon(
            "coordinator",
            *("coordinator", "--listen=127.0.0.1:0", "--shards=1"),
        )
        address = processes.address("coordinator")
        processes.start_daemon(
            "shard", "shard", f"--coordinator={address}", "--listen=127.0.0.1:0"
        )
        for name in ("w0", "w1"):
            named = {"PS_COORDINATOR": address, "PS_WORKER_ID": name}
            processes.start(name, str(script), **named)
        for name in ("w0", "w1"):
            assert processes.line(name).split()[1] == "2"
            processes.line(name)
        assert_nothing_has_a_name(processes)

        processes.send("w1", signal.SIGKILL)
        processes.code("w1")

        clock = int(processes.line("w0").split()[1])
        while int(processes.line("w0").split()[1]) < clock + 20:
            pass  # goes on without
        processes.send("shard", signal.SIGKILL)
        processes.code("shard")
        assert not re.search(r"SIGBUS|Bus error|Segmentation", processes.logs())
