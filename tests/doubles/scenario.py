"""What may happen in a simulated world, and the jobs that are drawn for it."""

import random
from dataclasses import dataclass

from psserver.edge.coordinator_settings import CheckpointSettings, CoordinatorSettings
from pswire.aggregation import BadGradientPolicy
from pswire.membership import LossPolicy, Mode, ModeTerms, StepAtomicity


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What may happen in a world.

    Attributes:
        modes: Modes that the job begins with and changes to.
        loses_workers: Whether workers die, stop, or give up in the middle of a step.
        restarts_coordinator: Whether the coordinator may be started again.
        is_two_phase: Whether steps have two phases; drawn when None.
        has_backups: Whether there are backup workers.
        may_wait: Whether a lost worker's place may be kept for a replacement.
        clip_grad_norm: Norm that gradients are clipped to, 0 for no clipping.
        gradient_norm_max: Largest norm of one worker's gradient, 0 for any; those that
            are larger or not finite are rejected.
        declares: Whether scripts add parameter groups, prepare another optimizer, and
            load state.
        publishes: Whether scripts publish values.
        cuts_off: Whether workers lose sight of one shard that others reach.
        fills_disk: Whether the coordinator's disk takes nothing for a while.
        saves: Whether checkpoints are made, and pushes are of leased data.
        steps_again: Whether scripts step twice on each batch.
        loses_shards: Whether shards die, or stop for long, once there is a checkpoint
            to return to.
        loses_leaders: Whether a worker is a host group, whose leader may die in the
            middle of a push: the next one goes on with it.
    """

    modes: tuple[Mode, ...] = (Mode.BSP,)
    loses_workers: bool = False
    restarts_coordinator: bool = False
    is_two_phase: bool | None = None
    has_backups: bool = False
    may_wait: bool = False
    clip_grad_norm: float = 0.0
    gradient_norm_max: float = 0.0
    declares: bool = False
    publishes: bool = False
    cuts_off: bool = False
    fills_disk: bool = False
    saves: bool = False
    steps_again: bool = False
    loses_shards: bool = False
    loses_leaders: bool = False

    @property
    def may_miss(self) -> bool:
        """Whether a clock may close without some of its contributors."""
        return self.has_backups or Mode.QUORUM in self.modes

    def terms(self, rng: random.Random) -> ModeTerms:
        """Draws a mode with its numbers."""
        mode = rng.choice(self.modes)
        return ModeTerms(
            mode,
            rng.randint(0, 3) if mode is Mode.SSP else 0,
            rng.randint(1, 3) if mode is Mode.QUORUM else 0,
            rng.choice((0, 20, 300)) if mode is Mode.QUORUM else 0,
        )

    def settings(
        self, rng: random.Random, shard_count: int, starter_count: int
    ) -> CoordinatorSettings:
        """Draws a job."""
        terms = self.terms(rng)
        two_phase = self.is_two_phase
        policy = LossPolicy.CONTINUE
        if self.may_wait and rng.random() < 0.5:
            policy = LossPolicy.WAIT
        if two_phase is None:
            two_phase = rng.random() < 0.5
        if self.has_backups or policy is LossPolicy.WAIT:
            two_phase = True
        return CoordinatorSettings(
            job_id="job",
            shard_count=shard_count,
            workers_min=rng.randint(1, starter_count),
            mode=terms.mode,
            staleness_bound=terms.staleness_bound,
            quorum=terms.quorum,
            grace_window_ms=terms.grace_window_ms,
            worker_loss_policy=policy,
            step_atomicity=StepAtomicity.CLOCK if two_phase else StepAtomicity.CHUNK,
            backup_worker_count=rng.randint(1, 2) if self.has_backups else 0,
            gradient_norm_max=self.gradient_norm_max,
            bad_gradient_policy=BadGradientPolicy.REJECT
            if self.gradient_norm_max
            else BadGradientPolicy.SKIP,
            checkpoints=CheckpointSettings(url="") if self.saves else None,
        )
