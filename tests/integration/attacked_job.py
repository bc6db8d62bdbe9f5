"""A job of processes with TLS that is attacked, and what each attacker can show.

The coordinator, two shards and two workers are processes of their own, and the test
says how far the workers train.
"""

import os
import signal
import ssl
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self, cast

import grpc
from typing_extensions import override

from psctl import tls
from psctl.check_history import check_history
from psserver.edge.access import ROLES
from pswire.channels import certified_name
from pswire.exit_codes import ExitCode
from pswire.limits import PROTOCOL_VERSION
from pswire.placement import place
from pswire.schema import OptimizerSpec
from pswire.security.credentials import TlsFiles
from pswire.security.roles import Role
from pswire.security.tokens import Metadata, metadata_of
from pswire.status_document import Document, status_document
from pswire.v1 import coordinator_service_pb2 as control
from psworker.optim.prepare import sort_objects
from tests.doubles.children import Nursery, wait_until
from tests.doubles.http2_client import Http2Client
from tests.doubles.job_tokens import JobTokens
from tests.doubles.made_certificates import SERVER, MadeCertificates
from tests.doubles.resident_memory import resident_of
from tests.fault.fault_job import own_log
from tests.integration import attacked_training
from tests.integration.forged_calls import CONTROL, WATCH, Forger
from tests.integration.hostile_table import LIMITS, TIMEOUT_S
from tests.integration.job import Job, connect, run_workers
from tests.integration.processes import Processes

SHARD_COUNT: Final = 2
WORKERS: Final = ("w0", "w1")
AHEAD_COUNT: Final = 50
"""Steps beyond the newest one seen, by which workers learn up to which they train."""


class Kind(StrEnum):
    """By what a job knows who calls."""

    CERTIFICATES = "certificates"
    TOKENS = "tokens"


class Attacker(StrEnum):
    """What whoever attacks can show."""

    ENTITLED = "entitled"
    """For each method a credential of the least role that may call it."""

    READER = "reader"
    STRANGER = "stranger"


class AttackedJob:
    """The processes. A context manager: leaving it in order ends the job and checks
    that it has trained as without any attack.

    Attributes:
        kind: By what it knows who calls.
        step_count: Steps that both workers have made.
    """

    def __init__(self, folder: Path, nursery: Nursery, kind: Kind) -> None:
        """Starts nothing yet.

        Args:
            folder: For all files of the job.
            nursery: Forks its processes.
            kind: By what it knows who calls.
        """
        self._folder = folder
        self.kind = kind
        self._processes = Processes(folder, nursery)
        self._certificates = MadeCertificates(folder / "certificates")
        tls.init(folder / "certificates", tls.subjects_of([], []), days=90)
        self._tokens = JobTokens(folder)
        self._allowed = folder / "allowed"
        self._history = folder / "history"
        self.step_count = 0
        self.coordinator_address = ""
        self._reader: grpc.Channel | None = None
        self._watches: list[object] = []

    def __enter__(self) -> Self:
        self._history.mkdir()
        self._allow("0")
        self._processes.__enter__()
        try:
            self._start()
        except BaseException as error:
            self._processes.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        try:
            if error is None:
                self._end()
        except BaseException as failure:
            failure.add_note(self._processes.logs())
            raise
        finally:
            if self._reader is not None:
                self._reader.close()
            self._processes.__exit__(kind, error, trace)

    # Training

    def train(self, count: int) -> None:
        """Has both workers train some steps, and waits for them."""
        self.step_count += count
        self._allow(str(self.step_count))
        self._wait_step()

    def release(self) -> None:
        """Lets them train until `hold`."""
        self._allow(str(1 << 30))

    def hold(self) -> None:
        """Has both stop at the same step."""
        newest = max(self._steps_of(name) for name in WORKERS)
        self.step_count = newest + AHEAD_COUNT
        self._allow(str(self.step_count))
        self._wait_step()

    def check_training(self) -> None:
        """Waits for a step that each worker makes from now on."""
        before = {name: self._steps_of(name) for name in WORKERS}

        def is_made() -> bool:
            self._processes.check_alive()
            return all(self._steps_of(name) > count for name, count in before.items())

        wait_until(is_made, "a step of both workers")

    def digest(self) -> str:
        """SHA-256 of the values after the last step, which both workers have."""
        found = {self._processes.lines(name)[-1].split()[1] for name in WORKERS}
        (one,) = found
        return one

    def status(self) -> Document:
        assert self._reader is not None
        call: Any = self._reader.unary_unary(CONTROL + "GetStatus")
        request = control.GetStatusRequest(protocol_version=PROTOCOL_VERSION)
        data = call(request.SerializeToString(), timeout=TIMEOUT_S)
        return status_document(
            control.GetStatusResponse.FromString(data), self.coordinator_address
        )

    def state(self) -> tuple[object, ...]:
        """What no attack may change, once shards have said where they stand."""
        found: list[Document] = []

        def is_settled() -> bool:
            try:
                found[:] = [self.status()]
            except grpc.RpcError as error:
                # Calls of an attacker that has gone may count for a moment longer.
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    return False
                raise
            return all(each["clock"] == self.step_count for each in found[0]["shards"])

        wait_until(is_settled, "the shards' word of the newest step")
        return (
            *self.lasting_state(found[0]),
            *(
                (w["worker_id"], w["clock"])
                for w in found[0]["workers"]
                if w["rank"] is not None
            ),
            *((s["shard_index"], s["clock"], s["version"]) for s in found[0]["shards"]),
        )

    def lasting_state(self, status: Document | None = None) -> tuple[object, ...]:
        """That of it which steps don't change either."""
        status = status or self.status()
        registered = [each for each in status["workers"] if each["rank"] is None]
        assert len(registered) <= LIMITS.registrations
        return (
            *(
                status[name]
                for name in (
                    *("job", "mode", "staleness_bound", "mode_clock", "phase"),
                    *("generation", "workers_floor", "evicted_count", "failure"),
                    *("splits", "epochs"),
                )
            ),
            (status["checkpoints"] or {}).get("newest"),
            *(
                tuple(
                    w[name]
                    for name in (
                        *("worker_id", "incarnation", "rank", "state"),
                        *("bad_gradient_count", "clipped_gradient_count"),
                        "left_out_gradient_count",
                    )
                )
                for w in status["workers"]
                if w["rank"] is not None
            ),
            *(
                (s["shard_index"], s["incarnation"], s["address"], s["torn_step_count"])
                for s in status["shards"]
            ),
        )

    def resident(self) -> dict[str, int]:
        """Bytes of memory of each process, all of which live."""
        found = {n: resident_of(p).own for n, p in self._processes.pids().items()}
        assert all(found.values()), f"have ended: {found}"
        return found

    # What attackers show

    def channel(self, address: str, role: Role | None) -> grpc.Channel:
        """A channel with a connection of its own, without a role a stranger's.

        It is never idle: daemons end a connection that is, perhaps as a call begins.
        """
        files, metadata = self._shown(role)
        assert files.ca is not None
        credentials = grpc.ssl_channel_credentials(
            files.ca.read_bytes(),
            None if files.key is None else files.key.read_bytes(),
            None if files.certificate is None else files.certificate.read_bytes(),
        )
        for _, token in metadata:
            credentials = grpc.composite_channel_credentials(
                credentials,
                grpc.access_token_call_credentials(token.removeprefix("Bearer ")),
            )
        made = grpc.secure_channel(
            certified_name(address),
            credentials,
            options=[("grpc.use_local_subchannel_pool", 1)],
        )
        if role is not None:
            watch: Any = made.unary_stream(WATCH)
            self._watches.append(watch(b""))
        return made

    def http2(self, address: str, role: Role | None, *, speaks: bool) -> Http2Client:
        """A connection that is spoken to in frames, or as a caller likes."""
        files, metadata = self._shown(role)
        context = ssl.create_default_context(cafile=files.ca)
        context.set_alpn_protocols(["h2"])
        if files.certificate is not None:
            context.load_cert_chain(files.certificate, files.key)
        return Http2Client(address, speaks=speaks, tls=context, headers=dict(metadata))

    def _shown(self, role: Role | None) -> tuple[TlsFiles, Metadata]:
        files = self._certificates.files("reader" if role is None else _FOLDERS[role])
        if role is None or self.kind is Kind.TOKENS:
            files = TlsFiles(ca=files.ca)
        if role is None or self.kind is Kind.CERTIFICATES:
            return files, ()
        return files, metadata_of(self._tokens.path(role.value).read_text())

    # Inside

    def _start(self) -> None:
        files = self._certificates.files(SERVER)
        options = [
            *(f"--tls-ca={files.ca}", f"--tls-key={files.key}"),
            *(f"--tls-cert={files.certificate}", f"--history={self._history}/"),
            *LIMITS.arguments(),
        ]
        of_shard: list[str] = []
        if self.kind is Kind.TOKENS:
            options.append(f"--tokens={self._tokens.store}")
            of_shard.append(f"--token-file={self._tokens.path(Role.SHARD.value)}")
        processes = self._processes
        processes.start_daemon(
            *("coordinator", "coordinator", "--listen=127.0.0.1:0"),
            "--admin-listen=127.0.0.1:0",
            *(f"--shards={SHARD_COUNT}", f"--min-workers={len(WORKERS)}"),
            f"--checkpoint-dir={self._folder / 'checkpoints'}",
            *options,
        )
        self.coordinator_address = processes.address("coordinator")
        for index in range(SHARD_COUNT):
            processes.start_daemon(
                *(f"shard-{index}", "shard", "--listen=127.0.0.1:0"),
                f"--coordinator={self.coordinator_address}",
                *(*options, *of_shard),
            )
        for number, name in enumerate(WORKERS):
            processes.start(
                *(name, "-m", "tests.integration.attacked_training"),
                *(str(number), str(self._allowed)),
                PS_COORDINATOR=self.coordinator_address,
                PS_WORKER_ID=name,
                PS_HISTORY=f"{self._history}/",
                **self._environment(name),
            )
        self._reader = self.channel(self.coordinator_address, Role.READER)
        self.train(1)

    def _environment(self, name: str) -> dict[str, str]:
        """What a worker proves itself with: a credential for it alone."""
        found = self._certificates.environment(f"worker-{name}")
        if self.kind is Kind.TOKENS:
            token = self._tokens.create(f"{name}.token", Role.WORKER, name)
            found = {"PS_TLS_CA": found["PS_TLS_CA"], "PS_TOKEN_FILE": str(token)}
        return found

    def _allow(self, what: str) -> None:
        new = self._allowed.with_suffix(".new")
        new.write_text(what)
        os.replace(new, self._allowed)

    def _steps_of(self, name: str) -> int:
        lines = self._processes.lines(name)
        return int(lines[-1].split()[0]) if lines else 0

    def _wait_step(self) -> None:
        def is_there() -> bool:
            self._processes.check_alive()
            return all(self._steps_of(name) == self.step_count for name in WORKERS)

        wait_until(is_there, f"step {self.step_count} of both workers")

    def _end(self) -> None:
        """Ends the job as its user would, and holds it to its promises."""
        self.train(1)
        trained = self.digest()
        self._allow(attacked_training.END)
        processes = self._processes
        for name in WORKERS:
            assert processes.code(name) == ExitCode.DONE
        daemons = [name for name in processes.pids() if name not in WORKERS]
        for name in reversed(daemons):
            processes.send(name, signal.SIGTERM)
        for name in daemons:
            assert processes.code(name) == ExitCode.DONE
        assert "Traceback" not in own_log(processes.logs())
        report = check_history([self._history])
        assert report.is_clean, report.findings.breaks
        assert trained == undisturbed(self._folder / "undisturbed", self.step_count)


_FOLDERS: Final = {
    Role.ADMIN: "admin",
    Role.SHARD: SERVER,
    Role.WORKER: "worker",
    Role.READER: "reader",
}


class AttackedTarget(Forger):
    """A job of processes, as one kind of attacker sees it."""

    def __init__(self, job: AttackedJob, attacker: Attacker) -> None:
        self._job = job
        self._attacker = attacker
        prepared = sort_objects(list(attacked_training.made()))
        placed = place(prepared.bound.schema, SHARD_COUNT)
        self.own, self.other = (each[0] for each in placed.chunks_by_shard)
        (self._spec,) = prepared.specs.values()
        status = job.status()
        self._job_id: str = status["job"]["job_id"]
        self._admin_url: str = status["admin_url"]
        shard = status["shards"][0]
        self._shard_incarnation: int = shard["incarnation"]
        self._shard_address: str = shard["address"]
        self._channels: list[RoleChannel] = []
        self.coordinator = self.opened(job.coordinator_address)
        self.channel = self.opened(self.shard_address)

    def close(self) -> None:
        for each in self._channels:
            each.close()

    @property
    @override
    def job_id(self) -> str:
        return self._job_id

    @property
    @override
    def shard_incarnation(self) -> int:
        return self._shard_incarnation

    @property
    @override
    def done(self) -> int:
        return self._job.step_count

    @property
    @override
    def optimizer(self) -> OptimizerSpec:
        return self._spec

    @property
    @override
    def coordinator_address(self) -> str:
        return self._job.coordinator_address

    @property
    @override
    def shard_address(self) -> str:
        return self._shard_address

    @property
    @override
    def admin_url(self) -> str:
        return self._admin_url

    @override
    def state(self) -> tuple[object, ...]:
        return self._job.state()

    @override
    def step(self) -> None:
        self._job.train(1)

    @override
    def opened(self, address: str) -> grpc.Channel:
        roles: Sequence[Role | None] = {
            Attacker.ENTITLED: _LEAST_FIRST,
            Attacker.READER: (Role.READER,),
            Attacker.STRANGER: (None,),
        }[self._attacker]
        made = RoleChannel(lambda role: self._job.channel(address, role), roles)
        self._channels.append(made)
        return cast("grpc.Channel", made)

    @override
    def http2(self, address: str, *, speaks: bool = True) -> Http2Client:
        role = {Attacker.ENTITLED: Role.WORKER, Attacker.READER: Role.READER}
        return self._job.http2(address, role.get(self._attacker), speaks=speaks)


_LEAST_FIRST: Final = (Role.READER, Role.WORKER, Role.SHARD, Role.ADMIN)


class RoleChannel:
    """A channel whose calls show a credential of the least role that may make them."""

    def __init__(
        self,
        open_channel: Callable[[Role | None], grpc.Channel],
        roles: Sequence[Role | None],
    ) -> None:
        """Opens nothing yet.

        Args:
            open_channel: Opens a channel of a role.
            roles: Those that it may have, the least first. If none of them may make a
                call, the first one is refused.
        """
        self._open = open_channel
        self._roles = roles
        self._channels: dict[Role | None, grpc.Channel] = {}

    def unary_stream(self, method: str, *options: Any) -> Any:  # noqa: ANN401
        return self._of(method).unary_stream(method, *options)

    def stream_stream(self, method: str, *options: Any) -> Any:  # noqa: ANN401
        return self._of(method).stream_stream(method, *options)

    def close(self) -> None:
        for each in self._channels.values():
            each.close()

    def _of(self, method: str) -> grpc.Channel:
        may = ROLES.get(method, frozenset())
        role = next((each for each in self._roles if each in may), self._roles[0])
        if role not in self._channels:
            self._channels[role] = self._open(role)
        return self._channels[role]


def undisturbed(folder: Path, step_count: int) -> str:
    """The values' SHA-256 after so many steps of a job that nobody attacks."""

    def work(name: str) -> str:
        with connect(job, name) as ps:
            objects = attacked_training.joined(ps)
            for number in range(1, step_count + 1):
                attacked_training.step(objects, WORKERS.index(name), number)
            return attacked_training.digest(objects)

    with Job(folder, workers_min=len(WORKERS)) as job:
        (one,) = {*run_workers(dict.fromkeys(WORKERS, work)).values()}
    return one
