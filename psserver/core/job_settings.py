"""What is fixed about a job, and the stages it goes through."""

from dataclasses import dataclass
from enum import Enum

from psserver.core.record import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Settings of a job, fixed when its coordinator starts.

    Attributes:
        job_id: Unique name of the job.
        shard_count: Shards it has.
        mode: How workers keep together.
        staleness_bound: Largest staleness in SSP, in clocks.
        workers_min: Workers that must be there before the first clock.
        lease_ttl_ms: Bound on the detection of a lost process.
        reconnect_grace_ms: Time in which a broken stream may come back.
        fence_timeout_ms: Time in which every shard must report to a fence.
        cut_timeout_ms: Time in which a decided cut must be copied.
        pin_ttl_ms: Time for which a reader may read a snapshot.
        job_seed: From which the seeds of all epochs follow.
    """

    job_id: str
    shard_count: int
    mode: Mode = Mode.BSP
    staleness_bound: int = 0
    workers_min: int = 1
    lease_ttl_ms: int = 10_000
    reconnect_grace_ms: int = 500
    fence_timeout_ms: int = 2_000
    cut_timeout_ms: int = 30_000
    pin_ttl_ms: int = 30_000
    job_seed: int = 0


class JobPhase(Enum):
    """Stage of a job; mirrors `pswire.v1.JobPhase`."""

    WAITING = 1
    SEEDING = 2
    RUNNING = 3
    FINISHED = 4
    FAILED = 5
