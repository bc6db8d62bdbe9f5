"""Workers as the coordinator knows them: identities, signs of life, states.

A worker's sign of life is its open watch stream, which gRPC's own threads keep alive
without the interpreter. A broken stream makes the worker *suspect*; it is gone when
it has not come back within the grace.
"""

from dataclasses import dataclass
from enum import Enum

from psserver.core.fence import MembershipChange
from psserver.core.record import Record, WorkerKey
from pswire.limits import NAME_BYTES_MAX
from pswire.reasons import ErrorReason, Refusal


class WorkerState(Enum):
    """Stage of one start of one worker."""

    REGISTERED = "registered"
    JOINING = "joining"
    MEMBER = "member"
    SUSPECT = "suspect"
    LEAVING = "leaving"
    LEFT = "left"
    EVICTED = "evicted"


GONE = (WorkerState.LEFT, WorkerState.EVICTED)


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


class Roster:
    """All workers of a job, by identity.

    Args:
        incarnations: Last incarnation of each worker id, from durable state.
    """

    def __init__(self, incarnations: dict[str, int] | None = None) -> None:
        self._entries: dict[WorkerKey, WorkerEntry] = {}
        self._incarnations = dict(incarnations or {})

    def register(
        self, *, process_id: str, worker_id: str, address: str, now_ms: int
    ) -> WorkerEntry:
        """Gives a process its identity; the same one when it asks again.

        Raises:
            Refusal: `WORKER_ID_TAKEN` or `MALFORMED_MESSAGE`; no state changed.
        """
        if not process_id or len(process_id) > NAME_BYTES_MAX:
            raise Refusal(ErrorReason.MALFORMED_MESSAGE, "process_id is empty or long")
        for entry in self._entries.values():
            if entry.process_id == process_id:
                return entry
        if len(worker_id.encode()) > NAME_BYTES_MAX:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"worker id {worker_id[:64]!r} is longer than {NAME_BYTES_MAX} bytes",
            )
        chosen = worker_id or self._free_id()
        holder = self.present(chosen)
        if holder is not None:
            raise Refusal(
                ErrorReason.WORKER_ID_TAKEN,
                f"worker id {chosen[:64]!r} belongs to a process at {holder.address} "
                f"that is {holder.state.value}",
                worker_id=chosen,
            )
        incarnation = self._incarnations.get(chosen, 0) + 1
        self._incarnations[chosen] = incarnation
        entry = WorkerEntry(
            worker=WorkerKey(chosen, incarnation),
            process_id=process_id,
            address=address,
            state=WorkerState.REGISTERED,
            heard_ms=now_ms,
        )
        self._entries[entry.worker] = entry
        return entry

    def entry(self, worker: WorkerKey) -> WorkerEntry:
        """The entry of one start of one worker.

        Raises:
            Refusal: `WORKER_UNKNOWN`, or `WORKER_INCARNATION_STALE` for one that was
                evicted or replaced.
        """
        found = self._entries.get(worker)
        if found is not None and found.state is not WorkerState.EVICTED:
            return found
        if found is not None or worker.worker_id in self._incarnations:
            raise Refusal(
                ErrorReason.WORKER_INCARNATION_STALE,
                f"{worker} is closed",
                worker_id=worker.worker_id,
            )
        raise Refusal(ErrorReason.WORKER_UNKNOWN, f"no worker {worker} in this job")

    def find(self, worker: WorkerKey) -> WorkerEntry | None:
        """The entry, whatever its state."""
        return self._entries.get(worker)

    def present(self, worker_id: str) -> WorkerEntry | None:
        """The start of a worker id that is not gone."""
        for entry in self._entries.values():
            if entry.worker.worker_id == worker_id and entry.state not in GONE:
                return entry
        return None

    def in_state(self, *states: WorkerState) -> list[WorkerEntry]:
        """Entries in any of these states, in the order of worker ids."""
        found = [entry for entry in self._entries.values() if entry.state in states]
        return sorted(found, key=lambda entry: entry.worker)

    def pending_change(self, record: Record) -> MembershipChange:
        """What the next record would change."""
        joining = self.in_state(WorkerState.JOINING)
        leaving = self.in_state(WorkerState.LEAVING)
        evicted = self.in_state(WorkerState.EVICTED)
        return MembershipChange(
            joins=tuple(entry.worker for entry in joining),
            leaves=tuple((entry.worker, entry.last_sequence) for entry in leaving),
            evictions=tuple(e.worker for e in evicted if record.member_of(e.worker)),
        )

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

    @property
    def incarnations(self) -> dict[str, int]:
        """Last incarnation of each worker id, to be kept."""
        return dict(self._incarnations)

    @property
    def processes(self) -> dict[str, str]:
        """Process of each worker id that is present, to be kept."""
        return {
            entry.worker.worker_id: entry.process_id
            for entry in self._entries.values()
            if entry.state not in GONE
        }

    def restore(self, worker: WorkerKey, process_id: str, absent_from_ms: int) -> None:
        """A member of the last record, after the coordinator's restart.

        Args:
            worker: The member.
            process_id: Its process.
            absent_from_ms: When it counts as broken if it has not come back.
        """
        self._entries[worker] = WorkerEntry(
            worker=worker,
            process_id=process_id,
            address="",
            state=WorkerState.SUSPECT,
            heard_ms=absent_from_ms,
            broken_ms=absent_from_ms,
        )

    def restore_left(self, worker: WorkerKey) -> None:
        """A worker that the last record ended, after the coordinator's restart.

        It may not have heard so, and asks to leave again.
        """
        self._entries[worker] = WorkerEntry(
            worker=worker, process_id="", address="", state=WorkerState.LEFT, heard_ms=0
        )

    def _free_id(self) -> str:
        number = 0
        while self.present(f"w{number}") is not None:
            number += 1
        return f"w{number}"
