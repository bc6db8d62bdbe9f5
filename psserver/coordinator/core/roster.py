"""Workers as the coordinator knows them: identities, signs of life, states.

A worker's sign of life is its open watch stream, which gRPC's own threads keep alive
without the interpreter. A broken stream makes the worker *suspect*; when it has not
come back within the grace it is *lost*: still a member, until a fence may take it out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple

from psserver.coordinator.core.work import RecentWork
from psserver.edge.limits import DEFAULT_LIMITS
from pswire.awaited import NOT_KNOWN
from pswire.limits import NAME_BYTES_MAX
from pswire.membership import WorkerKey, WorkerState
from pswire.names import check_worker_id
from pswire.reasons import ErrorReason, Refusal

ENDED_KEPT_LEASES = 12
"""Leases for which a start that is over is remembered, unless a newer start of the same
worker comes first. Its process may ask again to leave, whose answer was lost, and is
answered that it has left; later that it is closed, which is as true."""


ENDED_COUNT_MAX = 1_024
"""Starts that are over and remembered, the newest ones."""

IDS_KEPT_MAX = 8_192
"""Worker ids of which the number of starts is known. Of ids that nobody has, the oldest
ones beyond that are forgotten: all new starts are numbered above theirs."""

GONE = (WorkerState.LEFT, WorkerState.EVICTED)

PRESENT = (WorkerState.MEMBER, WorkerState.SUSPECT, WorkerState.LOST)
"""Stages of a member that has not said that it leaves."""


class Brought(NamedTuple):
    """Digests of what a worker has brought to its job.

    Attributes:
        values: Of its models' values, 0 if it did not say.
        state: Of its optimizers' state, 0 for none.
    """

    values: int = 0
    state: int = 0

    def differing(self, first: "Brought") -> tuple[str, ...]:
        """What of it differs from what the job has started with, in words.

        A worker without optimizer state has nothing that could be lost.
        """
        found = []
        if self.values and first.values and self.values != first.values:
            found.append("values")
        if self.state and self.state != first.state:
            found.append("optimizer state")
        return tuple(found)


NOTHING_BROUGHT = Brought()


@dataclass(slots=True)
class WorkerEntry:
    """One start of one worker.

    Attributes:
        worker: Which one.
        process_id: Unique to its process.
        address: Where it calls from, for people.
        state: Its stage.
        heard_ms: Its last sign of life.
        is_watching: Whether its stream is open.
        broken_ms: When its stream broke, None while it is open or was never opened.
        last_sequence: For one that leaves, its last acknowledged push.
        loaders: Loaders it leases data for.
        is_condemned: Whether it is to be evicted although it lives.
        cut_off: Why it is to be evicted, in words, while it can't reach a shard that
            others reach; empty while it can.
        ended_ms: When it left or was evicted.
        end_cause: Why it was evicted, in words, where it is not that it was silent.
        brought: What it has joined with.
        clock: Clocks it has completed as a member, `NOT_KNOWN` before shards report.
        stepped_ms: When that became so.
        has_state: Whether its script has registered state.
        work: What it has said of its own work; nothing once it is over.
    """

    worker: WorkerKey
    process_id: str
    address: str
    state: WorkerState
    heard_ms: int
    is_watching: bool = False
    broken_ms: int | None = None
    last_sequence: int = 0
    loaders: tuple[str, ...] = ()
    is_condemned: bool = False
    cut_off: str = ""
    ended_ms: int = 0
    end_cause: str = ""
    brought: Brought = NOTHING_BROUGHT
    clock: int = NOT_KNOWN
    stepped_ms: int = 0
    has_state: bool = False
    work: RecentWork = field(default_factory=RecentWork)

    def note_clock(self, clock: int, now_ms: int) -> None:
        """The shards report its clock; a new one begins its next step."""
        if clock != self.clock:
            self.clock, self.stepped_ms = clock, now_ms

    def step_ms(self, now_ms: int) -> int:
        """Time in its step, `NOT_KNOWN` before a shard has reported its clock."""
        return NOT_KNOWN if self.clock < 0 else now_ms - self.stepped_ms

    @property
    def where(self) -> str:
        """Where it calls from, in words; nothing when it has not called since a start.

        A coordinator that was started again knows members by its state, and their
        addresses only as they call.
        """
        return f" at {self.address}" if self.address else ""

    def end(self, state: WorkerState, now_ms: int) -> None:
        """It has left, or was evicted; said again, nothing changes."""
        if self.state not in GONE:
            self.state = state
            self.ended_ms = now_ms
            self.work = RecentWork()


class Roster:
    """All workers of a job, by identity.

    Starts that are over are forgotten: see `ENDED_KEPT_LEASES`. New starts of an id are
    numbered above all before, for ever, so that no push of an old one is taken for a
    new one's.
    """

    def __init__(
        self, incarnations: dict[str, int] | None = None, *, floor: int = 0
    ) -> None:
        """Knows how often workers were started, and nobody.

        Args:
            incarnations: Last incarnation of each worker id.
            floor: Least last incarnation of any: of some it may not be known.
        """
        self._entries: dict[WorkerKey, WorkerEntry] = {}
        # With the floor of those that were forgotten under no name: none is empty.
        self._incarnations = dict(incarnations or {})
        self._floor = max(floor, self._incarnations.pop("", 0))

    def register(
        self,
        *,
        process_id: str,
        worker_id: str,
        address: str,
        now_ms: int,
        registered_max: int = DEFAULT_LIMITS.registrations,
    ) -> WorkerEntry:
        """Gives a process its identity; the same one when it asks again.

        The id of a lost worker is free: whoever takes it replaces that one. The id of
        one that is suspect, or leaves, will be free or taken in a moment, so that the
        caller may try again.

        Raises:
            Refusal: `WORKER_ID_TAKEN`, `LIMIT_EXCEEDED`, `MALFORMED_MESSAGE` or `BUSY`;
                no state changed.
        """
        if not process_id or len(process_id) > NAME_BYTES_MAX:
            raise Refusal(ErrorReason.MALFORMED_MESSAGE, "process_id is empty or long")
        for entry in self._entries.values():
            if entry.process_id == process_id and self._is_open(entry):
                return entry
        if worker_id:
            check_worker_id(worker_id)
        chosen = worker_id or self._free_id()
        holder = self.present(chosen)
        if holder is not None and holder.state is not WorkerState.LOST:
            raise Refusal(
                ErrorReason.WORKER_ID_TAKEN,
                f"worker id {chosen[:64]!r} belongs to a process{holder.where} that is "
                f"{holder.state}",
                worker_id=chosen,
            )
        self._check_room(registered_max)
        return self._begin(chosen, process_id, address, now_ms)

    def memento(self) -> Callable[[], None]:
        """What puts back who is known now, should a registration be undone."""
        entries, incarnations = dict(self._entries), dict(self._incarnations)
        floor = self._floor

        def put_back() -> None:
            self._entries, self._incarnations = entries, incarnations
            self._floor = floor

        return put_back

    def entry(self, worker: WorkerKey) -> WorkerEntry:
        """The entry of one start of one worker.

        Raises:
            Refusal: `WORKER_UNKNOWN`, or `WORKER_INCARNATION_STALE` for one that was
                evicted or replaced.
        """
        found = self._entries.get(worker)
        if found is not None and (
            found.state is WorkerState.LEFT or self._is_open(found)
        ):
            return found
        is_older = worker.incarnation <= self._floor
        if found is not None or is_older or worker.worker_id in self._incarnations:
            raise Refusal(
                ErrorReason.WORKER_INCARNATION_STALE,
                f"{worker} is closed",
                worker_id=worker.worker_id,
                **({"cause": found.end_cause} if found and found.end_cause else {}),
            )
        raise Refusal(ErrorReason.WORKER_UNKNOWN, f"no worker {worker} in this job")

    def find(self, worker: WorkerKey) -> WorkerEntry | None:
        """The entry, whatever its state."""
        return self._entries.get(worker)

    def present(self, worker_id: str) -> WorkerEntry | None:
        """The newest start of a worker id that is not gone."""
        found = [
            entry
            for entry in self._entries.values()
            if entry.worker.worker_id == worker_id and entry.state not in GONE
        ]
        return max(found, key=lambda entry: entry.worker, default=None)

    def is_replaced(self, entry: WorkerEntry) -> bool:
        """Whether a newer start took over the id of one that was lost."""
        if entry.state is not WorkerState.LOST:
            return False
        newest = self.present(entry.worker.worker_id)
        return newest is not None and newest.worker > entry.worker

    def in_state(self, *states: WorkerState) -> list[WorkerEntry]:
        """Entries in any of these states, in the order of worker ids."""
        found = [entry for entry in self._entries.values() if entry.state in states]
        return sorted(found, key=lambda entry: entry.worker)

    def lost(
        self, now_ms: int, *, grace_ms: int, lease_ttl_ms: int
    ) -> list[WorkerEntry]:
        """Workers without a sign of life for too long, in the order of worker ids.

        A stream that broke has a grace; one that was never opened has a lease, so that
        a worker that died between its first two calls does not keep its id for ever.
        One that leaves is not lost: the others only wait for the record.
        """
        watched = self.in_state(
            WorkerState.REGISTERED, WorkerState.JOINING, WorkerState.SUSPECT
        )
        return [
            entry
            for entry in watched
            if not entry.is_watching
            and (
                now_ms - entry.heard_ms >= lease_ttl_ms
                if entry.broken_ms is None
                else now_ms - entry.broken_ms >= grace_ms
            )
        ]

    def lost_ms(self, now_ms: int) -> dict[WorkerKey, int]:
        """Members without a sign of life, each with the time since the last one.

        `NOT_KNOWN` for one that this start of the coordinator has not heard yet, and
        that has time to come back.
        """
        return {
            entry.worker: (
                max(1, now_ms - entry.heard_ms)
                if now_ms >= entry.heard_ms
                else NOT_KNOWN
            )
            for entry in self.in_state(*PRESENT)
            if not entry.is_watching
        }

    def most_broke(self, now_ms: int, *, grace_ms: int) -> bool:
        """Whether most members' streams broke within the grace.

        At least two: with one it is the worker. More than half: so many machines do
        not fail in a moment, but the coordinator's own network does.
        """
        members = self.in_state(WorkerState.MEMBER, WorkerState.SUSPECT)
        watching_count = sum(entry.is_watching for entry in members)
        broken_count = sum(
            not entry.is_watching
            and entry.broken_ms is not None
            and 0 <= now_ms - entry.broken_ms <= grace_ms
            for entry in members
        )
        return broken_count >= 2 and broken_count > watching_count

    def forget_ended(self, now_ms: int, *, lease_ttl_ms: int) -> None:
        """Forgets starts that have been over for long: nobody asks any more."""
        kept_ms = ENDED_KEPT_LEASES * lease_ttl_ms
        for worker, entry in list(self._entries.items()):
            if entry.state in GONE and now_ms - entry.ended_ms >= kept_ms:
                del self._entries[worker]
        ended = self.in_state(*GONE)
        if len(ended) > ENDED_COUNT_MAX:
            ended.sort(key=lambda entry: entry.ended_ms)
            for entry in ended[:-ENDED_COUNT_MAX]:
                del self._entries[entry.worker]

    @property
    def incarnations(self) -> dict[str, int]:
        """Last incarnation of each worker id, to be kept."""
        return {**self._incarnations, **({"": self._floor} if self._floor else {})}

    @property
    def processes(self) -> dict[WorkerKey, str]:
        """Process of each start that is not over, to be kept."""
        return {
            worker: entry.process_id
            for worker, entry in self._entries.items()
            if entry.state not in GONE
        }

    def restore(self, worker: WorkerKey, process_id: str, absent_from_ms: int) -> None:
        """A member of the last record, after the coordinator's restart.

        It was lost before, and stays so, if there is a newer start of its id.
        """
        newest = self.present(worker.worker_id)
        is_replaced = newest is not None and newest.worker > worker
        self._entries[worker] = WorkerEntry(
            worker=worker,
            process_id=process_id,
            address="",
            state=WorkerState.LOST if is_replaced else WorkerState.SUSPECT,
            heard_ms=absent_from_ms,
            broken_ms=absent_from_ms,
        )

    def restore_registered(
        self, worker: WorkerKey, process_id: str, now_ms: int
    ) -> None:
        """A worker that was no member yet, after the coordinator's restart.

        It has a lease to come back and ask again to join.
        """
        self._entries[worker] = WorkerEntry(
            worker=worker,
            process_id=process_id,
            address="",
            state=WorkerState.REGISTERED,
            heard_ms=now_ms,
        )

    def restore_left(self, worker: WorkerKey, now_ms: int) -> None:
        """A worker that the last record ended, after the coordinator's restart.

        It may not have heard so, and asks to leave again.
        """
        self._entries[worker] = WorkerEntry(
            worker=worker,
            process_id="",
            address="",
            state=WorkerState.LEFT,
            heard_ms=0,
            ended_ms=now_ms,
        )

    def end_members(self, cause: str, now_ms: int) -> None:
        """Ends all members: the job goes on from values of before they pushed.

        They may join again, as new starts, but for those that were about to leave.
        """
        for entry in self.in_state(*PRESENT):
            entry.end_cause = cause
            entry.end(WorkerState.EVICTED, now_ms)
        for entry in self.in_state(WorkerState.LEAVING):
            entry.end(WorkerState.LEFT, now_ms)

    # Inside

    def _begin(
        self, worker_id: str, process_id: str, address: str, now_ms: int
    ) -> WorkerEntry:
        """A new start of a worker; those of it that are over are forgotten."""
        for worker, entry in list(self._entries.items()):
            if worker.worker_id == worker_id and entry.state in GONE:
                del self._entries[worker]
        incarnation = max(self._floor, self._incarnations.pop(worker_id, 0)) + 1
        self._incarnations[worker_id] = incarnation  # the newest one is the last
        self._forget_ids()
        entry = WorkerEntry(
            worker=WorkerKey(worker_id, incarnation),
            process_id=process_id,
            address=address,
            state=WorkerState.REGISTERED,
            heard_ms=now_ms,
        )
        self._entries[entry.worker] = entry
        return entry

    def _check_room(self, registered_max: int) -> None:
        """Refuses a registration while too many have not come to anything.

        Raises:
            Refusal: `BUSY`.
        """
        idle = sum(
            entry.state is WorkerState.REGISTERED and not entry.is_watching
            for entry in self._entries.values()
        )
        if idle >= registered_max:
            raise Refusal(
                ErrorReason.BUSY,
                f"{idle} workers have registered and do not follow the job yet "
                "(registrations)",
            )

    def _forget_ids(self) -> None:
        surplus = len(self._incarnations) - IDS_KEPT_MAX
        if surplus <= 0:
            return
        had = {worker.worker_id for worker in self._entries}
        free = (name for name in self._incarnations if name not in had)
        for name in list(islice(free, surplus + IDS_KEPT_MAX // 8)):
            if name != next(reversed(self._incarnations)):
                self._floor = max(self._floor, self._incarnations.pop(name))

    def _is_open(self, entry: WorkerEntry) -> bool:
        """Whether its process may still act as this start."""
        return entry.state not in GONE and not self.is_replaced(entry)

    def _free_id(self) -> str:
        taken = {
            worker.worker_id
            for worker, entry in self._entries.items()
            if entry.state not in GONE
        }
        return next(name for name in map("w{}".format, count()) if name not in taken)
