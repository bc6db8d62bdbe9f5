"""What a shard holds once the coordinator has sent what the job trains."""

from dataclasses import dataclass

from psserver.shard.core.shard import ShardCore
from psserver.shard.core.shard_state import ShardRules
from psserver.shard.tensors.apply_engine import ApplyEngine
from psserver.shard.tensors.compressed_gradients import CompressedGradients
from psserver.shard.tensors.delay_rules import DelayRules
from psserver.shard.tensors.shard_vectors import VectorMemory, private_memory
from pswire.job_settings import JobSettings
from pswire.job_terms import JobTerms
from pswire.placement import Chunk, Placement


@dataclass(slots=True)
class ShardModel:
    """A shard's protocol and its numbers.

    Attributes:
        terms: What the job trains, and how.
        placement: How the tensors are cut.
        engine: Values and optimizer state.
        core: The protocol.
        chunks: Chunks of this shard, in schema order.
        compressed: Reads gradients of fewer bytes.
    """

    terms: JobTerms
    placement: Placement
    engine: ApplyEngine
    core: ShardCore
    chunks: tuple[Chunk, ...]
    compressed: CompressedGradients

    def declare(self, terms: JobTerms) -> None:
        """Takes what was declared of the optimizers since; what is known stays.

        Raises:
            Refusal: For an optimizer that this shard can't run.
        """
        for spec in terms.optimizers[len(self.terms.optimizers) :]:
            self.engine.declare(spec)
        self.terms = terms


def shard_rules(
    settings: JobSettings, shard_index: int, clip_grad_norm: float = 0.0
) -> ShardRules:
    """When a shard of a job applies a push."""
    return ShardRules(
        step_atomicity=settings.step_atomicity,
        backup_worker_count=settings.backup_worker_count,
        is_first=shard_index == 0,
        shard_index=shard_index,
        shard_count=settings.shard_count,
        update=settings.update_rules(clip_grad_norm),
    )


def shard_model(
    terms: JobTerms,
    *,
    settings: JobSettings,
    shard_index: int,
    memory: VectorMemory = private_memory,
) -> ShardModel:
    """A shard at its beginning: values are zeros, to be seeded.

    Raises:
        Refusal: For an optimizer that this shard can't run, or too little memory.
    """
    placement = terms.placement(settings)
    chunks = placement.chunks_by_shard[shard_index]
    delay = DelayRules(
        is_rate_scaled=settings.is_staleness_scaled,
        compensation=settings.delay_compensation,
    )
    engine = ApplyEngine(
        terms,
        placement,
        shard_index,
        delay=delay,
        aggregation=settings.aggregation,
        memory=memory,
    )
    return ShardModel(
        terms=terms,
        placement=placement,
        engine=engine,
        core=ShardCore(
            [chunk.index for chunk in chunks],
            rules=shard_rules(settings, shard_index, terms.clip_grad_norm),
        ),
        chunks=chunks,
        compressed=CompressedGradients(
            terms.compression.push_encoding, engine.buffer_entries
        ),
    )
