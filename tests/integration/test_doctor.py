"""`psctl doctor` from a machine of a job, with each thing that may stand in the way."""

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from psctl.__main__ import app
from psctl.doctor import probes
from pswire.exit_codes import ExitCode
from pswire.security.roles import Role
from psworker.transport import status_client
from tests.doubles.free_addresses import free_address
from tests.doubles.job_tokens import JobTokens
from tests.doubles.made_certificates import SERVER, MadeCertificates
from tests.integration.job import Job

DOWN_S = 10.0
"""Longest time in which it says why a job is not reached, where nothing else takes
any."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def job(folder: Path) -> Iterator[Job]:
    with Job(folder, shard_count=2, sockets=True, tokens=JobTokens(folder)) as found:
        yield found


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a machine that is busy with other tests."""
    for name in ("NAME", "CONNECT", "HANDSHAKE", "ANSWER"):
        monkeypatch.setattr(probes, f"{name}_TIMEOUT_S", 30.0)
    monkeypatch.setattr(probes, "RATE_BUDGET_S", 30.0)


@pytest.fixture
def token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_TOKEN_FILE", str(folder / Role.WORKER.value))


def examined(
    address: object, *arguments: str, fails: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """What is found, by check; without torch, unless it is asked for."""
    line = ["doctor", "--coordinator", str(address), "--json", *arguments]
    if "torch" not in arguments:
        line += ["--skip", "torch"]
    done = CliRunner().invoke(app, line, catch_exceptions=False)
    assert done.exit_code == (ExitCode.ERROR if fails else ExitCode.DONE), done.output
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(done.stdout)["findings"]:
        found.setdefault(each["check"], []).append(each)
    return found


def cure_of(found: dict[str, list[dict[str, Any]]], check: str) -> str:
    """What the one problem of a check says."""
    (each,) = found[check]
    assert each["level"] == "problem", each
    return f"{each['seen']} -> {each['cure']}"


@pytest.mark.usefixtures("token")
def test_a_job_that_is_well_has_no_problem(job: Job) -> None:
    found = examined(job.address)
    levels = {each["level"] for some in found.values() for each in some}
    assert levels <= {"ok", "warning"}, found
    rates = found["throughput"]
    assert len(rates) == 2
    for each in rates:
        assert min(
            each["figures"][f"{way}_bytes_per_s"] for way in ("sent", "received")
        )
    (trip,) = found["round-trip"]
    assert 0 < trip["figures"]["median_ms"] <= trip["figures"]["max_ms"]
    (memory,) = found["shared-memory"]
    assert memory["figures"]["shards"] == [0, 1] or sys.platform != "linux"


@pytest.mark.usefixtures("token")
def test_text_names_each_check_and_what_to_do(job: Job) -> None:
    line = ["doctor", "--coordinator", job.address, "--skip=torch"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == ExitCode.DONE, done.output
    assert "ok       coordinator" in done.output
    assert done.output.splitlines()[-1].split()[1] == "ok,"


def test_a_job_that_asks_for_a_token_says_so(job: Job) -> None:
    found = examined(job.address, fails=True)
    assert "token" in cure_of(found, "coordinator")
    assert found["versions"][0]["level"] == "unknown"


@pytest.mark.usefixtures("token")
def test_another_version_of_the_protocol_is_told(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_client, "PROTOCOL_VERSION", 7)
    found = examined(job.address, fails=True)
    assert "speaks protocol 7" in cure_of(found, "coordinator")
    assert "same release" in cure_of(found, "coordinator")


def test_a_port_at_which_nothing_listens_is_told() -> None:
    found = examined(free_address(), fails=True)
    assert cure_of(found, "port").startswith("connection refused: nothing listens")


def test_a_name_that_does_not_resolve_is_told() -> None:
    found = examined("no-such-host.invalid:7070", fails=True)
    assert "'no-such-host.invalid' does not resolve" in cure_of(found, "name")
    assert found["port"][0]["level"] == "unknown"


@contextmanager
def silent() -> Iterator[str]:
    """A port that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_what_accepts_connections_and_is_silent_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # the times that a user waits
    times = (
        *(probes.NAME_TIMEOUT_S, probes.CONNECT_TIMEOUT_S, probes.ANSWER_TIMEOUT_S),
        *(2 * [probes.HANDSHAKE_TIMEOUT_S]),
    )
    assert sum(times) < DOWN_S
    with silent() as address:
        found = examined(address, fails=True)
    assert found["port"][0]["level"] == "ok"
    assert "gives no answer" in cure_of(found, "coordinator")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeCertificates:
    return MadeCertificates(tmp_path_factory.mktemp("certificates") / "job")


def use(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_tls_is_told_from_both_sides(
    job: Job, made: MadeCertificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Job(
        tmp_path, shard_count=1, sockets=True, credentials=made.credentials(SERVER)
    ) as secure:
        without = examined(secure.address, fails=True)
        assert "speaks TLS, and this process does not" in cure_of(without, "tls")
        use(monkeypatch, made.environment("reader"))
        (shown,) = examined(secure.address)["tls"]
        assert shown["level"] == "ok"
        assert "the server's certificate is for localhost" in shown["seen"]
        assert "does not speak TLS" in cure_of(examined(job.address, fails=True), "tls")


def test_credentials_that_can_not_be_read_are_a_finding() -> None:
    around = probes.Surroundings(None, environment={"PS_TLS_CA": "/no/such/file"})
    assert isinstance(around.certificates, ValueError)


def test_torch_is_looked_at_in_another_process() -> None:
    around = probes.Surroundings(None)
    around.start_torch()
    try:
        found = around.torch
    finally:
        around.close()
    assert not found.failure
    assert found.version
    assert found.thread_count > 0


def test_a_python_without_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_TORCH_SCRIPT", "import no_such_module")
    around = probes.Surroundings(None)
    around.start_torch()
    assert "no_such_module" in around.torch.failure
