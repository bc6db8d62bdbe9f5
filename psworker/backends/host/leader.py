"""A host group's leader as a member of the job.

The first leader joins; each later one goes on as the member that the group is, under
the token that all its leaders register with. The watch, which keeps the group from
eviction, is opened on the event loop at once, the rest in the user's thread when a step
needs it.
"""

import time
from collections.abc import Collection, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from pswire import failpoints
from pswire.job_settings import JobSettings
from pswire.membership import Member
from pswire.placement import Placement, place
from psworker.backends.host.group_pushes import GroupPushes
from psworker.backends.host.memory import HostMemory
from psworker.backends.host.messages import GroupStatus, PushPlace, Seal
from psworker.config import WorkerConfig
from psworker.data.pending import PendingData
from psworker.errors import PsError
from psworker.event_loop import EventLoop, LoopFuture
from psworker.member.joining import Joined, Joining
from psworker.member.session import Session
from psworker.optim.buffers import Buffers
from psworker.optim.model_schema import BoundSchema
from psworker.optim.prepare import Prepared
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import StateLoad
from psworker.steps.job_tensors import JobTensors
from psworker.steps.sending import Sending
from psworker.tensors.value_store import CheckedChunk, ValueStore
from psworker.transport.calls import CallError, told_to_users
from psworker.transport.waiting_log import WaitingLog
from psworker.work_log import WorkLog


class HostStore(ValueStore):
    """Takes values into shared memory.

    Attributes:
        watched: Buffers into which values were written; whoever reads it clears it.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **named)
        self.watched: set[int] = set()

    def write_checked(self, checked: CheckedChunk) -> None:
        """Writes a chunk that `check` has returned."""
        super().write_checked(checked)
        self.watched |= self.written


@dataclass(frozen=True, slots=True)
class HostModel:
    """The group's model, in shared memory, and what it is to the job.

    Attributes:
        given: What was prepared, over tensors in this process's memory.
        placement: How tensors are cut.
        store: Takes values from the shards.
        buffers: Buffers of the group's model.
    """

    given: Prepared
    placement: Placement
    store: "HostStore"
    buffers: Buffers

    @classmethod
    def of(
        cls, given: Prepared, memory: HostMemory, settings: JobSettings
    ) -> "HostModel":
        """The same model as the user's, in another place."""
        schema = given.bound.schema
        tensors = tuple(memory.values())
        holder = nn.Module()
        for index in given.buffers:
            holder.register_buffer(f"entry{index}", tensors[index])
        bound = BoundSchema(schema, tensors, {"host": holder})
        own = replace(given, bound=bound)
        buffers = Buffers(bound, given.buffers)
        placement = place(schema, settings.shard_count, settings.chunk_bytes)
        local: Collection[int] = buffers.local
        return cls(
            own,
            placement,
            HostStore(tensors, placement, buffers=given.buffers, local=local),
            buffers,
        )


class HostLeader:
    """Speaks to the job for a group.

    Attributes:
        token: Under which the group's leaders register.
        pending: Data behind pushes, to be reported.
    """

    def __init__(
        self,
        loop: EventLoop,
        config: WorkerConfig,
        given: Prepared,
        memory: HostMemory,
        *,
        token: str,
        work: WorkLog,
    ) -> None:
        self._work = work
        self._loop = loop
        self._config = config
        self._given = given
        self._memory = memory
        self.token = token
        self.pending = PendingData()
        self._opening: LoopFuture[Session] | None = None
        self._pushes: GroupPushes | None = None
        self._model: HostModel | None = None

    def open(self, status: GroupStatus | None = None) -> None:
        """Begins to register and to watch the job; from any thread."""
        self._opening = self._loop.submit(lambda: self._open(status))

    @property
    def session(self) -> Session:
        """The group's start of a worker; waits for it to be there.

        Raises:
            PsError: The coordinator was not reached, or it refused.
        """
        assert self._opening is not None, "opened when it became the leader"
        with told_to_users():
            return self._opening.result()

    @property
    def is_out(self) -> bool:
        """Whether the job is over, or goes on without the group."""
        opening = self._opening
        if opening is None or not opening.done() or opening.failed:
            return False
        return opening.result().membership.failure is not None

    async def ready(self) -> Session:
        """As `session`, on the event loop."""
        assert self._opening is not None, "opened when it became the leader"
        return await self._opening.awaited()

    def found(self) -> GroupStatus:
        """Joins the job as a new start of a worker; the memory then has its values.

        Raises:
            PsError: See `Connection.prepare`.
        """
        deadline = time.monotonic() + self._config.start_timeout_s
        self._memory.fill(self._given.bound.tensors)
        session = self.session
        model = self._model_of(session)
        joining = Joining(self._loop, session, model.store, model.given)
        joined = joining.join_first(deadline)
        if failpoints.armed:
            failpoints.hit("worker.joined")
        self._pushes = self._made_pushes(joined)
        return self._pushes.status(self.token)

    def arrive(self, status: GroupStatus) -> tuple[PushPlace, GroupStatus]:
        """Where the next push of the group goes, after a step that left this status."""
        pushes = self.going_on(status)
        found = pushes.arrive()
        return found, pushes.status(self.token)

    def rejoin(self, status: GroupStatus, rejoin_count: int) -> GroupStatus:
        """Rejoins the job after an eviction, unless that was done since this count."""
        pushes = self.going_on(status)
        if pushes.rejoin_count <= rejoin_count:
            pushes.rejoin(pushes.rejoin_count)
            pushes.is_behind = True
        return pushes.status(self.token)

    def push(
        self,
        seal: Seal,
        status: GroupStatus,
        load: StateLoad | None,
        *,
        is_repeat: bool,
    ) -> tuple[PushResult, GroupStatus, frozenset[int]]:
        """Pushes a sealed step.

        Returns:
            What became of it, where the group stands then, and the buffers with new
            values.
        """
        pushes = self.going_on(status)
        model = self._model
        assert model is not None, "made with the pushes"
        spec = model.given.specs[seal.leading.optimizer]
        mean = self._memory.mean(seal.parts, with_leaders=seal.place.is_first_worker)
        model.store.watched.clear()
        result = pushes.push(spec, seal, mean, load, is_repeat=is_repeat)
        written = frozenset(model.store.watched)
        return result, pushes.status(self.token), written

    def close(self, *, leaves: bool) -> None:
        """Ends the group's membership, or lets another leader go on with it."""
        if self._opening is None:
            return
        try:
            session = self._opening.result()
        except (PsError, CallError, CancelledError):
            return  # raised where it was needed
        try:
            if leaves and session.membership.failure is None:
                sequence = self._pushes.settled_sequence() if self._pushes else 0
                report = self.pending.take_last_report()
                self._loop.run(lambda: session.leave(sequence, report))
        finally:
            if self._pushes is not None:
                self._pushes.close()
            self._loop.run(session.close)

    async def _open(self, status: GroupStatus | None) -> Session:
        config = self._config
        if status is not None:
            config = replace(config, worker_id=status.worker.worker_id)
        session = await Session.open(
            config,
            config.connect_timeout_s,
            process_id=self.token,
            work=self._work,
        )
        if status is not None and session.worker == status.worker:
            await session.wait_step(WaitingLog(), timeout_s=config.step_timeout_s)
        while not session.core.view_count:
            await session.membership.wait_change()
        return session

    def going_on(self, status: GroupStatus) -> GroupPushes:
        """The pushes of the group, also of one that another process has led before."""
        if self._pushes is not None:
            return self._pushes
        session = self.session
        member = session.membership.member or Member(
            worker=status.worker,
            rank=status.rank,
            base_clock=status.clock,
            base_sequence=status.sequence,
        )
        model = self._model_of(session)
        self._pushes = pushes = self._made_pushes(
            Joined(member, session.core.generation)
        )
        pushes.resume(status)
        if session.worker == status.worker:
            self._loop.run(lambda: session.share_memory(model.placement))
        return pushes

    def _model_of(self, session: Session) -> HostModel:
        if self._model is None:
            self._model = HostModel.of(self._given, self._memory, session.settings)
            session.core.update = session.settings.update_rules(
                self._given.clip_grad_norm
            )
        return self._model

    def _made_pushes(self, joined: Joined) -> GroupPushes:
        model, session = self._model, self.session
        assert model is not None, "made before"
        tensors = JobTensors.of(model.given, model.store, model.buffers)
        return GroupPushes(
            Sending(self._loop, session, tensors),
            pending=self.pending,
            joined=joined,
            timeout_s=self._config.step_timeout_s,
        )


def entries_of(specs: Mapping[str, Any]) -> frozenset[int]:
    """Entries that steps change: all that optimizers hold."""
    return frozenset(
        index
        for spec in specs.values()
        for group in spec.groups
        for index in group.entry_indexes
    )
