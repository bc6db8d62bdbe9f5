"""What the checks look at: this machine, and a job as this machine sees it.

Probes look and decide nothing. Each is made when a check first needs it, needs no right
that training does not, and has a bound on its time.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pswire.addresses import Address, parse_address
from pswire.names import shown_url
from pswire.security.certificates import Certificates, certificates_of
from pswire.security.credentials import Credentials, CredentialsError
from pswire.security.tls_problem import (
    ShownCertificate,
    handshake_problem,
    shown_certificate,
)
from psworker.launch.cores import usable_core_count
from psworker.launch.reachability import Problem, problem_reaching, resolved
from psworker.transport.calls import CallError
from psworker.transport.probe_client import Probed, probing
from psworker.transport.status_client import fetch_document

NAME_TIMEOUT_S: Final = 3.0
CONNECT_TIMEOUT_S: Final = 2.0
HANDSHAKE_TIMEOUT_S: Final = 1.0
ANSWER_TIMEOUT_S: Final = 2.0
"""So that a job that is down is known to be in less than ten seconds, and why."""

TORCH_TIMEOUT_S: Final = 60.0
"""For importing torch and looking for devices, from a slow file system too."""

ROUND_TRIP_COUNT: Final = 15
SHARD_COUNT_MAX: Final = 256
"""Shards that are called, all at once."""

MEASURED_SHARD_COUNT: Final = 4
"""Shards to which the rate is measured, one after the other."""

RATE_BUDGET_S: Final = 1.0
"""Longest time in which bytes are sent and asked for, of all shards together."""

SHARED_FOLDER: Final = "/dev/shm"

PROXY_VARIABLES: Final = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")

_TORCH_SCRIPT: Final = """
import json, torch
found = {"version": torch.__version__, "threads": torch.get_num_threads(),
         "built_for": torch.version.cuda or torch.version.hip, "devices": [], "why": ""}
if torch.cuda.is_available():
    found["devices"] = [torch.cuda.get_device_name(n)
                        for n in range(torch.cuda.device_count())]
elif found["built_for"]:
    try:
        torch.cuda.init()
    except Exception as error:
        found["why"] = str(error).strip().splitlines()[0]
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class TorchSeen:
    """What a process that imports torch has seen.

    Attributes:
        failure: Why there is nothing of it; else empty.
        version: Of torch.
        thread_count: Threads that one process computes with.
        built_for: Version of CUDA or ROCm that it was built for, None for none.
        devices: Names of those it can use.
        why_no_device: Why it can use none; empty where that is not known.
    """

    failure: str = ""
    version: str = ""
    thread_count: int = 0
    built_for: str | None = None
    devices: tuple[str, ...] = ()
    why_no_device: str = ""


@dataclass(frozen=True, slots=True)
class Cores:
    """What this process may compute with.

    Attributes:
        count: Cores that it may run on.
        quota: Cores' worth of time that its control group has, None for no limit.
        load: Processes that have run or waited to, lately.
        thread_setting: `OMP_NUM_THREADS`, empty where it is not set.
    """

    count: int
    quota: float | None
    load: float
    thread_setting: str


@dataclass(frozen=True, slots=True)
class Room:
    """Room of a file system.

    Attributes:
        folder: Where.
        purpose: What is written there.
        free_bytes: For this user; None where there is no such folder.
        total_bytes: Of the file system.
        free_files: Files that can be made; None where that is not counted.
        is_writable: Whether this user may write there.
    """

    folder: str
    purpose: str
    free_bytes: int | None
    total_bytes: int = 0
    free_files: int | None = None
    is_writable: bool = False


@dataclass(frozen=True, slots=True)
class SeenShard:
    """A shard as this machine sees it.

    Attributes:
        index: Its place in the job.
        state: As the coordinator has it.
        address: That it has told others to call.
        probed: What it says of itself, None without an answer.
        failure: Why there is no answer.
        sent_bytes_per_s: Rate to it, None where it was not measured.
        received_bytes_per_s: Rate from it.
        rate_failure: Why a rate was not measured.
    """

    index: int
    state: str
    address: str | None
    probed: Probed | None = None
    failure: str = ""
    sent_bytes_per_s: float | None = None
    received_bytes_per_s: float | None = None
    rate_failure: str = ""


@dataclass(frozen=True, slots=True)
class SeenJob:
    """A job whose coordinator answers.

    Attributes:
        document: Its status, as of `psctl status --json`.
        probed: What the coordinator says of itself; None for one of another release.
        round_trips_s: Times of small calls to the coordinator.
        shards: Its shards.
    """

    document: Mapping[str, Any]
    probed: Probed | None
    round_trips_s: tuple[float, ...]
    shards: tuple[SeenShard, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a coordinator that is there tells nothing.

    Attributes:
        code: Name of the gRPC status, such as `UNAUTHENTICATED`.
        text: What it says.
    """

    code: str
    text: str


class Surroundings:
    """What a doctor looks at. Each probe is made once, when it is first asked for."""

    def __init__(
        self,
        coordinator: Address | None,
        *,
        state_folders: Sequence[Path] = (),
        checkpoint_url: str | None = None,
        worker_count: int | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Looks at nothing yet.

        Args:
            coordinator: Of the job, None for this machine alone.
            state_folders: Where daemons of this machine keep state.
            checkpoint_url: Where checkpoints are, None for where the job says.
            worker_count: Workers that run here, or will; None for those that the job
                has here.
            environment: Variables of this process.
        """
        self.coordinator = coordinator
        self.environment = environment
        self.worker_count = worker_count
        self._state_folders = state_folders
        self._checkpoint_url = checkpoint_url
        self._torch_process: subprocess.Popen[str] | None = None

    # The way to the job

    @cached_property
    def addresses(self) -> tuple[str, ...] | Problem:
        """What the coordinator's name stands for."""
        return resolved(self._target, NAME_TIMEOUT_S)

    @cached_property
    def port_problem(self) -> Problem | None:
        """Why the port takes no connection."""
        if isinstance(self.addresses, Problem):
            return self.addresses
        return problem_reaching(self._target, CONNECT_TIMEOUT_S)

    @cached_property
    def certificates(self) -> Certificates | CredentialsError | None:
        """Those of this process; None where it has none, and an error as a value."""
        try:
            return certificates_of(Credentials.from_environment(self.environment))
        except CredentialsError as error:
            return error

    @cached_property
    def handshake(self) -> ShownCertificate | str | None:
        """The server's certificate, why there is no connection, or None without TLS."""
        own = self.certificates
        if self.port_problem is not None or isinstance(own, CredentialsError):
            return None
        text = handshake_problem(self._target, own, HANDSHAKE_TIMEOUT_S)
        if text or own is None:
            return text or None
        return shown_certificate(self._target, own, HANDSHAKE_TIMEOUT_S)

    @cached_property
    def job(self) -> SeenJob | Refused | None:
        """The job, why it tells nothing, or None where it was not reached."""
        if (
            self.coordinator is None
            or self.port_problem is not None
            or isinstance(self.certificates, CredentialsError)
            or isinstance(self.handshake, str)
        ):
            return None
        return asyncio.run(_seen_job(self.coordinator))

    @property
    def _target(self) -> Address:
        assert self.coordinator is not None, "checks of a job are for one"
        return self.coordinator

    # This machine

    @cached_property
    def proxies(self) -> dict[str, str]:
        """Variables that name a proxy, in small letters or capitals."""
        names = [each for name in PROXY_VARIABLES for each in (name, name.upper())]
        given = {n: url for n in names if (url := self.environment.get(n))}
        return {
            name: shown_url(url if "://" in url else f"http://{url}")
            for name, url in given.items()
        }

    def start_torch(self) -> None:
        """Starts looking at torch, which takes seconds, in a process of its own."""
        self._torch_process = subprocess.Popen(
            [sys.executable, "-c", _TORCH_SCRIPT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """Ends a look at torch that nobody waits for any more."""
        if self._torch_process is not None:
            self._torch_process.kill()
            self._torch_process.communicate()
            self._torch_process = None

    @cached_property
    def torch(self) -> TorchSeen:
        """What a process has seen that imports torch; nothing if none was started."""
        process, self._torch_process = self._torch_process, None
        if process is None:
            return TorchSeen()
        try:
            output, errors = process.communicate(timeout=TORCH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return TorchSeen(failure=f"importing it takes over {TORCH_TIMEOUT_S:g} s")
        if process.returncode != 0:
            said = errors.strip().splitlines() or [f"exit code {process.returncode}"]
            return TorchSeen(failure=said[-1])
        found = json.loads(output.strip().splitlines()[-1])
        return TorchSeen(
            version=found["version"],
            thread_count=found["threads"],
            built_for=found["built_for"],
            devices=tuple(found["devices"]),
            why_no_device=found["why"],
        )

    @property
    def has_gpu_files(self) -> bool:
        """Whether the system has devices of NVIDIA, as containers must be given."""
        return Path("/dev/nvidiactl").exists()

    @cached_property
    def cores(self) -> Cores:
        return Cores(
            usable_core_count(),
            cpu_quota(),
            os.getloadavg()[0],
            self.environment.get("OMP_NUM_THREADS", ""),
        )

    @cached_property
    def rooms(self) -> tuple[Room, ...]:
        """Folders that are written to, of those that are on this machine."""
        wanted = [(str(each), "state of daemons") for each in self._state_folders]
        url = self._checkpoint_url
        if url is None and isinstance(self.job, SeenJob):
            url = (self.job.document["checkpoints"] or {}).get("url")
        path = None if url is None else local_path(url)
        # That of a job may be on the coordinator's machine alone.
        if path is not None and (self._checkpoint_url or os.path.isdir(path)):
            wanted.append((path, "checkpoints"))
        wanted.append((tempfile.gettempdir(), "temporary files"))
        return tuple(room_of(path, purpose) for path, purpose in wanted)

    @cached_property
    def shared_folder(self) -> Room:
        """Memory for files, which the processes of torch's loaders hand samples in."""
        purpose = "shared memory of loader processes"
        if not os.path.isdir(SHARED_FOLDER):
            return Room(SHARED_FOLDER, purpose, None)
        return room_of(SHARED_FOLDER, purpose)

    @cached_property
    def descriptors(self) -> tuple[int, int]:
        """The soft and the hard limit of file descriptors; -1 is none."""
        import resource

        return resource.getrlimit(resource.RLIMIT_NOFILE)


async def _seen_job(coordinator: Address) -> SeenJob | Refused:
    address = str(coordinator)
    try:
        document = await fetch_document(address, timeout_s=ANSWER_TIMEOUT_S)
    except CallError as error:
        text = error.text if error.refusal is None else str(error.to_ps_error())
        reason = "" if error.refusal is None else error.refusal.reason.name
        return Refused(reason or error.code, text)
    probed, round_trips = None, []
    async with probing(address, "the coordinator") as client:
        try:
            for _ in range(ROUND_TRIP_COUNT):
                probed = await client.ask(ANSWER_TIMEOUT_S)
                round_trips.append(probed.taken_s)
        except CallError:
            probed = None  # of a release that has no such call
    listed = document["shards"][:SHARD_COUNT_MAX]
    seen = await asyncio.gather(*map(_seen_shard, listed))
    deadline = time.monotonic() + RATE_BUDGET_S
    measured = [
        await _measured(shard, deadline) if shard.probed is not None else shard
        for shard in seen[:MEASURED_SHARD_COUNT]
    ]
    # The first call of a connection makes it, too.
    return SeenJob(
        document,
        probed,
        tuple(round_trips[1:]),
        (*measured, *seen[MEASURED_SHARD_COUNT:]),
    )


async def _seen_shard(listed: Mapping[str, Any]) -> SeenShard:
    seen = SeenShard(listed["shard_index"], listed["state"], listed["address"])
    if seen.address is None:
        return seen
    try:
        target = parse_address(seen.address)
    except ValueError as error:
        return replace(seen, failure=str(error))
    if problem := await asyncio.to_thread(problem_reaching, target, CONNECT_TIMEOUT_S):
        return replace(seen, failure=problem.text)
    try:
        async with probing(seen.address, f"shard {seen.index}") as client:
            return replace(seen, probed=await client.ask(ANSWER_TIMEOUT_S))
    except CallError as error:
        return replace(seen, failure=error.text)


async def _measured(shard: SeenShard, deadline: float) -> SeenShard:
    """A shard with the rates to and from it. Training goes on beside that."""
    assert shard.address is not None, "it has answered"
    sent = None
    async with probing(shard.address, f"shard {shard.index}") as client:
        try:
            await client.ask(ANSWER_TIMEOUT_S)  # which opens the connection
            if (left_s := deadline - time.monotonic()) <= 0:
                return shard
            sent = await client.sent_bytes_per_s(left_s)
            received = await client.received_bytes_per_s(deadline - time.monotonic())
        except CallError as error:
            return replace(shard, sent_bytes_per_s=sent, rate_failure=error.text)
    return replace(shard, sent_bytes_per_s=sent, received_bytes_per_s=received)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the control groups of this process leave it.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files

    Args:
        root: Where the kernel's files are.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text()
    except OSError:
        return None
    own = next((g[3:] for g in groups.splitlines() if g.startswith("0::")), "/")
    folder, found = root / "sys/fs/cgroup" / own.lstrip("/"), []
    while folder.is_relative_to(root / "sys/fs/cgroup"):
        try:
            limit, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            pass  # the root group has none
        else:
            if limit != "max":
                found.append(int(limit) / int(period))
        folder = folder.parent
    return min(found, default=None)


def local_path(url: str) -> str | None:
    """The path that a URL of checkpoints names, None for another store."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file", "local"):
        return parts.path or None
    return None


def room_of(folder: str, purpose: str) -> Room:
    """Looks at a folder, or at what a folder that is not there yet will be in."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    try:
        usage, files = shutil.disk_usage(path), os.statvfs(path)
    except OSError:
        return Room(folder, purpose, None)
    return Room(
        folder,
        purpose,
        usage.free,
        usage.total,
        files.f_favail if files.f_files else None,
        os.access(path, os.W_OK | os.X_OK),
    )
