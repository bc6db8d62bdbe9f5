import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import psworker
from psworker.errors import VersionMismatchError
from psworker.transport import control_client
from tests.doubles.fault_proxy import FaultProxy
from tests.doubles.free_addresses import free_address
from tests.integration.job import Job


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def connect_error(address: str, timeout_s: float = 1.0) -> str:
    began = time.monotonic()
    with pytest.raises(psworker.ConnectError) as caught:
        psworker.connect(address, connect_timeout_s=timeout_s)
    assert time.monotonic() - began < timeout_s + 10  # not as long as a call may take
    assert "psworker-loop" not in {each.name for each in threading.enumerate()}
    text = str(caught.value)
    assert text.startswith(
        f"cannot reach the coordinator at {address} within {timeout_s:g} s: "
    )
    return text


def test_a_port_where_nothing_listens_says_how_to_start_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        address = address_of(taken)
        text = connect_error(address, 0.3)

    assert "connection refused - nothing listens there" in text
    assert f"psserver coordinator --listen {address}" in text


def test_a_name_that_does_not_resolve_is_named() -> None:
    assert "'no-such-host.invalid' does not resolve" in connect_error(
        "no-such-host.invalid:7000", 0.3
    )


def test_a_listener_that_never_answers_is_not_a_coordinator(
    listener: socket.socket,
) -> None:
    text = connect_error(address_of(listener))

    assert "does not answer as a paramserver coordinator" in text


def test_another_programs_port_is_not_a_coordinator(listener: socket.socket) -> None:
    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # the test is over
            with client:
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()

    text = connect_error(address_of(listener))

    assert "is it the port of another program?" in text


def test_a_host_that_swallows_packets_is_told_apart() -> None:
    with socket.socket() as full:
        # A listener whose queue is full drops what comes, as a firewall does.
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = address_of(full)
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(full.getsockname())

            text = connect_error(address, 0.5)
        finally:
            for filler in fillers:
                filler.close()

    assert "no answer at all" in text


def test_a_shard_is_no_coordinator(tmp_path: Path) -> None:
    with Job(tmp_path / "state", shard_count=1, sockets=True) as job:
        text = connect_error(job.shard_addresses()[0], 30.0)

    assert "it is not a paramserver coordinator" in text


def test_another_version_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "PROTOCOL_VERSION", 99)

    with (
        Job(tmp_path / "state", shard_count=1, sockets=True) as job,
        pytest.raises(VersionMismatchError, match="same release on both sides"),
    ):
        psworker.connect(job.address)


def test_a_coordinator_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    port = free_address().port
    connected: list[str] = []

    def connect() -> None:
        with psworker.connect(
            f"127.0.0.1:{port}", worker_id="early", connect_timeout_s=60
        ) as ps:
            connected.append(ps.worker_id)

    early = threading.Thread(target=connect)
    early.start()
    with Job(tmp_path / "state", shard_count=1, port=port):
        early.join(60)

    assert connected == ["early"]


def test_a_worker_id_of_a_living_process_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Job(tmp_path / "state", shard_count=1, lease_ttl_ms=4000, sockets=True) as job,
        FaultProxy(job.address) as proxy,
        psworker.connect(job.address, worker_id="w0"),
    ):
        # So the answer to the last attempt comes after the end of the wait.
        proxy.slow(delay_s=0.03)
        began = time.monotonic()
        with pytest.raises(psworker.WorkerIdTakenError, match="another worker id"):
            psworker.connect(proxy.address, worker_id="w0", connect_timeout_s=4)
    # Until a lease is over nobody knows whether the other one is alive.
    assert 4 < time.monotonic() - began < 60
    assert "worker id 'w0' belongs to a process at" in caplog.text
    assert "waiting for it to be gone, at most" in caplog.text


def test_a_worker_id_is_free_once_its_process_is_known_as_lost(tmp_path: Path) -> None:
    with (
        Job(tmp_path, shard_count=1, sockets=True, lease_ttl_ms=60_000) as job,
        FaultProxy(job.address) as proxy,
    ):
        first = psworker.connect(proxy.address, worker_id="w0")
        model = nn.Linear(2, 1)
        first.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        proxy.refuse()

        # Long before a lease is over.
        with psworker.connect(job.address, worker_id="w0", connect_timeout_s=20) as ps:
            assert ps.worker_id == "w0"
        first.close()
