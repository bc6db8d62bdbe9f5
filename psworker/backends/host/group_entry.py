"""How a process enters its host group, and enters again after it was excluded.

In the user's thread.
"""

import logging
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from pswire.placement import place
from pswire.reasons import ErrorReason
from psworker.backends.backend import LeaderError
from psworker.backends.host.core import HostCore
from psworker.backends.host.effects import Found, Lead
from psworker.backends.host.group_driver import (
    BACK_LIMIT_MS,
    FORM_LIMIT_MS,
    GroupDriver,
)
from psworker.backends.host.leader import HostLeader, entries_of
from psworker.backends.host.leader_service import LeaderService
from psworker.backends.host.memory import HostMemory
from psworker.backends.host.messages import (
    Admit,
    Done,
    Excluded,
    Failed,
    GroupStatus,
    ProcessId,
)
from psworker.config import WorkerConfig
from psworker.data.pending import PendingData
from psworker.errors import StartTimeoutError
from psworker.event_loop import EventLoop
from psworker.launch.launched import HostPlace
from psworker.optim.buffers import Buffers
from psworker.optim.declared_tensors import DeclaredTensors
from psworker.optim.prepare import Prepared
from psworker.optim.write_guard import WriteGuard
from psworker.tensors.value_store import ValueStore
from psworker.transport.waiting_log import WaitingLog
from psworker.work_log import WorkLog

logger: Final = logging.getLogger("psworker")


@dataclass(slots=True)
class Life:
    """This process in its group; after an exclusion it has another life."""

    core: HostCore
    memory: HostMemory
    driver: GroupDriver
    leader: HostLeader | None = None


class GroupEntry:
    """A process of a host group, and the model that it holds the group's values in.

    Attributes:
        pending: Data that was drawn and not yet pushed.
        status: Where the group stands in the job.
    """

    def __init__(
        self,
        loop: EventLoop,
        config: WorkerConfig,
        place_on_host: HostPlace,
        given: Prepared,
        *,
        digest: str,
        work: WorkLog,
    ) -> None:
        """Enters the group; returns when the model holds the job's values.

        Args:
            loop: Where sockets and calls are.
            config: Where the job is.
            place_on_host: Which process of which group this is.
            given: What was prepared.
            digest: Of that; the same in all processes.
            work: What this process does.

        Raises:
            PsError: As `Connection.prepare`, in all processes.
        """
        self._loop = loop
        self._config = config
        self._host = place_on_host
        self._given = given
        self._digest = digest
        self._work = work
        self.pending = PendingData()
        self._buffers = Buffers(given.bound, given.buffers, given.specs.values())
        self._declared = DeclaredTensors(given.bound, given.buffers, given.followed)
        schema = given.bound.schema
        self._store = ValueStore(
            self._tensors,
            place(schema, 1),
            buffers=given.buffers,
            local=self._buffers.local,
        )
        self._guard = WriteGuard(schema, self._tensors, held=given.held)
        self._rejoin_count = 0
        self._life_count = 0
        self.status: GroupStatus
        self._life = self._begin_life()
        try:
            self._enter()
        except BaseException:
            self._end_life()
            raise

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks to the job."""
        return self._life.core.is_leader

    @property
    def driver(self) -> GroupDriver:
        """This process in its group."""
        return self._life.driver

    @property
    def member_count(self) -> int:
        """Processes of the group now."""
        return max(1, len(self._life.core.members))

    @property
    def place(self) -> int:
        """This process's index among these, in whose order batches are dealt."""
        core = self._life.core
        members = core.members
        return members.index(core.process) if core.process in members else 0

    @property
    def rejoin_count(self) -> int:
        """How often this process has entered again, or its group has rejoined."""
        return self._life_count + self._rejoin_count

    @property
    def leader(self) -> HostLeader | None:
        """The group's part in the job, if this process leads."""
        return self._life.leader

    # Entering

    def _begin_life(self) -> Life:
        process = ProcessId(self._host.index, secrets.randbits(62))
        is_back = self._host.is_restart or self._life_count > 0
        patience_ms = BACK_LIMIT_MS if is_back else FORM_LIMIT_MS
        core = HostCore(process, count=self._host.count, patience_ms=patience_ms)
        memory = HostMemory(
            self._given.bound.schema,
            process,
            self._given.buffers,
            adds_up=self._given.loss == "sum",
        )
        driver = GroupDriver(
            self._loop,
            core,
            memory,
            digest=self._digest,
            marks=self._given.bound.schema.marks,
            on_lead=self._take_lead,
        )
        return Life(core, memory, driver)

    def _take_lead(self, lead: Lead) -> LeaderService:
        """On the event loop: keeps the group's membership from now on."""
        status = lead.done.status
        life = self._life
        life.leader = HostLeader(
            self._loop,
            self._config,
            self._given,
            life.memory,
            token=status.token,
            work=self._work,
        )
        life.leader.open(status)
        logger.warning(
            "process %d of this host's group leads it now, as worker %s",
            life.core.process.number,
            status.worker.worker_id,
        )
        return LeaderService(life.core, life.leader, self._config.step_timeout_s)

    def _enter(self) -> None:
        """Enters; again for each time that the group has gone on without it."""
        deadline = time.monotonic() + self._config.start_timeout_s
        while True:
            life = self._life
            life.driver.enter(self._host.group, self._host.count)
            if self._is_admitted(deadline):
                return
            self._end_life()
            self._life = self._begin_life()

    def _is_admitted(self, deadline: float) -> bool:
        log = WaitingLog()
        life = self._life
        while True:
            task = life.driver.next_task(deadline, log)
            match task:
                case None:
                    raise StartTimeoutError(
                        f"the job did not start in time: waiting for "
                        f"{life.driver.waited_for()}; start what is missing",
                        reason=ErrorReason.NOT_STARTED,
                    )
                case Found():
                    self._found()
                    return True
                case Admit(done=done):
                    self._take_values(done, is_whole=True)
                    self._rejoin_count = done.status.rejoin_count
                    return life.driver.settle()
                case Failed():
                    raise task.to_error()
                case Excluded():
                    return False

    def _found(self) -> None:
        """Joins the job, as the first leader of the group."""
        life = self._life
        life.leader = HostLeader(
            self._loop,
            self._config,
            self._given,
            life.memory,
            token=uuid.uuid4().hex,
            work=self._work,
        )
        with self._failures_sent():
            life.leader.open()
            status = life.leader.found()
        everything = frozenset(range(len(self._tensors)))
        life.memory.copy(life.core.process, self._tensors, everything - self._local)
        self._note_values(status)
        life.driver.serve(
            LeaderService(life.core, life.leader, self._config.step_timeout_s)
        )
        life.driver.post(lambda core: core.founded(status))

    def _end_life(self) -> None:
        life = self._life
        life.driver.close()
        if life.leader is not None:
            life.leader.close(leaves=False)
        life.memory.close()

    # Values

    @property
    def _tensors(self) -> Sequence[torch.Tensor]:
        """One for each entry of the schema, as of the last look."""
        return self._declared.tensors

    def _look(self) -> None:
        """Follows tensors that the script has replaced."""
        for index in self._declared.look():
            self._store.put(index, self._declared.tensors[index])
            self._buffers.forget(index)

    @property
    def _local(self) -> frozenset[int]:
        return self._buffers.local

    @property
    def _stepped(self) -> frozenset[int]:
        return entries_of(self._given.specs)

    def _take_values(self, done: Done, *, is_whole: bool) -> None:
        everything = frozenset(range(len(self._tensors)))
        entries = everything if is_whole else self._stepped | done.written
        entries -= self._local
        if not is_whole:
            for optimizer in {part.optimizer for part in done.parts.values()}:
                withheld = self._buffers.scope_of(optimizer).withheld
                self._store.passed_over |= entries & withheld
                entries -= withheld
        self._life.memory.copy(done.source, self._tensors, entries)
        self._store.written |= entries & self._given.buffers.keys()
        self._note_values(done.status)

    def _note_values(self, status: GroupStatus) -> None:
        self._guard.note()
        self._buffers.note_written(self._store)
        self.status = status

    @contextmanager
    def _failures_sent(self) -> Iterator[None]:
        """Sends what the leader fails at to the others."""
        driver, process = self._life.driver, self._life.core.process
        try:
            yield
        except BaseException as error:
            failed = Failed(process, LeaderError.of(error))
            driver.post(lambda core: core.failed(failed))
            raise
