"""A host group's leader answers what its processes ask beside steps.

On the event loop; what needs the group's pushes runs in a thread beside, which is safe
while any member is outside of a step: no push is under way then.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pswire.leased_data import DataRange, DataReport, Origin
from psworker.backends.backend import LeaderError
from psworker.backends.host.core import HostCore
from psworker.backends.host.group_pushes import GroupPushes
from psworker.backends.host.leader import HostLeader
from psworker.backends.host.messages import (
    AwaitTurn,
    GiveBack,
    OptimizerStateOf,
    ProcessId,
    Question,
    RejoinJob,
    SettingsOf,
)
from psworker.errors import EvictedError
from psworker.member.session import CALL_TIMEOUT_S, Session
from psworker.transport.calls import now, told_to_users, until_decided
from psworker.transport.values import EpochRequest, Lease, LeaseRequest

if TYPE_CHECKING:
    from pswire.leased_data import EpochReport

T = TypeVar("T")

_BATCH_COUNT_MAX: Final = 1024


class Deal:
    """How one epoch's batches are dealt to the group's processes. Pure.

    Towards the coordinator the group is one worker, which holds what any of its
    processes holds; each answer of the coordinator repeats all of that. Batches go
    round in the order of process ids, whoever asks first, so that a run repeats. What a
    lost process held is dealt again, unless a sealed step has it.

    Attributes:
        is_closed: Whether every range of it is accounted for.
    """

    def __init__(
        self, hands: Mapping[ProcessId, Iterable[DataRange]] | None = None
    ) -> None:
        """Begins, or goes on after another leader.

        Args:
            hands: What the members hold of it.
        """
        self.is_closed = False
        self._hands = {
            process: set(ranges) for process, ranges in (hands or {}).items()
        }
        self._queues: dict[ProcessId, deque[DataRange]] = {}
        self._pool: list[DataRange] = []
        self._known = {each for hand in self._hands.values() for each in hand}
        self._turn = 0

    @property
    def is_idle(self) -> bool:
        """Whether no process holds or will get any of the known ranges."""
        return not (
            self._pool or any(self._hands.values()) or any(self._queues.values())
        )

    def wanted(
        self, process: ProcessId, count: int, members: Sequence[ProcessId]
    ) -> int:
        """How many more batches to ask for, so that a process can have `count`."""
        if len(self._queues.get(process, ())) >= count:
            return 0
        queued = sum(map(len, self._queues.values())) + len(self._pool)
        return max(1, count * len(members) - queued)

    def note_used(self, ranges: Iterable[DataRange]) -> None:
        """Notes data of pushes that are done or under way."""
        used = set(ranges)
        self._known |= used
        for hand in self._hands.values():
            hand -= used

    def take_in(
        self, ranges: Iterable[DataRange], members: Sequence[ProcessId]
    ) -> None:
        """Deals what the group holds and no process has had yet, in order."""
        fresh = sorted(set(ranges) - self._known)
        self._known.update(fresh)
        self._pool += fresh
        self._share(members)

    def hand_out(self, process: ProcessId, count: int) -> tuple[DataRange, ...]:
        """At most so many batches for a process, which has them from now on."""
        queue = self._queues.setdefault(process, deque())
        dealt = tuple(queue.popleft() for _ in range(min(count, len(queue))))
        self._hands.setdefault(process, set()).update(dealt)
        return dealt

    def give_back(self, process: ProcessId, ranges: Iterable[DataRange]) -> None:
        """Takes back ranges that a process does not use."""
        hand = self._hands.get(process, set())
        returned = hand.intersection(ranges)
        hand -= returned
        self._pool = sorted((*self._pool, *returned))

    def give_all_back(self, process: ProcessId) -> None:
        """Takes back all that a process holds."""
        self.give_back(process, tuple(self._hands.get(process, ())))

    def lose(
        self, processes: Iterable[ProcessId], members: Sequence[ProcessId]
    ) -> None:
        """Deals what lost processes had to the others."""
        for process in processes:
            self.give_all_back(process)
            self._hands.pop(process, None)
            self._pool = sorted((*self._pool, *self._queues.pop(process, ())))
        self._share(members)

    @property
    def processes(self) -> frozenset[ProcessId]:
        """Processes that have had anything of it."""
        return frozenset((*self._hands, *self._queues))

    def _share(self, members: Sequence[ProcessId]) -> None:
        for each in self._pool if members else ():
            process = members[self._turn % len(members)]
            self._turn += 1
            self._queues.setdefault(process, deque()).append(each)
        if members:
            self._pool = []


class LeaderService:
    """Answers of one leader."""

    def __init__(self, core: HostCore, leader: HostLeader, timeout_s: float) -> None:
        """Begins with the states that members have sent to a new leader.

        Args:
            core: The state machine, read on the event loop.
            leader: Of the group.
            timeout_s: Longest time for the coordinator to answer.
        """
        self._core = core
        self._leader = leader
        self._timeout_s = timeout_s
        self._deals: dict[tuple[str, int], Deal] = {}
        self._reports: dict[tuple[str, int], EpochReport | None] = {}
        self._waiting: dict[tuple[str, int], asyncio.Task[Lease]] = {}
        self._idle: set[ProcessId] = set()
        self._turn: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._step = 0
        self._lock = threading.Lock()
        self._rejoin_count = -1

    def note_change(self) -> None:
        """Follows a change in the group, such as a lost member or a step."""
        core = self._core
        seal, done = core.sealed, core.done
        if done is not None and done.status.rejoin_count != self._rejoin_count:
            if self._rejoin_count >= 0:
                self._deals.clear()  # what the start before held is not its own
            self._rejoin_count = done.status.rejoin_count
        for (loader, epoch), deal in self._deals.items():
            for ranges in (seal.ranges if seal else (), core.used):
                deal.note_used(
                    e for e in ranges if (e.loader, e.epoch) == (loader, epoch)
                )
            if lost := deal.processes - set(core.members):
                deal.lose(lost, core.members)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def answer(self, process: ProcessId, question: Question) -> object:
        """The answer, or the error."""
        try:
            with told_to_users():
                return await self._answered(process, question)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # sent to the process that asks
            return LeaderError.of(error)

    async def _answered(self, process: ProcessId, question: Question) -> object:
        while self._core.is_gathering:  # it does not know yet who holds what
            await self._changed.wait()
        match question:
            case EpochRequest():
                return await self._open_epoch(process, question)
            case LeaseRequest():
                return await self._lease(process, question)
            case GiveBack(ranges=ranges):
                for each in ranges:
                    self._deal_of(each.loader, each.epoch).give_back(process, (each,))
                self.note_change()
                return None
            case AwaitTurn():
                await self._await_turn(process)
                return None
            case OptimizerStateOf(optimizer=name, spec_digest=digest):
                return await self._beside(
                    lambda: self._pushes().optimizer_state(name, digest)
                )
            case SettingsOf(optimizer=name):
                return await self._beside(lambda: self._pushes().settings_used(name))
            case RejoinJob(rejoin_count=count):
                assert self._core.done is not None, "members ask"
                before = self._core.done.status
                status = await self._beside(lambda: self._leader.rejoin(before, count))
                if self._rejoin_count < status.rejoin_count:
                    self._rejoin_count = status.rejoin_count
                    self._deals.clear()
                    self._core.hands.clear()
                return status

    def _pushes(self) -> GroupPushes:
        assert self._core.done is not None, "members ask"
        return self._leader.going_on(self._core.done.status)

    async def _beside(self, work: Callable[[], T]) -> T:
        def alone() -> T:
            with self._lock:
                return work()

        return await asyncio.to_thread(alone)

    # Data

    async def _open_epoch(self, process: ProcessId, request: EpochRequest) -> Origin:
        session = await self._leader.ready()
        for (loader, epoch), deal in self._deals.items():
            if loader == request.loader and epoch < request.epoch:
                deal.give_all_back(process)
        request = replace(request, report=self._report(request.report))
        origin = await self._called(session, session.control.open_epoch, request)
        self._deal_of(request.loader, request.epoch)
        return origin

    async def _lease(self, process: ProcessId, request: LeaseRequest) -> Lease:
        key = request.loader, request.epoch
        deal = self._deal_of(*key)
        for each in request.report.skipped:
            self._deal_of(each.loader, each.epoch).note_used((each,))
        count = request.batch_count_max
        wanted = deal.wanted(process, count, self._core.members)
        has_news = (
            bool(request.report.skipped) or self._leader.pending.unreported.has_news
        )
        if (wanted or has_news) and not deal.is_closed:
            await self._fetch(request, max(1, wanted))
        while request.wait and not deal.is_closed:
            dealt = deal.hand_out(process, count)
            if dealt or process not in self._core.members:
                return Lease(dealt, closed=False)
            if deal.is_idle and not self._core.is_settling:
                await self._fetch_waiting(key, request)
            else:
                await self._changed.wait()
                if self._leader.pending.unreported.has_news:
                    await self._fetch(request, 1)
        dealt = deal.hand_out(process, count)
        return Lease(dealt, deal.is_closed, self._reports.get(key))

    async def _fetch_waiting(self, key: tuple[str, int], request: LeaseRequest) -> None:
        """One call for all that wait, until there is more or the epoch is closed."""
        task = self._waiting.get(key)
        if task is None or task.done():
            task = asyncio.ensure_future(self._fetch(request, 1, wait=True))
            self._waiting[key] = task
        change = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({task, change}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            change.cancel()

    async def _fetch(
        self, request: LeaseRequest, count: int, *, wait: bool = False
    ) -> Lease:
        """Asks the coordinator for the group, and deals what it leases."""
        session = await self._leader.ready()
        key = request.loader, request.epoch
        own = replace(
            request,
            report=self._report(DataReport(skipped=request.report.skipped)),
            batch_count_max=min(count, _BATCH_COUNT_MAX),
            wait=wait,
        )
        lease = await self._called(session, session.control.lease_data, own)
        deal = self._deal_of(*key)
        deal.take_in(lease.ranges, self._core.members)
        deal.is_closed = deal.is_closed or lease.closed
        self._reports[key] = lease.report or self._reports.get(key)
        self.note_change()
        return lease

    def _report(self, asked: DataReport) -> DataReport:
        """What the next call reports of the group's data."""
        own = self._leader.pending.unreported.take()
        return DataReport(
            own.consumed, own.dropped, own.incarnation, (*own.skipped, *asked.skipped)
        )

    async def _called(
        self,
        session: Session,
        call: Callable[..., Coroutine[Any, Any, T]],
        request: EpochRequest | LeaseRequest,
    ) -> T:
        def attempt(timeout_s: float) -> Coroutine[Any, Any, T]:
            limit_s = min(timeout_s, CALL_TIMEOUT_S)
            return call(session.worker, request, timeout_s=limit_s)

        try:
            return await session.membership.unless_failed(
                until_decided(attempt, now() + self._timeout_s)
            )
        except BaseException:
            self._leader.pending.unreported.put_back(request.report)
            raise

    def _deal_of(self, loader: str, epoch: int) -> Deal:
        key = loader, epoch
        if key not in self._deals:
            hands: dict[ProcessId, list[DataRange]] = {
                process: [e for e in hand if (e.loader, e.epoch) == key]
                for process, hand in self._core.hands.items()
            }
            deal = self._deals[key] = Deal(hands)
            seal = self._core.sealed
            for ranges in (seal.ranges if seal else (), self._core.used):
                deal.note_used(e for e in ranges if (e.loader, e.epoch) == key)
        return self._deals[key]

    # Turns of those that have no data

    async def _await_turn(self, process: ProcessId) -> None:
        self._idle.add(process)
        try:
            while not self._core.is_awaited_from(process):
                members = set(self._core.members)
                if members and members <= self._idle:
                    await self._await_job()
                else:
                    await self._changed.wait()
                if self._turn is not None and self._turn.done():
                    self._turn.result()
                    return
        finally:
            self._idle.discard(process)
            if not self._idle and self._turn is not None:
                self._turn.cancel()
                self._turn = None

    async def _await_job(self) -> None:
        """All are idle: until a clock of the job waits for the group."""
        if self._turn is None or self._turn.done():
            self._turn = asyncio.ensure_future(self._contribution())
        change = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait(
                {self._turn, change}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            change.cancel()

    async def _contribution(self) -> None:
        session = await self._leader.ready()
        assert self._core.done is not None, "members ask"
        record = session.membership.record
        member = session.membership.member
        if record is None or member is None:
            raise EvictedError(
                f"worker {session.worker.worker_id} is no member of the job any more"
            )
        sequence = self._core.done.status.sequence + 1
        await session.shards.await_contribution(
            record.generation, member.clock_of(sequence), sequence
        )
