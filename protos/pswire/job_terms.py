"""What a job trains, and by which rules that its workers choose in `prepare`."""

from dataclasses import dataclass

from pswire.compression import NO_COMPRESSION, Compression
from pswire.job_settings import JobSettings
from pswire.placement import Placement, place
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
    """

    schema: ModelSchema
    optimizers: tuple[OptimizerSpec, ...]
    clip_grad_norm: float = 0.0
    compression: Compression = NO_COMPRESSION

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

    def chunk_bytes(self, settings: JobSettings) -> int:
        """Bytes of a full chunk, as `place` takes them."""
        return self.compression.chunk_bytes(settings.chunk_bytes)

    def placement(self, settings: JobSettings) -> Placement:
        """How the tensors are cut and laid out over the job's shards."""
        return place(self.schema, settings.shard_count, self.chunk_bytes(settings))
