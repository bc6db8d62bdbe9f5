"""What is fixed about a job when its coordinator starts."""

from dataclasses import dataclass

from pswire.aggregation import MEAN, Aggregation, BadGradientPolicy, UpdateRules
from pswire.membership import LossPolicy, Mode, ModeTerms, StepAtomicity


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Settings of a job, as all of its processes know them.

    Attributes:
        job_id: Unique name of the job.
        shard_count: Shards it has.
        mode: How workers keep together at first.
        staleness_bound: Largest staleness in SSP, in clocks.
        quorum: In mode quorum, pushes with weight that close a clock.
        grace_window_ms: In mode quorum, how much longer a clock waits for more.
        workers_min: Workers that must be there before the first clock.
        lease_ttl_ms: Bound on the detection of a lost process.
        worker_loss_policy: What to do when a worker is lost.
        step_atomicity: When a push is applied.
        backup_worker_count: In BSP, workers that a clock need not wait for.
        is_staleness_scaled: Whether the learning rate of a push is divided by its
            staleness, in SSP and ASP.
        delay_compensation: Strength of delay compensation in SSP and ASP, 0 for none.
        chunk_bytes: Bytes of a full chunk; 0 for what suits the model.
        aggregation: What the gradients of a clock become.
        gradient_norm_max: Largest norm of the gradient of one worker, 0 for any.
        bad_gradient_policy: What becomes of a gradient that is larger or not finite.
    """

    job_id: str
    shard_count: int
    mode: Mode = Mode.BSP
    staleness_bound: int = 0
    quorum: int = 0
    grace_window_ms: int = 0
    workers_min: int = 1
    lease_ttl_ms: int = 10_000
    worker_loss_policy: LossPolicy = LossPolicy.CONTINUE
    step_atomicity: StepAtomicity = StepAtomicity.CHUNK
    backup_worker_count: int = 0
    is_staleness_scaled: bool = False
    delay_compensation: float = 0.0
    chunk_bytes: int = 0
    aggregation: Aggregation = MEAN
    gradient_norm_max: float = 0.0
    bad_gradient_policy: BadGradientPolicy = BadGradientPolicy.SKIP

    @property
    def terms(self) -> ModeTerms:
        """The mode at first, with its numbers."""
        return ModeTerms.of(
            self.mode,
            staleness_bound=self.staleness_bound,
            quorum=self.quorum,
            grace_window_ms=self.grace_window_ms,
        )

    def update_rules(self, clip_grad_norm: float) -> UpdateRules:
        """How pushes become updates, with the norm that the workers clip to."""
        return UpdateRules(
            clip_grad_norm=clip_grad_norm,
            gradient_norm_max=self.gradient_norm_max,
            bad_gradients=self.bad_gradient_policy,
            aggregation=self.aggregation,
        )
