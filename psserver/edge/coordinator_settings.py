"""Settings of a job that concern the coordinator alone, and the job's stages."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from psserver.edge.checkpoint_interval import EVERY_TEN_MINUTES, CheckpointInterval
from pswire.job_settings import JobSettings
from pswire.membership import LabelledEnum, LossPolicy, StepAtomicity

CHECKPOINT_KEEP_COUNT_DEFAULT: Final = 3

RETURN_MS_MIN: Final = 5_000
"""Time that peers have to come back after the coordinator's own start, however short
the lease is: a connection that was refused is tried again after up to 2.4 s."""


class ShardLossPolicy(LabelledEnum):
    """What to do when a shard is lost."""

    WAIT = 1
    FAIL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Where checkpoints go and how often one is made.

    Attributes:
        url: Folder of all checkpoints of the job: an absolute path or an fsspec URL.
        interval: How often.
        keep_count: How many stay.
        timeout_ms: Time from the decision of a cut to the last part that is written.
    """

    url: str
    interval: CheckpointInterval = EVERY_TEN_MINUTES
    keep_count: int = CHECKPOINT_KEEP_COUNT_DEFAULT
    timeout_ms: int = 1_800_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings(JobSettings):
    """Settings of a job, with those that only its coordinator needs.

    Attributes:
        reconnect_grace_ms: Time in which a broken stream may come back.
        fence_timeout_ms: Time in which every shard must report to a fence.
        cut_timeout_ms: Time in which a decided cut must be copied, beside that for
            the bytes of the model.
        pin_ttl_ms: Time for which a reader may read a snapshot, without what its bytes
            take.
        job_seed: From which the seeds of all epochs follow; 0 for none.
        checkpoints: Where checkpoints go; None for a job that makes none.
        shard_loss_policy: What to do when a shard is lost; by default the job returns
            to its newest checkpoint, and fails if there is none yet.
        measure_key: Key by which shards prove to each other what they have measured.
    """

    reconnect_grace_ms: int = 500
    fence_timeout_ms: int = 2_000
    cut_timeout_ms: int = 30_000
    pin_ttl_ms: int = 30_000
    job_seed: int = 0
    checkpoints: CheckpointSettings | None = None
    shard_loss_policy: ShardLossPolicy | None = None
    measure_key: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        """Checks what can't work otherwise."""
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
