"""Who calls the coordinator: shards and workers of this job, not of an earlier one."""

from typing import Protocol

from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.core.roster import GONE, WorkerEntry
from psserver.coordinator.core.shard_map import ShardSlot
from psserver.edge.access import check_speaks_for
from psserver.edge.decoding import worker_key
from pswire.membership import WorkerState
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import membership_pb2


class ShardRequest(Protocol):
    """Any request of a shard that has its place."""

    job_id: str
    shard_index: int
    incarnation: int
    process_id: str


class WorkerRequest(Protocol):
    """Any request of a worker that has its identity."""

    job_id: str

    @property
    def worker(self) -> membership_pb2.WorkerIdentity: ...


class OwnRequest(WorkerRequest, Protocol):
    """A request that nobody but the worker's own process may make."""

    process_id: str


class Callers:
    """Finds the state of whoever calls."""

    def __init__(self, core: CoordinatorCore) -> None:
        self._core = core

    def slot(self, request: ShardRequest) -> ShardSlot:
        """The place of a calling shard.

        Raises:
            Refusal: `JOB_UNKNOWN`, `SHARD_UNKNOWN` or `SHARD_INCARNATION_STALE`.
        """
        self._check_job(request.job_id)
        return self._core.shards.slot(
            request.shard_index, request.incarnation, request.process_id
        )

    def entry(self, request: WorkerRequest) -> WorkerEntry:
        """The entry of a calling worker.

        Raises:
            Refusal: `PERMISSION_DENIED`, `JOB_UNKNOWN`, `WORKER_UNKNOWN` or
                `WORKER_INCARNATION_STALE`.
        """
        check_speaks_for(request.worker.worker_id)
        self._check_job(request.job_id)
        return self._core.roster.entry(worker_key(request.worker))

    def own_entry(self, request: OwnRequest) -> WorkerEntry:
        """The entry of a worker whose own process calls.

        Id and incarnation of a worker are known to everybody, and what such a call says
        may end its membership.

        Raises:
            Refusal: As `entry`, or `WORKER_INCARNATION_STALE` for another process.
        """
        entry = self.entry(request)
        if entry.state not in GONE and entry.process_id != request.process_id:
            raise Refusal(
                ErrorReason.WORKER_INCARNATION_STALE,
                f"{entry.worker} is another process than the caller",
            )
        return entry

    def member(self, request: WorkerRequest) -> WorkerEntry:
        """The entry of a calling worker that is a member.

        Raises:
            Refusal: As `entry`, or `NOT_STARTED`.
        """
        entry = self.entry(request)
        if entry.state in (*GONE, WorkerState.REGISTERED, WorkerState.JOINING):
            raise Refusal(
                ErrorReason.NOT_STARTED,
                f"{entry.worker} is {entry.state}, data is leased to members",
            )
        return entry

    def _check_job(self, job_id: str) -> None:
        """Refuses who has outlived an earlier job at this address.

        Worker ids, shard indexes and incarnations begin anew in every job.
        """
        own = self._core.settings.job_id
        if job_id != own:
            raise Refusal(
                ErrorReason.JOB_UNKNOWN,
                f"the caller belongs to job {job_id[:64]!r}, this is job {own!r}",
            )
