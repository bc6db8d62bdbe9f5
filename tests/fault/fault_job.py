"""A job of real processes that faults are done to, and what must be true at its end."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from psctl.check_history import check_history
from psctl.mode import set_mode, terms_given
from psctl.status import read_document
from pswire.membership import Mode
from pswire.status_document import Document
from psworker import SnapshotReader
from psworker.errors import PsError
from tests.doubles.children import Child, Nursery, kill, wait_until
from tests.doubles.fault_proxy import FaultProxy
from tests.doubles.free_addresses import free_address
from tests.fault import ledger
from tests.fault.tally import Tally

if TYPE_CHECKING:
    import torch

LEASE_S: Final = 2.0
PATIENT_S: Final = 10.0
"""A lease for jobs that are to lose nobody: of a shorter one a coordinator takes out
whom a busy machine gives no time for a third of it."""

STEP_S: Final = 0.01


def members_of(status: Document) -> dict[str, Document]:
    """Members of a job by their ids."""
    return {w["worker_id"]: w for w in status["workers"] if w["rank"] is not None}


class FaultJob:
    """A coordinator, shards and workers. A context manager: leaving it in order ends
    the job and checks everything that it has promised.

    Attributes:
        address: Of the coordinator, the same over its restarts.
        workers: All worker processes that were ever started, by name.
        values: Of its last snapshot, once it has ended in order.
        proxies: Before each shard, where there is one.
    """

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        tally: Tally,
        *,
        options: tuple[str, ...] = (),
        shard_count: int = 2,
        lease_s: float = LEASE_S,
        has_proxies: bool = False,
        coordinator_failpoint: str = "",
        shard_failpoint: str = "",
        script: str = "",
        leaves_marks: bool | None = None,
    ) -> None:
        """Makes it, to be entered.

        A `script` trains in the place of `training.py`, whose marks are then not
        looked for, unless it `leaves_marks` as well.
        """
        self._leaves_marks = not script if leaves_marks is None else leaves_marks
        self._nursery = nursery
        self._folder = folder
        self.tally = tally
        self._options = options
        self._shard_count = shard_count
        self._has_proxies = has_proxies
        self._lease_s = lease_s
        self._coordinator_failpoint = coordinator_failpoint
        self._shard_failpoint = shard_failpoint
        self._script = script
        self._starts = 0
        self._shards: list[Child] = []
        self._coordinators: list[Child] = []
        self._expected: dict[str, int] = {}
        self.address = free_address()
        self.history = folder / "history"
        self.workers: dict[str, Child] = {}
        self.values: list[torch.Tensor] = []
        self.proxies: list[FaultProxy] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self.start_coordinator(self._coordinator_failpoint)
            for index in range(self._shard_count):
                self._start_shard(index)
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        try:
            if error is None:
                self._finish()
        except BaseException as failure:
            self._explain(failure)
            raise
        finally:
            self._end(error)

    # Processes

    @property
    def coordinator(self) -> Child:
        """The newest coordinator."""
        return self._coordinators[-1]

    @property
    def shards(self) -> list[Child]:
        """The shards' processes, in the order in which they were started."""
        return self._shards

    def start_coordinator(self, failpoint: str = "") -> Child:
        """Starts the coordinator, again at the same address with the same state."""
        name = f"coordinator-{len(self._coordinators)}"
        child = self._daemon(
            name,
            "coordinator",
            f"--listen={self.address}",
            f"--shards={self._shard_count}",
            f"--lease-ttl={self._lease_s:g}",
            *self._options,
            failpoint=failpoint,
        )
        self._coordinators.append(child)
        return child

    def start_worker(
        self,
        name: str,
        *,
        failpoint: str = "",
        coordinator: str = "",
        worker_id: str = "",
        step_s: float = STEP_S,
        **environment: str,
    ) -> Child:
        """Starts a worker, by default under its own name."""
        environment |= {
            "PS_COORDINATOR": coordinator or str(self.address),
            "PS_WORKER_ID": worker_id or name,
            "PS_HISTORY": f"{self.history}/",
            "PS_FAILPOINT": failpoint,
        }
        arguments = [str(len(self.workers)), str(self._folder), str(step_s)]
        child = self._nursery.start(
            name,
            *((self._script,) if self._script else ("-m", "tests.fault.training")),
            *arguments,
            folder=self._folder,
            environment=environment,
        )
        self.workers[name] = child
        return child

    def start_workers(self, *names: str, **failpoints: str) -> None:
        """Starts several, some of them with failpoints."""
        for name in names:
            self.start_worker(name, failpoint=failpoints.get(name, ""))

    def let_begin(self) -> None:
        """Has workers step whose script waits for that."""
        (self._folder / "begin").touch()

    # Waiting

    def status(self) -> Document:
        return read_document(self.address)

    def wait_status(self, is_wanted: Callable[[Document], bool], what: str) -> Document:
        """The status once it is as wanted; a coordinator that is away is waited for."""
        found: list[Document] = []

        def is_there() -> bool:
            try:
                found[:] = [self.status()]
            except PsError:
                return False
            return is_wanted(found[0])

        wait_until(is_there, what)
        return found[0]

    def wait_steps(self, name: str, count: int) -> None:
        """Returns once a worker has done so many more steps than now."""
        worker = self.workers[name]
        wanted = len(worker.events("step")) + count
        wait_until(
            lambda: len(worker.events("step")) >= wanted or worker.code is not None,
            f"{count} steps of {name}",
        )
        assert worker.code is None, f"{name} ended with {worker.code}"

    def wait_gone(self, *names: str) -> None:
        """Returns once workers are no members any more."""
        self.wait_status(
            lambda status: not members_of(status).keys() & set(names),
            f"{', '.join(names)} to be taken out",
        )

    def wait_members(self, *names: str) -> None:
        """Returns once workers are members."""
        self.wait_status(
            lambda status: members_of(status).keys() >= set(names),
            f"{', '.join(names)} to be members",
        )

    def wait_departed(self, name: str) -> None:
        """Returns once every shard goes on without a worker, by their histories."""

        def has_departed(path: Path) -> bool:
            records = [
                line
                for line in map(json.loads, path.read_text().splitlines())
                if line["type"] == "record"
            ]
            return name not in {worker_id for worker_id, *_ in records[-1]["members"]}

        wait_until(
            lambda: all(map(has_departed, self.history.glob("shard-*.jsonl"))),
            f"shards without {name}",
        )

    # Faults

    def fault(self, kind: str, count: int = 1) -> None:
        """Counts faults that were injected."""
        self.tally.faults[kind] += count

    def expect_killed(self, name: str) -> Child:
        """Waits for a worker that its failpoint kills."""
        worker = self.workers[name]
        assert worker.wait_end() == -signal.SIGKILL
        self._expected[name] = -signal.SIGKILL
        self.fault("SIGKILL of a worker")
        return worker

    def kill_worker(self, name: str) -> Child:
        self.workers[name].send(signal.SIGKILL)
        return self.expect_killed(name)

    def expect_stopped(self, name: str) -> Child:
        """Waits for a worker that its failpoint stops."""
        self.workers[name].wait_stopped()
        self.fault("SIGSTOP of a worker")
        return self.workers[name]

    def expect_coordinator_killed(self) -> None:
        """Waits for the failpoint that kills the coordinator."""
        assert self.coordinator.wait_end() == -signal.SIGKILL
        self.fault("SIGKILL of the coordinator")

    def set_mode(self, mode: str, staleness: int | None = None) -> None:
        terms = terms_given(
            Mode.labelled(mode), staleness=staleness, quorum=None, grace_window_s=None
        )
        set_mode(self.address, terms, timeout_s=20.0)

    # Inside

    def _start_shard(self, index: int) -> None:
        # Of a port that is looked for now another shard may be given the same, before
        # this one listens: only a proxy needs to know it.
        listen = "127.0.0.1:0"
        advertise = []
        if self._has_proxies:
            listen = str(free_address())
            proxy = FaultProxy(listen)
            self.proxies.append(proxy.__enter__())
            advertise = [f"--advertise={proxy.address}"]
        shard = self._daemon(
            f"shard-{index}",
            "shard",
            f"--listen={listen}",
            f"--coordinator={self.address}",
            "--threads=2",
            *advertise,
            failpoint=self._shard_failpoint,
        )
        self._shards.append(shard)

    def _daemon(
        self, name: str, role: str, *arguments: str, failpoint: str = ""
    ) -> Child:
        state = "coordinator" if role == "coordinator" else name
        return self._nursery.start(
            name,
            *("-m", "psserver", role),
            f"--state-dir={self._folder / state}",
            f"--history={self.history}/",
            *arguments,
            folder=self._folder,
            environment={"PS_FAILPOINT": failpoint},
        )

    def _finish(self) -> None:
        """Ends the job as its user would, and holds it to its promises."""
        (self._folder / "stop").touch()
        for name, worker in self.workers.items():
            wanted = self._expected.get(name, 0)
            assert worker.wait_end() == wanted, f"{name} ended with {worker.code}"
        with SnapshotReader(str(self.address)) as reader:
            self.values = list(reader.latest(timeout=20).state_dict().values())
        self._stop_daemons()
        report = check_history([self.history])
        assert report.is_clean, report.to_text()
        counts = report.findings.counts
        assert counts["acknowledged"] > 0
        self.tally.counts += counts
        self.tally.job_count += 1
        if self._leaves_marks:
            ledger.check_values(
                self.values, self.workers, self.history, torn=counts["torn"]
            )

    def _stop_daemons(self) -> None:
        for child in (*self._shards, self.coordinator):
            child.send(signal.SIGTERM)
        for child in (*self._shards, self.coordinator):
            assert child.wait_end() == 0, f"{child.name} ended with {child.code}"
            assert "Traceback" not in own_log(child.log), child.log

    def _explain(self, failure: BaseException) -> None:
        everybody = (*self._coordinators, *self._shards, *self.workers.values())
        for child in everybody:
            lines = child.lines()[-3:]
            failure.add_note(
                f"--- {child.name} (code {child.code})\n{child.log[-4000:]}"
                + "\n".join(lines)
            )

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self._explain(error)
        children = (*self.workers.values(), *self._shards, *self._coordinators)
        for child in children:
            kill(child)
        for proxy in self.proxies:
            proxy.__exit__(None, None, None)


_GRPC_CANCELLATION: Final = re.compile(
    r"Traceback \(most recent call last\):\n"
    r"(  File \"src/python/grpcio/[^\n]*\n)+"
    r"asyncio\.exceptions\.CancelledError"
)


def own_log(log: str) -> str:
    """A log without the trace that gRPC leaves when a call is cancelled as it ends.

    Not a line of it is of ours, and nothing of ours can catch it (grpc/grpc#37239).
    """
    return _GRPC_CANCELLATION.sub("", log)
