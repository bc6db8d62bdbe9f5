"""What a shard holds once the coordinator has told what the job trains."""

from dataclasses import dataclass

from psserver.shard.core.shard import ShardCore
from psserver.shard.core.shard_state import ShardRules
from psserver.shard.tensors.apply_engine import ApplyEngine
from psserver.shard.tensors.compressed_gradients import CompressedGradients
from psserver.shard.tensors.delay_rules import DelayRules
from psserver.shard.tensors.shard_vectors import VectorMemory, private_memory
from pswire.compression import NO_COMPRESSION, Compression
from pswire.job_settings import JobSettings
from pswire.placement import Chunk, Placement
from pswire.schema import ModelSchema, OptimizerSpec


@dataclass(slots=True)
class ShardModel:
    """A shard's protocol and its numbers.

    Attributes:
        schema: Tensors of the job.
        optimizers: Optimizers of the job, as declared, of each the first one first.
        placement: How the tensors are cut.
        engine: Values and optimizer state.
        core: The protocol.
        chunks: Chunks of this shard, in schema order.
        compression: How gradients and values are sent.
        compressed: Reads gradients of fewer bytes.
    """

    schema: ModelSchema
    optimizers: tuple[OptimizerSpec, ...]
    placement: Placement
    engine: ApplyEngine
    core: ShardCore
    chunks: tuple[Chunk, ...]
    compression: Compression
    compressed: CompressedGradients

    def declare(self, optimizers: tuple[OptimizerSpec, ...]) -> None:
        """Takes what was declared of the optimizers since; what is known stays.

        Raises:
            Refusal: For an optimizer that this shard can't run.
        """
        for spec in optimizers[len(self.optimizers) :]:
            self.engine.declare(spec)
        self.optimizers = optimizers


def shard_rules(
    settings: JobSettings, shard_index: int, clip_grad_norm: float = 0.0
) -> ShardRules:
    """When a shard of a job applies a push."""
    return ShardRules(
        step_atomicity=settings.step_atomicity,
        backup_worker_count=settings.backup_worker_count,
        is_first=shard_index == 0,
        clip_grad_norm=clip_grad_norm,
    )


def shard_model(
    schema: ModelSchema,
    placement: Placement,
    optimizers: tuple[OptimizerSpec, ...],
    *,
    settings: JobSettings,
    shard_index: int,
    clip_grad_norm: float = 0.0,
    compression: Compression = NO_COMPRESSION,
    memory: VectorMemory = private_memory,
) -> ShardModel:
    """A shard at its beginning: values are zeros, to be seeded.

    Raises:
        Refusal: For an optimizer that this shard can't run, or too little memory.
    """
    chunks = placement.chunks_by_shard[shard_index]
    delay = DelayRules(
        is_rate_scaled=settings.is_staleness_scaled,
        compensation=settings.delay_compensation,
    )
    engine = ApplyEngine(
        schema,
        placement,
        shard_index,
        optimizers,
        delay=delay,
        compression=compression,
        memory=memory,
    )
    return ShardModel(
        schema=schema,
        optimizers=optimizers,
        placement=placement,
        engine=engine,
        core=ShardCore(
            [chunk.index for chunk in chunks],
            rules=shard_rules(settings, shard_index, clip_grad_norm),
        ),
        chunks=chunks,
        compression=compression,
        compressed=CompressedGradients(
            compression.push_encoding, engine.buffer_entries
        ),
    )
