"""What a job trains, and by which rules that its workers choose in `prepare`."""

from dataclasses import dataclass

from pswire.aggregation import UpdateRules, rules_that
from pswire.compression import NO_COMPRESSION, Compression
from pswire.job_settings import JobSettings
from pswire.optimizers import SUPPORTED, SparseGradients
from pswire.placement import Placement, place
from pswire.privacy import Privacy
from pswire.schema import ModelSchema, OptimizerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms:
    """What all workers of a job agree on; those of the first one become the job's.

    Attributes:
        schema: Tensors of the job.
        optimizers: Its optimizers, in the order in which `prepare` got them, and then
            what was declared of them since, oldest first.
        clip_grad_norm: Global norm that gradients are clipped to, 0 for no clipping.
        compression: How gradients and values are sent.
        privacy: What is promised about samples, `None` for nothing.
        strategy: How workers take local steps, in words; empty where they take none.
    """

    schema: ModelSchema
    optimizers: tuple[OptimizerSpec, ...]
    clip_grad_norm: float = 0.0
    compression: Compression = NO_COMPRESSION
    privacy: Privacy | None = None
    strategy: str = ""

    @property
    def first_optimizers(self) -> tuple[OptimizerSpec, ...]:
        """Of each optimizer its first declaration."""
        first: dict[str, OptimizerSpec] = {}
        for spec in self.optimizers:
            first.setdefault(spec.name, spec)
        return tuple(first.values())

    @property
    def declared(self) -> tuple[OptimizerSpec, ...]:
        """What was declared of the optimizers since, oldest first."""
        return self.optimizers[len(self.first_optimizers) :]

    @property
    def byte_count(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.byte_count for entry in self.schema.entries)

    def problem(self, update: UpdateRules) -> str:
        """Why they can't go with how pushes become updates; empty if they can."""
        loss_is_sum = any(spec.loss_is_sum for spec in self.optimizers)
        classes = {spec.class_name for spec in self.optimizers}
        rule, name = update.aggregation.rule, f"--aggregation {update.aggregation}"
        if loss_is_sum and update.aggregation.is_robust:
            return (
                f"{name} can't go with loss=\"sum\": it estimates what a good worker's "
                "gradient is, and not the sum over all; take the mean of the loss"
            )
        if loss_is_sum and update.measures_pairs:
            return (
                '--gradient-norm-max with clip_grad_norm can\'t go with loss="sum"; '
                "leave out one of them"
            )
        sparse = [c for c in classes if SUPPORTED[c].sparse is SparseGradients.REQUIRED]
        if rule.is_coordinatewise and sparse:
            return (
                f"{name} can't go with {sparse[0]}, whose gradients are sparse: a row "
                "that most workers lack would never change; use another optimizer, or "
                f"{' or '.join(rules_that(lambda each: each.selects))}"
            )
        if rule.is_coordinatewise and self.compression.push == "topk":
            return (
                f'{name} can\'t go with compression="topk": most workers send 0 for '
                "most elements, and so would the update be; use another compression, "
                f"or {' or '.join(rules_that(lambda each: each.selects))}"
            )
        if rule.is_coordinatewise and update.gradient_norm_max and self.clip_grad_norm:
            return (
                f"{name} can't go with both --gradient-norm-max and clip_grad_norm: "
                "whose gradients count is known only when all are measured, and the "
                "norm of what is made of them only after that; leave out one of them"
            )
        return ""

    def chunk_bytes(self, settings: JobSettings) -> int:
        """Bytes of a full chunk, as `place` takes them."""
        return self.compression.chunk_bytes(settings.chunk_bytes)

    def placement(self, settings: JobSettings) -> Placement:
        """How the tensors are cut and laid out over the job's shards."""
        return place(self.schema, settings.shard_count, self.chunk_bytes(settings))
