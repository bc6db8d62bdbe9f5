"""What of a job's settings decides when a shard applies a push."""

from dataclasses import dataclass

from psserver.edge.record import StepAtomicity


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRules:
    """Fixed for the life of a job.

    Attributes:
        step_atomicity: Whether a chunk is applied as soon as its contributions are
            complete, or only after a commit.
        backup_worker_count: In BSP, workers that a clock need not wait for. Needs
            two-phase steps.
        is_first: Whether this is shard 0, which chooses with backup workers.
        clip_grad_norm: Norm that gradients are clipped to, 0 for no clipping. That of
            a clock of BSP is known only when all of it is there, on every shard.
    """

    step_atomicity: StepAtomicity = StepAtomicity.CHUNK
    backup_worker_count: int = 0
    is_first: bool = False
    clip_grad_norm: float = 0.0

    @property
    def is_clipped(self) -> bool:
        """Whether gradients are clipped by their global norm."""
        return self.clip_grad_norm > 0

    @property
    def has_two_phase_clocks(self) -> bool:
        """Whether nothing of a clock of BSP is applied before a commit."""
        return self.is_clipped or self.has_two_phase_pushes

    @property
    def has_two_phase_pushes(self) -> bool:
        """Whether, in SSP and ASP too, nothing is applied before a commit."""
        return self.step_atomicity is StepAtomicity.CLOCK

    @property
    def has_backups(self) -> bool:
        """Whether a clock may close without some of its contributors."""
        return self.backup_worker_count > 0
