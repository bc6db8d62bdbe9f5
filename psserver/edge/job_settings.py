"""What is fixed about a job, and the stages it goes through."""

from dataclasses import dataclass
from enum import Enum

from psserver.edge.record import LossPolicy, Mode, StepAtomicity

RETURN_MS_MIN = 5_000
"""Time that peers have to come back after the coordinator's own start, however short
the lease is: a connection that was refused is tried again after up to 2.4 s."""


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
        pin_ttl_ms: Time for which a reader may read a snapshot, without what its bytes
            take.
        job_seed: From which the seeds of all epochs follow; 0 for none.
        worker_loss_policy: What to do when a worker is lost.
        step_atomicity: When a push is applied.
        backup_worker_count: In BSP, workers that a clock need not wait for.
        is_staleness_scaled: Whether the learning rate of a push is divided by its
            staleness, in SSP and ASP.
        delay_compensation: Strength of delay compensation in SSP and ASP, 0 for none.
        chunk_bytes: Bytes of a full chunk; 0 for what suits the model.
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
    worker_loss_policy: LossPolicy = LossPolicy.CONTINUE
    step_atomicity: StepAtomicity = StepAtomicity.CHUNK
    backup_worker_count: int = 0
    is_staleness_scaled: bool = False
    delay_compensation: float = 0.0
    chunk_bytes: int = 0

    def __post_init__(self) -> None:
        """Holds whoever makes them to what can't work otherwise."""
        needs_clock = (
            self.worker_loss_policy is LossPolicy.WAIT or self.backup_worker_count > 0
        )
        assert not needs_clock or self.step_atomicity is StepAtomicity.CLOCK, (
            "to wait for a replacement, and to do without the slowest workers, nothing "
            "of a clock may be applied before it is known of whom it consists"
        )

    @property
    def return_ms(self) -> int:
        """Time in which nobody is lost after the coordinator's own start."""
        return max(self.lease_ttl_ms, RETURN_MS_MIN)


class JobPhase(Enum):
    """Stage of a job; mirrors `pswire.v1.JobPhase`."""

    WAITING = 1
    SEEDING = 2
    RUNNING = 3
    FINISHED = 4
    FAILED = 5
