"""What of a job's settings decides when a shard applies a push."""

from dataclasses import dataclass

from psserver.core.record import StepAtomicity


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRules:
    """Fixed for the life of a job.

    Attributes:
        step_atomicity: Whether a chunk is applied as soon as its contributions are
            complete, or only after a commit.
        backup_worker_count: In BSP, workers that a clock need not wait for. Needs
            two-phase steps.
        is_first: Whether this is shard 0, which chooses with backup workers.
    """

    step_atomicity: StepAtomicity = StepAtomicity.CHUNK
    backup_worker_count: int = 0
    is_first: bool = False

    @property
    def is_two_phase(self) -> bool:
        """Whether nothing is applied before a commit."""
        return self.step_atomicity is StepAtomicity.CLOCK

    @property
    def has_backups(self) -> bool:
        """Whether a clock may close without some of its contributors."""
        return self.backup_worker_count > 0
